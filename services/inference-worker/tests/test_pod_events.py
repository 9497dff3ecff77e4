import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_kubernetes import NAMESPACE, TOKEN, FakeEvents
from harness import PATIENCE_S, make_settings, served, submit, until
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_worker import notices
from lockstep_worker.notices import Notice, NoticeQueue
from lockstep_worker.settings import WorkerSettings
from pydantic import ValidationError
from scripted_engine import Script

POD = {"pod_name": "w-0", "pod_namespace": NAMESPACE, "pod_uid": "uid-of-w-0"}
SECRET = "a prompt that nobody may read"


def pod_events():
    """The class, loaded when it is used: every process of pytest-xdist would load the Kubernetes API otherwise."""
    from lockstep_worker.pod_events import PodEvents  # noqa: PLC0415

    return PodEvents


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = await FakeEvents().start()
    made.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield made
    await made.stop()


@pytest.fixture
def all_posted(monkeypatch: pytest.MonkeyPatch):
    """A worker that ends waits until its last notices are posted, however slow the machine is."""
    monkeypatch.setattr(notices, "FLUSH_TIMEOUT_S", PATIENCE_S)


@contextlib.asynccontextmanager
async def posting(**changes):
    queue = NoticeQueue()
    task = asyncio.create_task(pod_events()("w-0", NAMESPACE, "uid-of-w-0", **changes).run(queue))
    yield queue
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("lockstep_worker_events_total", {"outcome": outcome}) or 0.0


async def test_an_event_has_all_that_describe_looks_for(api):
    async with posting() as queue:
        queue.put(Notice("RankLost", "rank 1 (pid 7) died", is_warning=True))
        await until(lambda: api.events)
    (event,) = api.events.values()
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": NAMESPACE,
        "name": "w-0",
        "uid": "uid-of-w-0",
        "fieldPath": "spec.containers{worker}",
    }
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "RankLost", "rank 1 (pid 7) died")
    assert event["source"] == {"component": "lockstep-worker"}
    assert event["metadata"]["name"].startswith("w-0.")
    assert event["metadata"]["namespace"] == NAMESPACE
    assert event["count"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", event["lastTimestamp"])
    assert event["firstTimestamp"] == event["lastTimestamp"]


async def test_what_happens_again_is_counted(api):
    async with posting() as queue:
        for pid in (7, 8, 9):
            queue.put(Notice("RankLost", f"rank 1 (pid {pid}) died", is_warning=True))
        queue.put(Notice("RankLost", "rank 0 (pid 1) died", is_warning=True))
        await until(lambda: len(api.events) == 2)
        assert api.said() == [
            ("Warning", "RankLost", "rank 1 (pid 9) died", 3),
            ("Warning", "RankLost", "rank 0 (pid 1) died", 1),
        ]
        api.events.clear()  # as after an hour
        queue.put(Notice("RankLost", "rank 1 (pid 10) died", is_warning=True))
        await until(lambda: api.events)
        assert api.said() == [("Warning", "RankLost", "rank 1 (pid 10) died", 1)]


async def test_many_kinds_of_notices_are_not_kept_for_ever(api):
    events = pod_events()("w-0", NAMESPACE, "u")
    queue = NoticeQueue(limit=1000)
    remembered, forgotten = 36, 35
    for number in (*range(100), remembered, forgotten):
        queue.put(Notice("R", f"kind {number}"))
    queue.close()
    await events.run(queue)
    assert len(api.events) == 101
    counts = Counter({f"kind {number}": 1 for number in range(100)})
    counts.update({f"kind {remembered}": 1, f"kind {forgotten}": 1})
    posted: Counter[str] = Counter()
    for event in api.events.values():
        posted[event["message"]] += event["count"]
    assert posted == counts
    assert max(event["count"] for event in api.events.values() if event["message"] == f"kind {forgotten}") == 1


async def test_a_long_message_is_cut(api):
    async with posting() as queue:
        queue.put(Notice("R", "x" * 5000))
        await until(lambda: api.events)
    assert len(next(iter(api.events.values()))["message"]) == 1024


async def test_a_server_that_comes_back_soon_gets_what_it_missed(api, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    await api.stop()
    async with posting() as queue:
        queue.put(Notice("R", "one"))
        queue.put(Notice("R", "two"))
        await until(lambda: caplog.records)
        await api.start()
        await until(lambda: len(api.events) == 2)
    assert [record.message for record in caplog.records] == ["Events of the pod cannot be posted"]
    assert TOKEN not in caplog.text


async def test_a_server_that_stays_away_costs_only_the_events(api, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    api.status = 403
    before = counted("failed")
    async with posting() as queue:
        queue.put(Notice("R", "one"))
        async with asyncio.timeout(PATIENCE_S):
            while counted("failed") == before:
                await asyncio.sleep(0.02)
        assert (api.requests, api.events) == (3, {})
        api.status = 200
        queue.put(Notice("R", "two"))
        await until(lambda: api.events)
    assert len(caplog.records) == 1


async def test_a_server_that_never_answers_is_given_up(api, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    api.mute = True
    async with posting(deadline_s=1.0) as queue:
        queue.put(Notice("R", "one"))
        await until(lambda: caplog.records)
        assert caplog.records[0].problem == "the API server does not answer in time"
        api.mute = False
        await until(lambda: api.events)


# The whole worker.


@pytest.mark.usefixtures("all_posted")
async def test_a_bad_night_of_a_worker(api, model_dir, socket_path):
    settings = make_settings(model_dir, socket_path, kubernetes_events=True, **POD)
    async with served(settings) as worker:
        router = await worker.greeted()
        await router.send(submit=submit(tenant=SECRET, max_tokens=100))
        await until(lambda: worker.engine.requests)
        for _ in range(2):
            worker.engine.lose_ranks("rank 1 (pid 7) died")
            worker.engine.restart()
        worker.engine.lose_ranks("rank 0 (pid 8) has not finished its step for 5.0 s")
        worker.engine.restart()
        worker.stop.set()
        assert await worker.exit_code() == 0
    said = [(kind, reason, re.sub(r"[\d.]+ s$", "N s", message), count) for kind, reason, message, count in api.said()]
    assert said == [
        ("Normal", "RanksReady", "the ranks are ready after N s", 1),
        ("Warning", "RankLost", "rank 1 (pid 7) died; the ranks are started again", 2),
        ("Normal", "RanksReady", "the ranks are ready again after N s", 3),
        (
            "Warning",
            "RankLost",
            "rank 0 (pid 8) has not finished its step for 5.0 s; the ranks are started again",
            1,
        ),
        ("Normal", "Draining", "no new requests are taken; nothing runs", 1),
    ]
    assert SECRET not in str(api.events)


@pytest.mark.usefixtures("all_posted")
async def test_ranks_that_are_gone_for_good(api, model_dir, socket_path):
    settings = make_settings(model_dir, socket_path, kubernetes_events=True, **POD)
    async with served(settings) as worker:
        await worker.greeted()
        worker.engine.fail("the ranks do not stay up: rank 0 (pid 8) died")
        assert await worker.exit_code() == 1
    assert ("Warning", "RanksFailed", "the ranks do not stay up: rank 0 (pid 8) died", 1) in api.said()


@pytest.mark.usefixtures("all_posted")
async def test_ranks_that_can_never_start(api, model_dir, socket_path):
    settings = make_settings(model_dir, socket_path, kubernetes_events=True, **POD)
    error = LockstepError(ErrorCode.INVALID_REQUEST, "device cuda needs a GPU")
    async with served(settings, Script(start_error=error)) as worker:
        await asyncio.gather(worker.task, return_exceptions=True)
    assert api.said() == [("Warning", "RanksFailed", "device cuda needs a GPU", 1)]


@pytest.mark.usefixtures("all_posted")
async def test_draining_says_what_runs(api, model_dir, socket_path):
    settings = make_settings(model_dir, socket_path, kubernetes_events=True, drain_timeout_s=0.3, **POD)
    async with served(settings) as worker:
        router = await worker.greeted()
        await router.send(submit=submit(max_tokens=100))
        await until(lambda: worker.engine.requests)
        worker.stop.set()
        assert await worker.exit_code() == 0
    assert api.said()[-1] == ("Normal", "Draining", "no new requests are taken; 1 running streams have 0.3 s to end", 1)


async def test_an_api_that_hangs_holds_up_nothing(api, model_dir, socket_path):
    api.mute = True
    settings = make_settings(model_dir, socket_path, kubernetes_events=True, **POD)
    async with served(settings) as worker:
        router = await worker.greeted()
        worker.engine.lose_ranks()
        worker.engine.restart()
        await router.ready()
        began = time.monotonic()
        worker.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await worker.task == 0
        assert time.monotonic() - began < 15
    assert api.requests


async def test_no_events_unless_wanted(api, model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, **POD)) as worker:
        await worker.greeted()
        worker.engine.lose_ranks()
        worker.stop.set()
        assert await worker.exit_code() == 0
    assert not api.requests


def test_events_need_to_know_the_pod():
    with pytest.raises(ValidationError, match="needs pod_namespace, pod_uid"):
        WorkerSettings(model="m", pod_name="w-0", kubernetes_events=True)
