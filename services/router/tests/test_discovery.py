"""Discovery finds workers, follows changes, and keeps the last workers when it fails."""

import asyncio
import contextlib
import logging
import socket
import threading
from datetime import datetime, timedelta

import pytest
from fake_kubernetes import NAMESPACE, SELECTOR, TOKEN, FakeEndpointSlices, endpoint, endpoint_slice
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from lockstep_common.telemetry import REGISTRY
from lockstep_router.discovery import Report, WorkerAddress, choose_discovery
from lockstep_router.discovery.dns import Dns
from lockstep_router.discovery.endpoint_slices import EndpointSlices, workers_of
from lockstep_router.discovery.static import StaticList
from lockstep_router.settings import RouterSettings
from router_cluster import eventually


class Heard:
    """A report, and every set that came with it."""

    def __init__(self):
        self.sets = []
        self.report = Report(self.sets.append)

    @property
    def workers(self):
        return self.report.workers

    def has(self, *workers):
        expected = {WorkerAddress(worker) if isinstance(worker, str) else WorkerAddress(*worker) for worker in workers}
        return lambda: self.workers == expected


@contextlib.asynccontextmanager
async def running(discovery):
    heard = Heard()
    task = asyncio.create_task(discovery.run(heard.report))
    try:
        yield heard
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def value(name):
    return REGISTRY.get_sample_value(f"lockstep_router_{name}")


# A list.


async def test_listed_workers_are_found_at_once_and_never_old():
    async with running(StaticList(["a:1", "unix:/b"])) as heard:
        await eventually(heard.has("a:1", "unix:/b"))
        await asyncio.sleep(0.05)
        assert heard.report.age_s() == 0
        assert value("discovered_workers") == 2
        assert value("discovery_age_seconds") == 0
        assert not heard.report.lists_none


# DNS.


class Zone:
    """Names and addresses; a name that is not there cannot be resolved."""

    def __init__(self, **names):
        self.names = names

    async def __call__(self, host, port):
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]


async def test_every_address_of_a_name_is_a_worker():
    zone = Zone(workers=["10.0.0.1", "fd00::1"], more=["10.0.0.3"])
    async with running(Dns(["workers:9000", "more:9001"], 0.05, zone)) as heard:
        await eventually(heard.has("10.0.0.1:9000", "[fd00::1]:9000", "10.0.0.3:9001"))
        zone.names["workers"] = ["10.0.0.2"]
        await eventually(heard.has("10.0.0.2:9000", "10.0.0.3:9001"))


async def test_name_that_cannot_be_resolved_any_more_keeps_its_addresses(caplog):
    caplog.set_level(logging.INFO, "lockstep")
    zone = Zone(workers=["10.0.0.1"], more=["10.0.0.3"])
    errors = value("discovery_errors_total")
    async with running(Dns(["workers:9000", "more:9001"], 0.05, zone)) as heard:
        await eventually(heard.has("10.0.0.1:9000", "10.0.0.3:9001"))
        del zone.names["workers"]
        zone.names["more"] = ["10.0.0.4"]
        await eventually(heard.has("10.0.0.1:9000", "10.0.0.4:9001"))
        assert heard.report.problem == "workers:9000: Name or service not known"
        await eventually(lambda: value("discovery_errors_total") >= errors + 3)
        assert heard.report.age_s() > 0.05
        assert [record.message for record in caplog.records].count(
            "discovery fails: the workers known so far are kept"
        ) == 1
        zone.names["workers"] = ["10.0.0.2"]
        await eventually(heard.has("10.0.0.2:9000", "10.0.0.4:9001"))
        assert heard.report.problem == ""


async def test_nothing_is_said_while_no_name_was_ever_resolved():
    async with running(Dns(["workers:9000"], 0.05, Zone())) as heard:
        await eventually(lambda: heard.report.problem)
        assert heard.sets == []


async def test_names_without_an_answer_do_not_say_that_there_is_no_worker():
    zone = Zone()
    async with running(Dns(["workers:9000"], 0.05, zone)) as heard:
        await eventually(lambda: heard.report.problem)
        assert not heard.report.lists_none
        zone.names["workers"] = []
        await eventually(lambda: heard.report.lists_none)


async def test_the_systems_resolver_is_asked():
    async with running(Dns(["localhost:9000", "no.such.host.invalid:1"], 60)) as heard:
        await eventually(lambda: WorkerAddress("127.0.0.1:9000") in heard.workers, timeout_s=20)
        assert "no.such.host.invalid:1" in heard.report.problem


class SlowResolver:
    """A system's resolver without a DNS server that answers."""

    def __init__(self, monkeypatch):
        self.calls, self.answers = 0, threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, *_, **__):
        self.calls += 1
        self.answers.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 9000))]


def test_a_resolver_that_does_not_answer_keeps_no_process_from_ending(monkeypatch):
    resolver = SlowResolver(monkeypatch)

    async def look_up():
        looking = asyncio.create_task(Dns(["workers:9000"], 60).resolve())
        await eventually(lambda: resolver.calls)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    router = threading.Thread(target=asyncio.run, args=(look_up(),), daemon=True)
    try:
        router.start()
        router.join(30)
        assert not router.is_alive()
    finally:
        resolver.answers.set()


async def test_a_name_that_is_being_looked_up_is_not_looked_up_again(monkeypatch):
    resolver, dns = SlowResolver(monkeypatch), Dns(["workers:9000"], 60)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await dns.resolve()
    finally:
        resolver.answers.set()
    assert await dns.resolve() == ({WorkerAddress("10.0.0.1:9000")}, "")
    assert resolver.calls <= 2


# What EndpointSlices say.


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (endpoint_slice("a", endpoint("10.0.0.1", "w-0")), {("10.0.0.1:9000", "w-0")}),
        (endpoint_slice("a", endpoint("10.0.0.1", "w-0", ready=False)), {("10.0.0.1:9000", "w-0")}),
        (endpoint_slice("a", endpoint("10.0.0.1", "w-0", ready=False, terminating=True)), {("10.0.0.1:9000", "w-0")}),
        (endpoint_slice("a", endpoint("10.0.0.1")), {("10.0.0.1:9000", None)}),
        (endpoint_slice("a", endpoint("fd00::1", "w-0"), family="IPv6"), {("[fd00::1]:9000", "w-0")}),
        (endpoint_slice("a", endpoint("w.example", "w-0"), family="FQDN"), {("w.example:9000", "w-0")}),
        (endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"port": 7000}]), {("10.0.0.1:7000", None)}),
        (
            endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"name": "x", "port": 1}, {"name": "grpc", "port": 2}]),
            {("10.0.0.1:2", None)},
        ),
        (endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"name": "x", "port": 1}, {"name": "y", "port": 2}]), set()),
        (endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"name": "grpc"}]), set()),
        (endpoint_slice("a", endpoint("10.0.0.1"), ports=None), set()),
        (endpoint_slice("a"), set()),
    ],
)
def test_workers_of_a_slice(given, found):
    assert workers_of([given]) == {WorkerAddress(*each) for each in found}


def test_node_as_endpoint_is_no_pod():
    entry = endpoint("10.0.0.1")
    entry["targetRef"] = {"kind": "Node", "name": "n", "uid": "u"}
    assert workers_of([endpoint_slice("a", entry)]) == {WorkerAddress("10.0.0.1:9000")}


def test_pod_of_a_dual_stack_service_is_one_worker():
    six = endpoint_slice("a", endpoint("fd00::1", "w-0"), endpoint("fd00::2", "w-1"), family="IPv6")
    four = endpoint_slice("b", endpoint("10.0.0.1", "w-0"))
    found = workers_of([six, four])
    assert found == {WorkerAddress("10.0.0.1:9000", "w-0"), WorkerAddress("[fd00::2]:9000", "w-1")}
    assert {each.worker_id: each.alternates for each in found} == {"w-0": ("[fd00::1]:9000",), "w-1": ()}


def test_second_address_that_appears_later_is_reported():
    heard = []
    report = Report(heard.append)
    report.update(frozenset({WorkerAddress("10.0.0.1:9000", "w-0")}))
    both = frozenset({WorkerAddress("10.0.0.1:9000", "w-0", ("[fd00::1]:9000",))})
    for _ in range(2):
        report.update(both)
    assert len(heard) == 2
    assert [each.alternates for each in heard[1]] == [("[fd00::1]:9000",)]


def test_pod_and_its_successor_of_the_same_name_are_two():
    old, new = endpoint("10.0.0.1", "w-0", uid="old"), endpoint("10.0.0.2", "w-0", uid="new")
    assert len(workers_of([endpoint_slice("a", old, new)])) == 2


# The API server.


@pytest.fixture
async def api(tmp_path, monkeypatch):
    made = await FakeEndpointSlices().start()
    made.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield made
    await made.stop()


def slices(**changes):
    quick = {"backoff_initial_s": 0.02, "backoff_max_s": 0.1, "deadline_s": 5.0}
    return EndpointSlices(NAMESPACE, SELECTOR, **(quick | changes))


async def test_slices_are_listed_and_then_watched(api):
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    async with running(slices()) as heard:
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("b", endpoint("10.0.0.2", "w-1")))
        await eventually(heard.has(("10.0.0.1:9000", "w-0"), ("10.0.0.2:9000", "w-1")))
        api.put(endpoint_slice("a", endpoint("10.0.0.3", "w-0", uid="new")))
        await eventually(heard.has(("10.0.0.3:9000", "w-0"), ("10.0.0.2:9000", "w-1")))
        api.delete("b")
        await eventually(heard.has(("10.0.0.3:9000", "w-0")))
        api.put(endpoint_slice("a"))
        await eventually(heard.has())
        assert (api.lists, api.watches) == (1, 1)
        assert heard.report.problem == ""
    assert api.tokens == {f"Bearer {TOKEN}"}


async def test_what_has_not_changed_is_no_news(api):
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    async with running(slices()) as heard:
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0", ready=False)))
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0"), endpoint("10.0.0.2", "w-1")))
        await eventually(lambda: len(heard.workers) == 2)
        assert len(heard.sets) == 2


async def test_everything_is_listed_again_now_and_then(api):
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    async with running(slices(resync_s=1)) as heard:
        await eventually(lambda: api.watches)
        api.slices["b"] = endpoint_slice("b", endpoint("10.0.0.2", "w-1"))  # and no event
        await eventually(lambda: len(heard.workers) == 2)
        assert value("discovery_age_seconds") < 10


async def test_that_there_is_no_worker_is_known_from_the_first_answer_on_and_unknown_after_a_failure(api):
    api.list_status = 503
    async with running(slices()) as heard:
        await eventually(lambda: heard.report.problem)
        assert not heard.report.lists_none
        assert heard.sets == []
        api.list_status = 200
        await eventually(lambda: heard.report.lists_none)
        assert heard.sets == [frozenset()], "its waiters are woken"
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
        await eventually(lambda: heard.workers)
        assert not heard.report.lists_none
        api.delete("a")
        await eventually(lambda: heard.report.lists_none)
        await api.stop()
        await eventually(lambda: not heard.report.lists_none)


async def test_watch_from_a_forgotten_version_lists_again(api, caplog):
    caplog.set_level(logging.WARNING, "lockstep")
    async with running(slices()) as heard:
        await eventually(lambda: api.watches)
        api.forget()
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))
        assert api.lists >= 2
        api.watch_status = 410
        api.forget()
        await eventually(lambda: api.lists >= 5)
        api.watch_status = 200
        api.put(endpoint_slice("b", endpoint("10.0.0.2", "w-1")))
        await eventually(lambda: len(heard.workers) == 2)
    assert not caplog.records


async def test_broken_watch_is_made_anew_without_a_word(api, caplog):
    caplog.set_level(logging.WARNING, "lockstep")
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    async with running(slices()) as heard:
        for _ in range(3):
            seen = api.watches
            # Broken until there is a new one: the watch may not be open yet.
            await eventually(lambda seen=seen: api.break_watches() or api.watches > seen)
        api.put(endpoint_slice("b", endpoint("10.0.0.2", "w-1")))
        await eventually(lambda: len(heard.workers) == 2)
    assert not caplog.records


@pytest.mark.parametrize(("size", "lists"), [(1 << 20, 1), (9 << 20, 2)])
async def test_event_of_any_size_is_used(api, caplog, size, lists):
    """An event is one line. One that is too long for a watch is found by the next list."""
    caplog.set_level(logging.WARNING, "lockstep")
    async with running(slices()) as heard:
        await eventually(lambda: api.watches)
        large = endpoint_slice("a", endpoint("10.0.0.1", "w-0"))
        large["metadata"]["annotations"] = {"padding": "x" * size}
        api.put(large)
        api.put(endpoint_slice("b", endpoint("10.0.0.2", "w-1")))
        await eventually(heard.has(("10.0.0.1:9000", "w-0"), ("10.0.0.2:9000", "w-1")))
        assert api.lists == lists
        assert heard.report.problem == ""
    assert not caplog.records


async def test_server_that_goes_away_takes_no_worker_along(api, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    errors = value("discovery_errors_total")
    async with running(slices()) as heard:
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))
        await eventually(lambda: api.watches)
        await api.stop()
        await eventually(lambda: value("discovery_errors_total") >= errors + 3)
        assert heard.workers == {WorkerAddress("10.0.0.1:9000", "w-0")}
        assert heard.report.problem.startswith("the API server cannot be asked")
        api.slices["b"] = endpoint_slice("b", endpoint("10.0.0.2", "w-1"))
        await api.start()
        await eventually(lambda: len(heard.workers) == 2)
        await eventually(lambda: heard.report.problem == "")
    said = [record.message for record in caplog.records]
    assert said.count("discovery fails: the workers known so far are kept") == 1
    assert said.count("discovery works again") == 1
    assert TOKEN not in caplog.text


async def test_server_that_never_answers_is_given_up_and_asked_again(api):
    api.mute = True
    async with running(slices(deadline_s=0.3)) as heard:
        await eventually(lambda: heard.report.problem == "the API server does not answer in time")
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
        api.mute = False
        await eventually(heard.has(("10.0.0.1:9000", "w-0")), timeout_s=10)


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_refused_list_changes_nothing(api, status):
    api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
    async with running(slices(resync_s=1)) as heard:
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))
        api.list_status = status
        await eventually(lambda: heard.report.problem == f"the API server answers {status}: not now")
        assert len(heard.workers) == 1


async def test_without_the_right_to_watch_the_list_still_counts(api):
    api.watch_status = 403
    async with running(slices()) as heard:
        await eventually(lambda: heard.report.problem == "the API server answers 403: no watching")
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))


async def test_answer_that_makes_no_sense_is_a_failure_and_not_the_end(api):
    api.slices["a"] = {"metadata": {}}
    async with running(slices()) as heard:
        await eventually(lambda: heard.report.problem)
        api.slices.clear()
        api.put(endpoint_slice("a", endpoint("10.0.0.1", "w-0")))
        await eventually(heard.has(("10.0.0.1:9000", "w-0")))


async def test_names_stand_in_until_the_server_has_answered_once(api):
    await api.stop()
    zone = Zone(workers=["10.0.0.1"])
    async with running(slices(fallback=Dns(["workers:9000"], 60, zone))) as heard:
        await eventually(heard.has("10.0.0.1:9000"))
        assert heard.report.problem
        zone.names["workers"] = ["10.0.0.1", "10.0.0.2"]
        await eventually(lambda: len(heard.workers) == 2)
        api.put(endpoint_slice("a", endpoint("10.0.0.7", "w-0")))
        await api.start()
        await eventually(heard.has(("10.0.0.7:9000", "w-0")))
        await eventually(lambda: api.watches)
        await api.stop()
        await eventually(lambda: heard.report.problem)
        await asyncio.sleep(0.2)
        assert heard.workers == {WorkerAddress("10.0.0.7:9000", "w-0")}, "the names are not asked again"


@pytest.mark.parametrize("content", [None, "", "{a: [", "a: 1", "clusters: 3\ncurrent-context: c"])
async def test_way_to_the_server_may_be_missing(monkeypatch, tmp_path, content):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with running(slices()) as heard:
        await eventually(lambda: heard.report.problem.startswith("no way to the API server"))


async def test_service_account_without_a_token_is_a_problem_like_any_other(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    async with running(slices()) as heard:
        await eventually(lambda: heard.report.problem)


async def test_rotated_token_of_a_service_account_is_read_anew(tmp_path):
    """What the client library promises: the file is read again when it was last read over a minute ago."""
    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("old")
    certificate.write_text("some certificate")
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    loader = InClusterConfigLoader(token_filename=token, cert_filename=certificate, environ=where)
    configuration = Configuration()
    loader.load_and_set(configuration)
    token.write_text("new")
    assert await configuration.get_api_key_with_prefix("BearerToken") == "bearer old"
    assert loader.token_expires_at - datetime.now() <= timedelta(minutes=1)
    loader.token_expires_at = datetime.now()
    assert await configuration.get_api_key_with_prefix("BearerToken") == "bearer new"


# The settings.


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"workers": "a:1"}, StaticList),
        ({"discovery": "dns", "workers_dns": "a:1"}, Dns),
        (
            {"discovery": "kubernetes", "kubernetes_selector": "a=b", "pod_namespace": "chat", "workers_dns": "a:1"},
            EndpointSlices,
        ),
    ],
)
def test_settings_choose(settings, kind):
    assert isinstance(choose_discovery(RouterSettings(**settings)), kind)
