"""New streams avoid impaired workers while there are others, running streams stay, and sessions return."""

import asyncio
import logging
import math

import httpx
import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode
from lockstep_router import metrics
from lockstep_router.policies import WorkerFacts, without_impaired
from lockstep_router.status import status_body
from lockstep_router.workers.health import BreakerState
from router_cluster import events_of, eventually
from scripted_worker import Script

PROMPT, TOKENS = "hello world", 12
SESSION = {"X-Session-ID": "s"}


def link_of(cluster, worker):
    return next(link for link in cluster.router.workers.links if link.worker_id == worker.worker_id)


def health_of(cluster, worker):
    return next(each["health"] for each in status_body(cluster.router)["workers"] if each["id"] == worker.worker_id)


async def complete(cluster, **fields):
    response = await cluster.complete(PROMPT, headers=SESSION, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def rejection(code, *, retryable):
    return worker_pb2.Rejected(code=code, message="no", retryable=retryable)


# Which workers are offered to a policy.


def offered(*workers, threshold=2):
    return [worker.worker_id for worker in without_impaired(workers, threshold)]


def test_sound_workers_are_all_offered():
    assert offered(WorkerFacts("a", queued=9), WorkerFacts("b")) == ["a", "b"]


@pytest.mark.parametrize("problem", ["is_suspected", "is_ejected", "is_slow"])
def test_impaired_worker_is_offered_only_if_there_is_no_other(problem):
    impaired = WorkerFacts("a", **{problem: True})
    assert offered(impaired, WorkerFacts("b")) == ["b"]
    assert offered(impaired) == ["a"]
    assert offered(impaired, WorkerFacts("b", **{problem: True})) == ["a", "b"]


def test_suspected_worker_goes_before_an_ejected_one():
    assert offered(WorkerFacts("a", is_ejected=True), WorkerFacts("b", is_suspected=True)) == ["b"]


def test_slow_worker_is_offered_while_no_other_has_room():
    slow = WorkerFacts("a", is_slow=True)
    assert offered(slow, WorkerFacts("b", queued=2), WorkerFacts("c", queued=9)) == ["b", "c"]
    assert offered(slow, WorkerFacts("b", queued=3), WorkerFacts("c", queued=9)) == ["a", "b", "c"]


# Late heartbeats.


async def test_suspected_worker_gets_no_new_streams_and_keeps_its_running_ones(make_cluster, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    own.script = Script(delay_s=0.05)
    began = metrics.IMPAIRMENTS.labels("suspected")._value.get()
    running = asyncio.create_task(complete(cluster, max_tokens=100))
    await eventually(lambda: own.submits)
    link = link_of(cluster, own)
    await eventually(lambda: link.health.suspicion.patience_s < 60)
    own.silent = True
    await eventually(lambda: link.health.is_suspected)
    assert health_of(cluster, own)["problems"] == ["suspected"]
    assert link.is_ready, "the hard deadline is far away"
    assert await complete(cluster) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert (len(own.submits), len(other.submits)) == (1, 1)
    assert not running.done()
    assert own.cancels == []
    running.cancel()
    own.silent = False
    await eventually(lambda: not link.health.is_suspected)
    own.script = Script()
    await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (2, 1)
    assert metrics.IMPAIRMENTS.labels("suspected")._value.get() > began
    await eventually(lambda: "worker is no longer suspected" in caplog.messages)
    assert "worker is suspected: new streams avoid it" in caplog.messages


async def test_worker_whose_step_is_late_is_suspected(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    own.step_deadline_s, own.steps_advance = 1.0, False
    link = link_of(cluster, own)
    await eventually(lambda: link.health.is_stalled)
    assert link.health.is_suspected
    assert not link.health.suspicion.is_suspected, "its heartbeats are in time"
    await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (0, 1)
    own.steps_advance = True
    await eventually(lambda: not link.health.is_suspected)


async def test_step_that_begins_after_a_long_pause_is_not_late(make_cluster):
    cluster = await make_cluster(1, heartbeat_timeout_s=60.0)
    (worker,) = cluster.workers
    link = link_of(cluster, worker)
    worker.steps_advance = False
    clock = cluster.router.workers.clock
    since = clock.now()
    await eventually(lambda: clock.now() - since > 0.5)
    worker.step_deadline_s = 1.0
    await eventually(lambda: link.status.step_deadline_s)
    assert not link.health.is_stalled
    await eventually(lambda: link.health.is_stalled)


# Faults.


def judged_by_the_test(cluster):
    """The workers, which the router itself, whose time is another one, compares no more."""
    workers = cluster.router.workers
    workers.measure_at = math.inf
    return workers


async def test_failing_worker_is_ejected_probed_and_taken_back(make_cluster, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    cluster = await make_cluster(heartbeat_timeout_s=60.0, eject_initial_s=30.0)
    own, (other,) = cluster.worker_of("session:s")
    own.script = Script(rejection=rejection("worker_lost", retryable=True))
    for _ in range(3):
        assert await complete(cluster) == cluster.undisturbed(PROMPT, 7, TOKENS)
    breaker, workers = link_of(cluster, own).health.breaker, judged_by_the_test(cluster)
    assert breaker.state is BreakerState.OPEN
    assert health_of(cluster, own)["problems"] == ["ejected"]
    assert health_of(cluster, own)["ejected_because"] == "3 faults in a row"
    lost = len(own.submits)
    await complete(cluster)
    assert len(own.submits) == lost, "no stream of it was tried there"
    workers.watch.check(workers.links, breaker.until)
    assert breaker.state is BreakerState.HALF_OPEN
    await complete(cluster)
    assert len(own.submits) == lost + 1, "the probe"
    assert breaker.state is BreakerState.OPEN
    assert breaker.ejections == 2
    own.script = Script()
    workers.watch.check(workers.links, breaker.until)
    there = len(other.submits)
    await complete(cluster)
    assert breaker.state is BreakerState.CLOSED
    await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (lost + 3, there), "its session is back"
    said = [record.message for record in caplog.records]
    assert said.count("worker is ejected: new streams avoid it") == 2
    assert said.count("ejected worker serves well: it is used again") == 1


async def test_half_open_worker_gets_one_stream_at_a_time(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    breaker = link_of(cluster, own).health.breaker
    breaker.eject("test", 0.0)
    breaker.tick(breaker.until)
    own.script = Script(hang_after=3)
    probe = asyncio.create_task(complete(cluster))
    await eventually(lambda: own.submits)
    for _ in range(3):
        await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (1, 3)
    probe.cancel()
    await eventually(lambda: own.cancels)
    assert (breaker.state, breaker.is_ejected) == (BreakerState.HALF_OPEN, False), "its client left: that says nothing"


async def test_probe_that_a_stop_string_ends_closes_the_breaker(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, _ = cluster.worker_of("session:s")
    breaker = link_of(cluster, own).health.breaker
    breaker.eject("test", 0.0)
    breaker.tick(breaker.until)
    whole = cluster.undisturbed(PROMPT, 7, TOKENS)
    answer = await cluster.complete(PROMPT, seed=7, max_tokens=TOKENS, user="s", stop=[whole[3:5]])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    await eventually(lambda: own.cancels)
    assert len(own.submits) == 1
    assert breaker.state is BreakerState.CLOSED


async def test_only_worker_is_never_ejected(make_cluster):
    cluster = await make_cluster(1, heartbeat_timeout_s=60.0, retry_share=1.0)
    (worker,) = cluster.workers
    link = link_of(cluster, worker)
    for _ in range(20):
        link.health.breaker.note_fault(cluster.router.workers.clock.now())
        cluster.router.workers.note_fault(link)
    assert link.health.breaker.state is BreakerState.CLOSED
    assert await complete(cluster) == cluster.undisturbed(PROMPT, 7, TOKENS)


@pytest.mark.parametrize(
    "script",
    [
        Script(rejection=rejection("invalid_request", retryable=False)),
        Script(rejection=rejection("resource_exhausted", retryable=False)),
        Script(rejection=rejection("deadline_exceeded", retryable=False)),
        Script(rejection=rejection("overloaded", retryable=True)),
        Script(rejection=rejection("unavailable", retryable=True)),
        Script(rejection=rejection("draining", retryable=True)),
    ],
    ids=lambda script: script.rejection.code,
)
async def test_faults_of_clients_and_refusals_do_not_count(make_cluster, script):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, _ = cluster.worker_of("session:s")
    own.script = script
    for _ in range(6):
        await cluster.complete(PROMPT, headers=SESSION)
    breaker = link_of(cluster, own).health.breaker
    assert len(own.submits) == 6
    assert (breaker.in_a_row, breaker.state) == (0, BreakerState.CLOSED)


class PausingTransport(httpx.ASGITransport):
    """A client that reads the head of an answer, and nothing more until `may_read` is set or the router gives it up."""

    def __init__(self, app):
        self.may_read = asyncio.Event()

        async def pausing_app(scope, receive, send):
            async def take(message):
                if message["type"] == "http.response.body":
                    await self.may_read.wait()
                await send(message)

            await app(scope, receive, take)
            if not self.may_read.is_set():
                await send({"type": "http.response.body"})

        super().__init__(app=pausing_app)


async def read_slowly(transport):
    body = {"model": "reference", "prompt": PROMPT, "max_tokens": 200, "seed": 7, "stream": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
        return await client.post("/v1/completions", json=body, headers=SESSION)


async def test_clients_that_stop_reading_do_not_count_though_another_worker_completes_their_streams(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0, max_unread_tokens=8)
    own, (other,) = cluster.worker_of("session:s")
    link = link_of(cluster, own)
    for times in range(1, 4):
        transport = PausingTransport(cluster.app)
        reading = asyncio.create_task(read_slowly(transport))
        await eventually(lambda times=times: len(own.cancels) == times)
        own.queued = 9  # so that the stream goes on elsewhere
        await eventually(lambda: link.status.queued == 9)
        transport.may_read.set()
        events = [data for _, data in events_of(await reading) if data != "[DONE]"]
        assert "".join(each["choices"][0]["text"] for each in events) == cluster.undisturbed(PROMPT, 7, 200)
        assert len(other.submits) >= times
        own.queued = 0
        await eventually(lambda: link.status.queued == 0)
    assert (link.health.breaker.in_a_row, link.health.breaker.state) == (0, BreakerState.CLOSED)
    assert health_of(cluster, own)["problems"] == []


async def test_probe_whose_client_stops_reading_says_nothing(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0, max_unread_tokens=8, write_timeout_s=0.3)
    own, _ = cluster.worker_of("session:s")
    judged_by_the_test(cluster)
    breaker = link_of(cluster, own).health.breaker
    breaker.eject("test", 0.0)
    breaker.tick(breaker.until)
    paused = metrics.FAILOVERS.labels("slow_client")._value.get()
    assert not (await read_slowly(PausingTransport(cluster.app))).content
    assert metrics.FAILOVERS.labels("slow_client")._value.get() == paused + 1
    await eventually(lambda: own.cancels)
    assert len(own.submits) == len(own.cancels) == 1
    assert (breaker.state, breaker.is_ejected, breaker.ejections) == (BreakerState.HALF_OPEN, False, 1)


async def test_request_that_fails_everywhere_is_not_the_workers_fault(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0, retry_share=1.0, max_attempts=2)
    for worker in cluster.workers:
        worker.script = Script(rejection=rejection("worker_lost", retryable=True))
    for _ in range(5):
        response = await cluster.complete(PROMPT, headers=SESSION)
        assert response.status_code == 503
    assert [link.health.breaker.in_a_row for link in cluster.router.workers.links] == [0, 0]


async def test_internal_errors_count_once_for_each_session(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, _ = cluster.worker_of("session:s")
    own.script = Script(rejection=rejection(ErrorCode.INTERNAL.value, retryable=False))
    for _ in range(5):
        response = await cluster.complete(PROMPT, headers=SESSION)
        assert response.status_code == 500
    breaker = link_of(cluster, own).health.breaker
    assert breaker.in_a_row == 1
    sessions = [f"t{number}" for number in range(64) if cluster.worker_of(f"session:t{number}")[0] is own]
    for session in sessions[:2]:
        await cluster.complete(PROMPT, headers={"X-Session-ID": session})
    assert breaker.state is BreakerState.OPEN


async def test_death_counts_once_whatever_it_ran_and_poison_is_not_the_workers_fault(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    own.script = Script(hang_after=3)
    running = [asyncio.create_task(complete(cluster)) for _ in range(5)]
    await eventually(lambda: own.hung_streams == 5)
    own.script = Script()
    own.restart_ranks()
    await asyncio.gather(*running)
    assert link_of(cluster, own).health.breaker.in_a_row == 1
    await eventually(lambda: len(cluster.router.workers.ready()) == 2)
    before = {link: link.health.breaker.in_a_row for link in cluster.router.workers.links}
    for worker in cluster.workers:
        worker.script = Script(poison=lambda submit: True)
    response = await cluster.complete(PROMPT, headers=SESSION, max_tokens=100)
    assert response.status_code == 422
    assert own.deaths + other.deaths == 1 + 4, "it takes a fourth, since a worker died without it shortly before"
    counted = sum(link.health.breaker.in_a_row - before[link] for link in before)
    assert counted == 1, "only the first death of the four: then the stream was on trial"


async def test_draining_worker_that_ends_has_no_fault(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, _ = cluster.worker_of("session:s")
    link = link_of(cluster, own)
    own.announce(state=worker_pb2.WORKER_STATE_DRAINING)
    await eventually(lambda: not link.is_ready)
    await own.kill()
    await eventually(lambda: not link.is_connected)
    assert link.health.breaker.in_a_row == 0


# Hotspots, and the comparison of all.


async def test_numbers_of_impaired_workers_are_metrics(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    workers = cluster.router.workers
    link_of(cluster, own).health.breaker.eject("test", workers.clock.now())
    other.queued = 3
    await eventually(lambda: link_of(cluster, other).status.queued)
    workers.watch.check(workers.links, workers.clock.now())
    values = {
        problem: metrics.IMPAIRED_WORKERS.labels("reference", problem)._value.get()
        for problem in ("suspected", "ejected", "slow", "hotspot")
    }
    assert values == {"suspected": 0, "ejected": 1, "slow": 0, "hotspot": 0}
    workers.watch.check([], workers.clock.now())
    assert ("reference", "ejected") not in metrics.IMPAIRED_WORKERS._metrics


async def test_hotspot_is_named(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, _ = cluster.worker_of("session:s")
    own.queued = 3
    workers = judged_by_the_test(cluster)
    await eventually(lambda: link_of(cluster, own).status.queued)
    now = workers.clock.now()
    workers.watch.check(workers.links, now)
    workers.watch.check(workers.links, now + 6)
    assert health_of(cluster, own)["problems"] == ["hotspot"]
    await complete(cluster)
    assert own.submits == [], "sticky leaves a long queue by itself"
    own.queued = 0
    await eventually(lambda: not link_of(cluster, own).status.queued)
    workers.watch.check(workers.links, now + 7)
    assert health_of(cluster, own)["problems"] == []


@pytest.mark.parametrize(("settings", "is_left"), [({}, True), ({"queue_threshold": 1000}, False)])
async def test_session_leaves_a_hotspot_while_its_load_goes_on(make_cluster, settings, is_left):
    """By the default `queue_threshold`: its next requests take the other worker's room, and those that wait stay."""
    cluster = await make_cluster(heartbeat_timeout_s=60.0, **settings)
    own, (other,) = cluster.worker_of("session:s")
    for worker in cluster.workers:
        worker.limit(2)
        worker.script = Script(hang_after=1)
    workers, running = judged_by_the_test(cluster), []

    def reported():
        return sum(link.status.running + link.status.queued for link in workers.links)

    async def ask(requests):
        for _ in range(requests):
            running.append(asyncio.create_task(complete(cluster)))
            await eventually(lambda: reported() == len(running))

    await ask(5)
    assert (len(own.submits), len(other.submits)) == (5, 0)
    now, gauge = workers.clock.now(), metrics.IMPAIRED_WORKERS.labels("reference", "hotspot")
    workers.watch.check(workers.links, now)
    workers.watch.check(workers.links, now + 6)
    assert (health_of(cluster, own)["problems"], gauge._value.get()) == (["hotspot"], 1)
    await ask(3)
    workers.watch.check(workers.links, now + 7)
    assert (len(own.submits), len(other.submits)) == ((5, 3) if is_left else (8, 0))
    assert (health_of(cluster, own)["problems"], gauge._value.get()) == (([], 0) if is_left else (["hotspot"], 1))
    assert not any(task.done() for task in running), "the load goes on"
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def with_slow_steps(cluster, worker):
    """One worker's steps have taken ten times as long as the others'. Returns the workers, its link, and the time."""
    workers, slow = judged_by_the_test(cluster), link_of(cluster, worker)
    now = workers.clock.now() + 1000  # after whatever the scripted workers' steps were
    for link in workers.links:
        for _ in range(16):
            link.health.steps.note((3,), 0.2 if link is slow else 0.02, now, is_usual=True)
    return workers, slow, now


async def test_slow_worker_is_avoided_while_others_have_room(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    workers, _, began = with_slow_steps(cluster, own)
    for second in range(3):
        workers.watch.check(workers.links, began + second)
    assert health_of(cluster, own)["problems"] == ["slow"]
    assert health_of(cluster, own)["slowness"] == 10.0
    await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (0, 1)
    other.queued = 3
    await eventually(lambda: link_of(cluster, other).status.queued == 3)
    await complete(cluster)
    assert (len(own.submits), len(other.submits)) == (1, 1)


async def test_slow_worker_is_tried_by_one_stream_at_a_time(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=60.0)
    own, (other,) = cluster.worker_of("session:s")
    workers, slow, began = with_slow_steps(cluster, own)
    for second in (0, 1, 2, 60):
        workers.watch.check(workers.links, began + second)
    assert slow.health.slowness.is_on_trial
    assert health_of(cluster, own)["problems"] == ["slow"]
    for worker in (own, other):
        worker.script = Script(delay_s=0.05)
    running = [asyncio.create_task(complete(cluster, max_tokens=100)) for _ in range(4)]
    await eventually(lambda: len(own.submits) + len(other.submits) == 4)
    assert (len(own.submits), len(other.submits)) == (1, 3)
    for link in workers.links:
        for _ in range(16):
            link.health.steps.note((1,) if link is slow else (2,), 0.02, began + 61, is_usual=True)
    for second in (61, 62, 63):
        workers.watch.check(workers.links, began + second)
    assert health_of(cluster, own)["problems"] == []
    running.append(asyncio.create_task(complete(cluster)))
    await eventually(lambda: len(own.submits) == 2)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
