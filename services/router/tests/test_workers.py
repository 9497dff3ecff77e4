"""Workers come and go: links are made, retired and taken up again, and no stream, session or task is lost over it."""

import asyncio
import contextlib
import gc
import logging

import pytest
from fake_kubernetes import NAMESPACE, SELECTOR, FakeEndpointSlices, endpoint, endpoint_slice
from lockstep_api.v1 import worker_pb2
from lockstep_common.ports import free_port
from lockstep_common.telemetry import REGISTRY
from lockstep_router import metrics
from lockstep_router.discovery import WorkerAddress
from lockstep_router.discovery.endpoint_slices import EndpointSlices, workers_of
from lockstep_router.policies import RequestFacts, rank
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.streams import Stream
from lockstep_router.streams.journal import Journal
from lockstep_router.workers import Link, LinkState
from router_cluster import eventually
from scripted_worker import Script, ScriptedWorker

FAST = {"backoff_initial_s": 0.02, "backoff_max_s": 0.1}
PROMPT = [5, 6, 7]


class GivenDiscovery:
    """A discovery that reports what a test gives it."""

    def __init__(self):
        self._report = None

    async def run(self, report):
        self._report = report
        await asyncio.Event().wait()

    async def tell(self, *workers):
        (await self._given()).update(frozenset(WorkerAddress(*each) for each in workers))

    async def fail(self):
        (await self._given()).fail("no answer")

    async def _given(self):
        while self._report is None:
            await asyncio.sleep(0)
        return self._report


class Routed:
    """A router whose workers a test names."""

    def __init__(self, router, given):
        self.router = router
        self.tell = given.tell
        self.fail = given.fail

    @property
    def workers(self):
        return self.router.workers

    @property
    def states(self):
        return {(link.target, link.address.worker_id): link.state.value for link in self.workers.links}

    def ready_ids(self):
        return sorted(link.worker_id for link in self.workers.ready())

    def pick(self, session):
        return self.workers.pick("reference", RequestFacts(session), self.workers.ready()).worker_id

    def stream(self, session="user:u", tokens=12):
        journal = Journal(
            stream_id=f"stream of {session}",
            session=session,
            model="reference",
            digest="model-1",
            prompt_ids=PROMPT,
            sampling=_sampling(tokens),
        )
        stream = Stream(journal, self.workers, self.router.settings, lambda: None)
        return journal, asyncio.create_task(stream.run())


def workers_in_state(state):
    return REGISTRY.get_sample_value("lockstep_router_workers", {"state": state})


def _sampling(tokens):
    submit = worker_pb2.Submit()
    submit.sampling.max_tokens = tokens
    submit.sampling.seed = 7
    return submit.sampling


@pytest.fixture
async def routed():
    given = GivenDiscovery()
    async with Router(RouterSettings(workers=["unix:/not/asked"], **FAST), given) as router:
        yield Routed(router, given)


@pytest.fixture
async def make_worker(tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def make(worker_id, path=None):
            worker = ScriptedWorker(worker_id, path or tmp_path / f"{worker_id}.sock")
            stack.push_async_callback(worker.kill)
            return await worker.start()

        yield make


async def test_router_is_ready_while_there_is_no_worker_at_all(routed, make_worker):
    """Requests wait then and are counted, so that an alert or an autoscaler sees them."""
    assert routed.router.unready == "no worker is ready", "discovery has not answered yet"
    change = asyncio.create_task(routed.workers.wait_change(asyncio.get_running_loop().time() + 30))
    await asyncio.sleep(0)
    await routed.tell()
    assert await change
    assert routed.router.unready is None
    await routed.fail()
    assert routed.router.unready == "no worker is ready"
    await routed.tell()
    assert routed.router.unready is None
    await routed.tell(("unix:/nobody", "w-0"))
    assert routed.router.unready == "no worker is ready", "another router may reach it"
    worker = await make_worker("w-1")
    await routed.tell((worker.target, "w-1"))
    await eventually(lambda: routed.router.unready is None)
    await worker.kill()
    await eventually(lambda: routed.router.unready == "no worker is ready")
    await routed.tell()
    assert routed.router.unready is None
    routed.router.leaving = True
    assert routed.router.unready == "draining"


async def test_workers_come_and_go(routed, make_worker):
    first, second = await make_worker("w-0"), await make_worker("w-1")
    await routed.tell()
    assert not routed.workers.links
    await routed.tell((first.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    await routed.tell((first.target, "w-0"), (second.target, "w-1"))
    await eventually(lambda: routed.ready_ids() == ["w-0", "w-1"])
    await routed.tell((second.target, "w-1"))
    assert routed.ready_ids() == ["w-1"]
    await eventually(lambda: not first.connections)
    assert len(routed.workers.links) == 1
    assert metrics.WORKERS.labels("ready")._value.get() == 1


async def test_further_address_of_a_worker_changes_no_link(routed, make_worker):
    worker = await make_worker("w-0")
    await routed.tell((worker.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    (link,) = routed.workers.links
    await routed.tell((worker.target, "w-0", ("[fd00::1]:9000",)))
    assert routed.workers.links == (link,)
    assert link.address.alternates == ("[fd00::1]:9000",)
    assert len(worker.connections) == 1


async def test_running_stream_ends_on_its_retired_worker(routed, make_worker):
    worker = await make_worker("w-0")
    worker.script = Script(delay_s=0.15)
    await routed.tell((worker.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    journal, running = routed.stream()
    await eventually(lambda: journal.emitted_ids)
    other = await make_worker("w-1")
    await routed.tell((worker.target, "w-0"), (other.target, "w-1"))
    await eventually(lambda: routed.ready_ids() == ["w-0", "w-1"])
    await routed.tell((other.target, "w-1"))
    assert routed.states[worker.target, "w-0"] == LinkState.RETIRED
    assert routed.ready_ids() == ["w-1"]
    assert workers_in_state("retired") == 1
    await asyncio.wait_for(running, 30)
    assert len(journal.emitted_ids) == 12
    assert [submit.attempt for submit in worker.submits] == [1]
    await eventually(lambda: len(routed.workers.links) == 1)
    assert workers_in_state("retired") == 0


async def test_stream_leaves_a_retired_worker_that_breaks_and_nobody_dials_that_again(routed, make_worker):
    first, second = await make_worker("w-0"), await make_worker("w-1")
    first.script = Script(hang_after=3)
    await routed.tell((first.target, None))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    journal, running = routed.stream()
    await eventually(lambda: len(journal.emitted_ids) == 3)
    await routed.tell((second.target, None))
    await eventually(lambda: routed.ready_ids() == ["w-1"])
    await first.restart()
    await asyncio.wait_for(running, 30)
    assert len(journal.emitted_ids) == 12
    await eventually(lambda: len(routed.workers.links) == 1)
    await asyncio.sleep(0.3)
    assert not first.connections


async def test_silence_of_a_retired_worker_is_taken_for_its_end_sooner(make_worker):
    """A pod deleted without grace may lose its network before its processes are killed: there is no reset."""
    first, second = await make_worker("w-0"), await make_worker("w-1")
    first.script = Script(hang_after=3)
    given, patience_s = GivenDiscovery(), 9.0
    settings = RouterSettings(workers=["unix:/not/asked"], **FAST | {"heartbeat_timeout_s": patience_s})
    async with Router(settings, given) as router:
        routed = Routed(router, given)
        await routed.tell((first.target, "w-0"))
        await eventually(lambda: routed.ready_ids() == ["w-0"])
        journal, running = routed.stream()
        await eventually(lambda: len(journal.emitted_ids) == 3)
        await routed.tell((second.target, "w-1"))
        await eventually(lambda: routed.ready_ids() == ["w-1"])
        began = routed.workers.clock.now()  # what the router waits by: pauses of the machine do not count
        first.silent = True
        await asyncio.wait_for(running, 60)
        assert routed.workers.clock.now() - began < 0.9 * patience_s
        assert len(journal.emitted_ids) == 12


async def test_worker_that_comes_back_is_taken_up_again(routed, make_worker):
    worker = await make_worker("w-0")
    worker.script = Script(delay_s=0.15)
    await routed.tell((worker.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    (link,) = routed.workers.links
    journal, running = routed.stream()
    await eventually(lambda: journal.emitted_ids)
    other = await make_worker("w-1")
    await routed.tell((worker.target, "w-0"), (other.target, "w-1"))
    await eventually(lambda: routed.ready_ids() == ["w-0", "w-1"])
    await routed.tell((other.target, "w-1"))
    assert link.state is LinkState.RETIRED
    await routed.tell((worker.target, "w-0"), (other.target, "w-1"))
    assert link in routed.workers.ready(), "the same connection"
    await asyncio.wait_for(running, 30)
    await routed.tell((other.target, "w-1"))
    await eventually(lambda: link not in routed.workers.links)
    await routed.tell((worker.target, "w-0"), (other.target, "w-1"))
    await eventually(lambda: routed.ready_ids() == ["w-0", "w-1"])
    assert link not in routed.workers.links


async def names(routed, make_worker, count):
    """This many workers, in use."""
    workers = [await make_worker(f"w-{number}") for number in range(count)]
    given = [(worker.target, worker.worker_id) for worker in workers]
    await routed.tell(*given)
    await eventually(lambda: len(routed.ready_ids()) == count)
    return workers, given


async def test_discovery_that_lists_nobody_any_more_retires_no_worker_that_is_well(routed, make_worker, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    workers, given = await names(routed, make_worker, 3)
    links = routed.workers.links
    await routed.tell()
    assert routed.ready_ids() == ["w-0", "w-1", "w-2"]
    assert metrics.UNLISTED_WORKERS._value.get() == 3
    _, running = routed.stream()
    await asyncio.wait_for(running, 30)
    workers[0].announce(state=worker_pb2.WORKER_STATE_DRAINING)
    await eventually(lambda: len(routed.workers.links) == 2)
    await workers[1].kill()
    await eventually(lambda: len(routed.workers.links) == 1)
    assert routed.ready_ids() == ["w-2"], "those that end are retired, as they would have been"
    await routed.tell(*given)
    await workers[1].restart()
    workers[0].announce(state=worker_pb2.WORKER_STATE_READY)
    await eventually(lambda: routed.ready_ids() == ["w-0", "w-1", "w-2"])
    assert links[2] in routed.workers.links
    assert metrics.UNLISTED_WORKERS._value.get() == 0
    said = [record.message for record in caplog.records]
    assert said.count("discovery no longer lists workers that are connected and well: they stay in use") == 1


@pytest.mark.parametrize(("listed", "in_use"), [(1, 4), (2, 2), (3, 3)])
async def test_most_workers_are_not_retired_all_at_once(routed, make_worker, listed, in_use):
    _, given = await names(routed, make_worker, 4)
    await routed.tell(*given[:listed])
    assert len(routed.ready_ids()) == in_use
    await eventually(lambda: len(routed.workers.links) == in_use)


async def test_workers_that_are_replaced_by_others_are_used_until_those_are_ready(routed, make_worker):
    old, new = await make_worker("w-0"), await make_worker("w-1")
    new.worker_id = "w-1"
    await new.kill()
    await routed.tell((old.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    await routed.tell((new.target, "w-1"))
    assert routed.ready_ids() == ["w-0"]
    await new.start()
    await eventually(lambda: routed.ready_ids() == ["w-1"])


async def test_other_pod_at_the_same_address_is_not_taken_for_the_old_one(routed, make_worker, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    old = await make_worker("w-0", tmp_path / "address.sock")
    await routed.tell((old.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    await old.kill()
    other = await make_worker("w-5", tmp_path / "address.sock")
    (link,) = routed.workers.links
    await eventually(lambda: "'w-5' and not 'w-0'" in link.problem)
    assert routed.ready_ids() == []
    assert "w-5" not in routed.workers.models
    await routed.tell((other.target, "w-5"))
    await eventually(lambda: routed.ready_ids() == ["w-5"])
    await eventually(lambda: routed.states == {(other.target, "w-5"): "ready"})
    assert any("not 'w-0'" in str(getattr(record, "problem", "")) for record in caplog.records)


async def test_worker_that_takes_another_name_is_left(routed, make_worker):
    worker = await make_worker("w-0")
    await routed.tell((worker.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    worker.worker_id = "w-9"
    worker.announce(epoch=2)
    await eventually(lambda: "w-9" in routed.workers.links[0].problem)
    assert routed.ready_ids() == []


async def test_name_is_added_to_a_worker_that_was_known_by_its_address(routed, make_worker):
    worker = await make_worker("w-0")
    await routed.tell((worker.target, None))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    (link,) = routed.workers.links
    await routed.tell((worker.target, "w-0"))
    assert routed.workers.ready() == [link]
    await routed.tell((worker.target, "w-1"))
    await eventually(lambda: "'w-0' and not 'w-1'" in routed.workers.links[-1].problem)
    assert routed.workers.ready() == [link], "it is connected and says its name itself"


async def test_two_addresses_of_one_worker_count_once(routed, make_worker, tmp_path):
    worker = await make_worker("w-0")
    alias = tmp_path / "alias.sock"
    alias.symlink_to(worker.path)
    await routed.tell((worker.target, None), (f"unix:{alias}", None))
    await eventually(lambda: list(routed.states.values()) == ["ready", "ready"])
    assert routed.ready_ids() == ["w-0"]
    journal, running = routed.stream()
    await asyncio.wait_for(running, 30)
    assert len(journal.emitted_ids) == 12


async def test_of_two_workers_with_one_id_the_newer_gets_the_streams(routed, make_worker, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "lockstep")
    old = await make_worker("w-0")
    new = await make_worker("w-0", tmp_path / "new.sock")
    assert new.incarnation > old.incarnation
    await routed.tell((old.target, "w-0"), (new.target, "w-0"))
    await eventually(lambda: list(routed.states.values()) == ["ready", "ready"])
    assert [link.target for link in routed.workers.ready()] == [new.target]
    _, running = routed.stream()
    await asyncio.wait_for(running, 30)
    assert (len(old.submits), len(new.submits)) == (0, 1)
    assert [record.message for record in caplog.records].count(
        "several workers have the same id: the newest gets the streams"
    ) == 1
    await new.kill()
    await eventually(lambda: [link.target for link in routed.workers.ready()] == [old.target])


async def test_worker_that_stays_away_is_a_warning_and_one_that_comes_soon_is_none(routed, make_worker, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    await routed.tell(("unix:/nobody/home", "w-0"))
    await eventually(lambda: routed.workers.links[0].problem)

    def warnings():
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    assert not warnings()
    for _ in range(2000):  # as if that many ticks had passed
        routed.workers.clock.advance(routed.workers.clock.tick_s)
    await eventually(warnings)
    await asyncio.sleep(0.3)
    (warning,) = warnings()
    assert (warning.message, warning.worker) == ("no link to worker", "w-0")


async def test_worker_at_an_ipv6_address(routed, make_worker):
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    worker = await make_worker("w-0", f"[::1]:{port}")
    (found,) = workers_of([endpoint_slice("a", endpoint("::1", "w-0"), port=port, family="IPv6")])
    await routed.tell((found.target, found.worker_id))
    await eventually(lambda: routed.ready_ids() == ["w-0"])
    assert worker.target == found.target


async def test_restarted_pod_gets_its_sessions_back(make_worker, tmp_path, monkeypatch):
    """As in a cluster: the pod comes back with the same name, at another address."""
    api = await FakeEndpointSlices().start()
    api.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    port = free_port()

    async def pod(name, address, uid):
        worker = await make_worker(name, f"{address}:{port}")
        return worker, endpoint(address, name, uid)

    workers, endpoints = zip(*[await pod(f"w-{n}", f"127.0.1.{n + 1}", f"u{n}") for n in range(3)], strict=True)
    endpoints = list(endpoints)
    api.put(endpoint_slice("a", *endpoints, port=port))
    discovery = EndpointSlices(NAMESPACE, SELECTOR, backoff_initial_s=0.02)
    settings = RouterSettings(workers=["unix:/not/asked"], **FAST)
    async with Router(settings, discovery) as router:
        routed = Routed(router, GivenDiscovery())
        names = ["w-0", "w-1", "w-2"]
        await eventually(lambda: routed.ready_ids() == names)
        sessions = [f"session:{number}" for number in range(200)]

        def placed():
            return {session: routed.pick(session) for session in sessions}

        before = placed()
        assert set(before.values()) == set(names)
        assert before == {session: rank(session, names)[0] for session in sessions}
        await workers[1].kill()
        await eventually(lambda: routed.ready_ids() == ["w-0", "w-2"])
        without = placed()
        assert all(without[session] == before[session] for session in sessions if before[session] != "w-1")
        api.put(endpoint_slice("a", endpoints[0], endpoints[2], port=port))
        _, endpoints[1] = await pod("w-1", "127.0.1.9", "another")
        api.put(endpoint_slice("a", *endpoints, port=port))
        await eventually(lambda: routed.ready_ids() == names)
        assert placed() == before
    await api.stop()


CHANGES = 1000
GONE = "unix:/gone/"


@pytest.mark.slow
async def test_a_thousand_changes_leave_nothing_behind(routed, make_worker):
    lasting, passing = await make_worker("w-0"), await make_worker("w-1")
    await routed.tell((lasting.target, "w-0"))
    await eventually(lambda: routed.ready_ids() == ["w-0"])

    def counts():
        gc.collect()
        # Other tests' links may be garbage that has not been collected yet.
        own = (lasting.target, passing.target, GONE)
        links = [each for each in gc.get_objects() if isinstance(each, Link) and each.target.startswith(own)]
        return len(asyncio.all_tasks()), len(links)

    counts()
    await asyncio.sleep(0.2)  # clients of other tests, just collected, close themselves in a task of this loop
    before = counts()
    hellos = 0
    for number in range(CHANGES):
        name = "w-1" if number % 2 else None
        await routed.tell((lasting.target, "w-0"), (passing.target, name), (f"{GONE}{number}", f"w-{number}"))
        if number % 10 == 0:
            await eventually(lambda: routed.ready_ids() == ["w-0", "w-1"])
            hellos += 1
        else:
            await asyncio.sleep(0.001)  # dialling has begun
    assert hellos == CHANGES / 10
    await routed.tell((lasting.target, "w-0"))
    await eventually(lambda: len(routed.workers.links) == 1)
    await eventually(lambda: not passing.connections)
    await eventually(lambda: counts() == before)
    assert routed.ready_ids() == ["w-0"]
    assert list(routed.workers.models) == ["reference"]
