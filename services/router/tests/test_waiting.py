"""Waiting is not failing: a request keeps its place in the queue of a worker that lives, wherever it has to move."""

import asyncio
import time

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.seniority import turn_at
from lockstep_common.telemetry import REGISTRY
from lockstep_router.workers.retry_budget import RetryBudget
from router_cluster import eventually, least_mean_s
from scripted_worker import Script, model_card

TOKENS = 12


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def error_of(response):
    return response.json()["error"]


async def occupy(cluster, worker):
    """Give the worker's only place to a stream that never ends."""
    worker.limit(1)
    worker.script = Script(hang_after=1, says_phase=True, delay_s=0.0)
    blocker = asyncio.create_task(cluster.complete("blocker"))
    await eventually(lambda: worker.seats.running == 1)
    return blocker


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def model_value(name, model="reference"):
    return REGISTRY.get_sample_value(f"lockstep_router_{name}", {"model": model})


async def test_a_model_tells_how_many_workers_it_has_and_that_requests_find_none(make_cluster):
    cluster = await make_cluster(1)
    cluster.workers[0].queued = 3
    await eventually(lambda: model_value("ready_workers") == 1)
    await eventually(lambda: model_value("queued_requests") == 3)
    before = model_value("no_worker_total")
    await cluster.workers[0].kill()
    await eventually(lambda: model_value("ready_workers") == 0)
    await eventually(lambda: model_value("queued_requests") == 0)
    assert model_value("no_worker_total") == before
    waiting = asyncio.create_task(cluster.complete("hello"))
    await eventually(lambda: model_value("no_worker_total") > before)
    await end(waiting)


async def test_a_model_that_has_never_had_a_worker_is_waited_for_if_it_is_served(make_cluster):
    cluster = await make_cluster(1, served_models="at-zero,reference", max_queue_wait_s=10)
    await eventually(lambda: model_value("ready_workers", "at-zero") == 0)
    assert model_value("queued_requests", "at-zero") == 0
    before = model_value("no_worker_total", "at-zero")
    waiting = asyncio.create_task(cluster.complete(model="at-zero"))
    await eventually(lambda: model_value("no_worker_total", "at-zero") > before)
    assert (await cluster.complete(model="unknown")).status_code == 404
    listed = (await cluster.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["reference"], "those that a worker has reported"
    cluster.workers[0].card = model_card(name="at-zero")
    cluster.workers[0].announce(epoch=2)
    assert text_of(await waiting) == cluster.undisturbed("hello world", 7, TOKENS)


async def test_error_of_a_wait_for_a_served_model_names_it(make_cluster):
    cluster = await make_cluster(1, served_models="at-zero", max_queue_wait_s=0.3)
    response = await cluster.complete(model="at-zero")
    assert response.status_code == 503
    assert "for a worker of 'at-zero' (1 ready)" in error_of(response)["message"]


async def test_every_request_of_a_long_queue_is_answered_in_the_order_of_arrival(make_cluster):
    """Each of them waits several times longer than the deadlines of running streams, and none is moved."""
    cluster = await make_cluster(1, first_token_deadline_s=0.3, inter_token_deadline_s=0.3)
    (worker,) = cluster.workers
    worker.limit(1)
    worker.script = Script(delay_s=0.008, says_phase=True)
    started = []
    worker.on_start = lambda submit, waiting: started.append(submit.stream_id)
    prompts = [f"request {number}" for number in range(24)]
    responses = await asyncio.gather(*(cluster.complete(prompt) for prompt in prompts))
    for prompt, response in zip(prompts, responses, strict=True):
        assert text_of(response) == cluster.undisturbed(prompt, 7, TOKENS)
    assert not worker.cancels
    assert [submit.attempt for submit in worker.submits] == [1] * 24
    assert started == [submit.stream_id for submit in worker.submits]


async def test_two_hundred_requests_survive_kills_and_start_in_the_order_of_arrival(make_cluster):
    cluster = await make_cluster(2, first_token_deadline_s=1.0, queue_threshold=8)
    arrivals, overtaken = {}, []

    def check(submit, waiting):
        if not submit.emitted_ids:
            mine = arrivals[tuple(submit.prompt_ids)]
            overtaken.extend(
                (other.stream_id, submit.stream_id)
                for other in waiting
                if not other.emitted_ids and arrivals[tuple(other.prompt_ids)] < mine
            )

    for worker in cluster.workers:
        worker.limit(4)
        worker.script = Script(delay_s=0.003, says_phase=True)
        worker.on_start = check
    prompts = [f"request {number}" for number in range(200)]
    for number, prompt in enumerate(prompts):
        arrivals[tuple(cluster.tokenizer.encode(prompt))] = number
    running = [asyncio.create_task(cluster.complete(prompt, user=prompt)) for prompt in prompts]
    for number in range(6):
        worker = cluster.workers[number % 2]
        seen = len(worker.submits)
        await eventually(lambda worker=worker: worker.seats.running == 4 or all(task.done() for task in running))
        if number % 3 == 0:
            worker.restart_ranks()
        else:
            await worker.restart()
            worker.limit(4)
        await eventually(lambda w=worker, seen=seen: len(w.submits) > seen or all(task.done() for task in running))
    for prompt, response in zip(prompts, await asyncio.gather(*running), strict=True):
        assert text_of(response) == cluster.undisturbed(prompt, 7, TOKENS)
    assert cluster.router.failovers > 0
    assert overtaken == []


async def test_moved_stream_keeps_its_seniority(cluster):
    first, (second,) = cluster.worker_of("user:u")
    blocker = await occupy(cluster, first)
    waiting = asyncio.create_task(cluster.complete("patient"))
    await eventually(lambda: len(first.submits) == 2)
    await asyncio.sleep(0.3)
    second.script = Script(hang_after=0)
    await first.kill()
    await eventually(lambda: len(second.submits) == 2)
    moved = next(submit for submit in second.submits if not submit.emitted_ids)
    begun = next(submit for submit in second.submits if submit.emitted_ids)
    assert 0 < begun.arrived_s < moved.arrived_s, "the one that arrived first is the senior"
    greeted_apart_s = moved.arrived_s - first.submits[1].arrived_s
    assert abs(begun.arrived_s - first.submits[0].arrived_s - greeted_apart_s) < 1e-6, "arrivals are the router's"
    assert begun.priority == moved.priority == 0, "of one class the worker lets those with output go first"
    await end(blocker, waiting)


async def test_wait_has_a_limit_and_the_error_names_the_queue(make_cluster):
    cluster = await make_cluster(1, max_queue_wait_s=0.5)
    (worker,) = cluster.workers
    blocker = await occupy(cluster, worker)
    response = await cluster.complete("patient")
    assert response.status_code == 503
    assert error_of(response)["code"] == "unavailable"
    assert "for its turn on worker 'w0', where 1 requests wait" in error_of(response)["message"]
    await eventually(lambda: [cancel.attempt for cancel in worker.cancels] == [1])
    await end(blocker)


async def test_error_of_a_wait_without_any_ready_worker_names_their_states(make_cluster):
    cluster = await make_cluster(1, max_queue_wait_s=0.3)
    cluster.workers[0].announce(state=worker_pb2.WORKER_STATE_RESTARTING)
    await eventually(lambda: not cluster.router.workers.ready())
    response = await cluster.complete()
    assert response.status_code == 503
    assert "for a worker of 'reference' (1 restarting)" in error_of(response)["message"]


async def test_request_that_would_wait_too_long_is_refused_at_once(make_cluster):
    cluster = await make_cluster(1, max_queue_wait_s=30)
    (worker,) = cluster.workers
    worker.queue_wait_s = 42.5
    await eventually(lambda: cluster.router.workers.links[0].queue_wait_s == 42.5)
    began = time.monotonic()
    response = await cluster.complete()
    assert time.monotonic() - began < 5, "no waiting"
    assert response.status_code == 503
    assert error_of(response)["code"] == "overloaded"
    assert "takes 42 s now, this request may wait 30 s" in error_of(response)["message"]
    assert response.headers["retry-after"] == "13"
    assert not worker.submits


REFUSALS = {
    "a queue that takes too long": ({"max_queue_wait_s": 30}, "takes 42 s now"),
    "too many streams": ({"max_streams": 4}, "runs 4 streams already"),
}


@pytest.mark.parametrize("cause", REFUSALS)
async def test_refusals_take_little_time_beside_running_streams(make_cluster, cause):
    settings, said = REFUSALS[cause]
    cluster = await make_cluster(1, **settings)
    (worker,) = cluster.workers
    worker.card, worker.script = model_card(context_length=1 << 20), Script(delay_s=0.02)
    worker.announce(epoch=2)
    await eventually(lambda: cluster.router.workers.models["reference"].context_length == 1 << 20)
    # So long that no machine ends them first.
    running = [asyncio.create_task(cluster.complete(f"r{number}", max_tokens=1 << 19)) for number in range(4)]
    await eventually(lambda: len(worker.submits) == 4)
    worker.queue_wait_s = 42.5
    await eventually(lambda: cluster.router.workers.links[0].queue_wait_s == 42.5)

    async def refused():
        response = await cluster.complete()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert said in error_of(response)["message"]

    assert await least_mean_s(refused) < 0.01
    assert len(worker.submits) == cluster.router.streams == 4
    await end(*running)


async def test_clients_own_deadline_counts_in_the_refusal(make_cluster):
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    worker.queue_wait_s = 42.5
    await eventually(lambda: cluster.router.workers.links[0].queue_wait_s == 42.5)
    assert text_of(await cluster.complete()) == cluster.undisturbed("hello world", 7, TOKENS)
    response = await cluster.complete(headers={"X-Request-Timeout": "40"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"


async def test_request_goes_where_its_wait_is_short_enough(make_cluster):
    cluster = await make_cluster(2, max_queue_wait_s=30)
    first, (second,) = cluster.worker_of("user:u")
    first.queue_wait_s = 100.0
    await eventually(lambda: any(link.queue_wait_s == 100 for link in cluster.router.workers.links))
    assert text_of(await cluster.complete()) == cluster.undisturbed("hello world", 7, TOKENS)
    assert (len(first.submits), len(second.submits)) == (0, 1)


async def test_streams_sent_since_the_last_status_count_in_the_estimate(make_cluster):
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    (link,) = cluster.router.workers.links
    worker.limit(2)
    worker.queue_wait_s, worker.queue_wait_per_request_s, worker.heartbeat_s = 0.0, 5.0, 3600.0
    worker.script = Script(hang_after=1)
    await eventually(lambda: link.status.free_seqs == 2 and link.status.queue_wait_per_request_s == 5.0)
    await asyncio.sleep(0.1)  # the last heartbeat of the old interval
    running = [asyncio.create_task(cluster.complete(f"r{number}")) for number in range(4)]
    await eventually(lambda: len(worker.submits) == 4)
    assert link.queue_wait_s == 10.0, "two start at once, two wait"
    await end(*running)


async def test_clients_deadline_travels_to_the_worker_and_ends_the_wait(make_cluster):
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    blocker = await occupy(cluster, worker)
    response = await cluster.complete("patient", headers={"X-Request-Timeout": "0.5"})
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert "timeout of 0.5 s has passed while it waited for its turn on worker 'w0'" in error_of(response)["message"]
    assert 0 < worker.submits[1].deadline_s <= 0.5
    assert worker.submits[0].deadline_s == 0
    await eventually(lambda: [cancel.stream_id for cancel in worker.cancels] == [worker.submits[1].stream_id])
    await end(blocker)


@pytest.mark.parametrize("given", ["", "0", "-1", "1e3", "nan", "inf", "ten", "99999999", "1" * 400])
async def test_deadline_that_is_no_number_of_seconds_is_refused_by_name(cluster, given):
    response = await cluster.complete(headers={"X-Request-Timeout": given})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Timeout"


async def test_stream_in_the_queue_of_a_worker_that_finishes_no_step_moves(make_cluster):
    cluster = await make_cluster(2, first_token_deadline_s=0.5)
    first, (second,) = cluster.worker_of("user:u")
    blocker = await occupy(cluster, first)
    first.steps_advance = False
    assert text_of(await cluster.complete("patient")) == cluster.undisturbed("patient", 7, TOKENS)
    assert len(second.submits) >= 1
    await end(blocker)


async def test_running_stream_without_progress_moves_though_others_wait(make_cluster):
    cluster = await make_cluster(2, first_token_deadline_s=0.5)
    first, _ = cluster.worker_of("user:u")
    first.limit(1)
    first.script = Script(hang_after=0, says_phase=True)
    running = asyncio.create_task(cluster.complete("stuck"))
    await eventually(lambda: first.submits)
    waiting = asyncio.create_task(cluster.complete("patient"))
    assert text_of(await running) == cluster.undisturbed("stuck", 7, TOKENS)
    await eventually(lambda: first.cancels)
    assert first.cancels[0].stream_id == first.submits[0].stream_id
    assert text_of(await waiting) == cluster.undisturbed("patient", 7, TOKENS)


async def test_workers_own_step_deadline_comes_before_the_routers(make_cluster):
    """A prefill step of others may take longer than a stream may be without a token in decode."""
    cluster = await make_cluster(2, inter_token_deadline_s=0.3)
    first, (second,) = cluster.worker_of("user:u")
    first.step_deadline_s = 15.0
    first.steps_advance = False
    first.script = Script(delay_s=1.0)
    assert text_of(await cluster.complete(max_tokens=3)) == cluster.undisturbed("hello world", 7, 3)
    assert not second.submits


async def test_preempted_stream_waits_like_any_other(make_cluster):
    cluster = await make_cluster(2, first_token_deadline_s=0.5, inter_token_deadline_s=0.3)
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(hang_after=3)
    running = asyncio.create_task(cluster.complete())
    await eventually(lambda: first.hung_streams)
    (submit,) = first.submits
    first.queued = 1
    preempted = worker_pb2.StreamPhaseChange(
        stream_id=submit.stream_id, attempt=1, phase=worker_pb2.STREAM_PHASE_WAITING
    )
    first.broadcast(worker_pb2.WorkerFrame(epoch=1, phases=worker_pb2.Phases(streams=[preempted])))
    await asyncio.sleep(1.5)
    assert not second.submits
    first.queued = 0
    assert text_of(await running) == cluster.undisturbed("hello world", 7, TOKENS)
    assert len(second.submits) == 1, "without a queue it cannot be waiting there"


async def test_refused_streams_do_not_come_back_in_step(make_cluster):
    cluster = await make_cluster(1, retry_share=1.0)
    (worker,) = cluster.workers
    worker.script = Script(rejection=worker_pb2.Rejected(code="draining", message="no", retryable=True))
    running = [asyncio.create_task(cluster.complete(f"r{number}")) for number in range(8)]
    times = {}

    def note():
        for submit in worker.submits:
            times.setdefault((submit.stream_id, submit.attempt), time.monotonic())
        return sum(attempt == 2 for _, attempt in times) == 8

    await eventually(note)
    second = sorted(at for (_, attempt), at in times.items() if attempt == 2)
    assert second[-1] - second[0] > 0.1
    worker.script = Script()
    for response in await asyncio.gather(*running):
        assert response.status_code == 200


async def test_retries_are_limited_to_a_share_of_the_streams(make_cluster):
    """Every attempt fails on workers that live; 40 streams may not become 240 attempts at once."""
    cluster = await make_cluster(2, retry_share=0.0, max_queue_wait_s=3)
    for worker in cluster.workers:
        worker.script = Script(rejection=worker_pb2.Rejected(code="internal", message="no", retryable=True))
    responses = await asyncio.gather(*(cluster.complete(f"r{number}") for number in range(40)))
    assert all(response.status_code == 503 for response in responses)
    attempts = sum(len(worker.submits) for worker in cluster.workers)
    assert 40 < attempts <= 40 + 10 + 8, "a reserve of ten, and one a second"


def spend(budget, now):
    """Take all retries that there are now; their number."""
    spender = turn(0, 0.0, "spender", has_output=True)
    taken = 0
    while budget.withdraw(now, spender):
        taken += 1
    budget.leave(spender)
    return taken


def test_new_streams_add_their_share_of_retries():
    budget = RetryBudget(share=0.2)
    assert spend(budget, 0.0) == 10
    for _ in range(52):
        budget.deposit()
    assert spend(budget, 0.0) == 10, "a fifth of them; time alone adds none here"
    for _ in range(10_000):
        budget.deposit()
    assert spend(budget, 0.0) == 200, "they are not saved without end"


async def test_every_stream_that_begins_adds_its_share(make_cluster):
    cluster = await make_cluster(1, retry_share=0.5)
    budget, now = cluster.router.workers.retries, asyncio.get_running_loop().time()
    spend(budget, now)
    for number in range(12):
        assert (await cluster.complete(f"r{number}", n=2)).status_code == 200
    assert spend(budget, now) == 12, "two streams a request"


def overloaded(retry_after_s=1.0):
    return worker_pb2.Rejected(code="overloaded", message="full", retryable=True, retry_after_s=retry_after_s)


async def test_running_stream_that_its_only_worker_cannot_keep_goes_on_there(make_cluster):
    """Out of memory, for example: the worker refuses it, but it is no new request that should come back later."""
    cluster = await make_cluster(1)
    cluster.workers[0].script = Script(reject_after=6, rejection=overloaded(0.1))
    assert text_of(await cluster.complete()) == cluster.undisturbed("hello world", 7, TOKENS)
    assert cluster.router.failovers == 1


async def test_stream_that_leaves_a_draining_worker_waits_when_the_other_queues_are_full(make_cluster):
    cluster = await make_cluster(2)
    first, (second,) = cluster.worker_of("user:u")
    second.script = Script(reject_after=0, rejection=overloaded(0.1))
    first.script = Script(reject_after=5, rejection=worker_pb2.Rejected(code="draining", message="no", retryable=True))
    running = asyncio.create_task(cluster.complete())
    await eventually(lambda: second.submits)
    await asyncio.sleep(0.2)
    second.script = Script()
    assert text_of(await running) == cluster.undisturbed("hello world", 7, TOKENS)


async def test_stream_moves_at_once_from_each_worker_that_drains(make_cluster):
    """However often that happens to it: the retry budget is for streams that no worker takes."""
    cluster = await make_cluster(2, retry_share=0.0)
    while cluster.router.workers.retries.withdraw(0.0, turn(0, 0.0, "another", has_output=True)):
        pass
    cluster.router.workers.retries.leave(turn(0, 0.0, "another", has_output=True))
    drain = worker_pb2.Rejected(code="draining", message="no", retryable=True)
    for worker in cluster.workers:
        worker.script = Script(reject_after=3, rejection=drain)
    began = time.monotonic()
    running = asyncio.create_task(cluster.complete())
    await eventually(lambda: sum(len(worker.submits) for worker in cluster.workers) == 2)
    for worker in cluster.workers:
        worker.script = Script()
    assert text_of(await running) == cluster.undisturbed("hello world", 7, TOKENS)
    assert time.monotonic() - began < 30


def turn(priority, arrived_at, stream_id, *, has_output=False):
    return (turn_at(arrived_at, priority, has_output=has_output), stream_id)


def wait_phase(submit):
    change = worker_pb2.StreamPhaseChange(
        stream_id=submit.stream_id, attempt=submit.attempt, phase=worker_pb2.STREAM_PHASE_WAITING
    )
    return worker_pb2.WorkerFrame(epoch=1, phases=worker_pb2.Phases(streams=[change]))


async def test_worker_of_a_preempted_stream_that_is_older_than_any_wait_dies(make_cluster):
    """What a stream may wait begins when it is preempted, not when it arrived."""
    cluster = await make_cluster(2, max_queue_wait_s=2.0)
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(delay_s=0.25, hang_after=10)
    running = asyncio.create_task(cluster.complete())
    await eventually(lambda: first.hung_streams)
    first.queued = 1
    first.broadcast(wait_phase(first.submits[0]))
    await asyncio.sleep(0.1)
    await first.kill()
    assert text_of(await running) == cluster.undisturbed("hello world", 7, TOKENS)
    assert len(second.submits) == 1


async def test_retry_after_of_a_full_queue_is_the_time_that_it_takes(make_cluster):
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    worker.queue_wait_s = 17.2
    worker.script = Script(reject_after=0, rejection=overloaded())
    await eventually(lambda: cluster.router.workers.links[0].queue_wait_s == 17.2)
    response = await cluster.complete()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "18"


async def test_stream_waits_a_moment_for_the_worker_with_its_own_numerics(make_cluster):
    """That worker refuses it for a moment; the other one would continue inexactly."""
    cluster = await make_cluster(2)
    first, (second,) = cluster.worker_of("user:u")
    second.card.fingerprint = "numerics-2"
    second.announce(epoch=second.epoch + 1)
    await eventually(
        lambda: {link.fingerprint for link in cluster.router.workers.links} == {"numerics-1", "numerics-2"}
    )
    first.script = Script(reject_after=6, rejection=overloaded(0.2))
    response = await cluster.complete()
    assert text_of(response) == cluster.undisturbed("hello world", 7, TOKENS)
    assert "lockstep" not in response.json()
    assert not second.submits


def test_streams_that_wait_for_a_retry_take_it_in_order_of_class_output_and_arrival():
    budget = RetryBudget(share=1.0)
    while budget.withdraw(0.0, turn(0, 0.0, "spender", has_output=True)):
        pass
    budget.leave(turn(0, 0.0, "spender", has_output=True))
    turns = [
        turn(0, 2.0, "b"),
        turn(0, 1.0, "a"),
        turn(-1, 0.0, "low", has_output=True),
        turn(0, 9.0, "begun", has_output=True),
        turn(1, 9.0, "high"),
    ]
    assert not any(budget.withdraw(0.0, each) for each in turns)
    assert [each[-1] for each in sorted(turns, key=budget.wait_s)] == ["high", "begun", "a", "b", "low"]
    assert budget.wait_s(turns[0]) == pytest.approx(4.0)
    taken = []
    for at in range(1, 6):
        # Whichever asks first: the one that is not next gets none.
        taken += [each[-1] for each in turns if each[-1] not in taken and budget.withdraw(float(at), each)]
    assert taken == ["high", "begun", "a", "b", "low"]


def test_stream_that_leaves_holds_up_nobody():
    budget = RetryBudget(share=1.0)
    while budget.withdraw(0.0, turn(0, 0.0, "spender", has_output=True)):
        pass
    budget.leave(turn(0, 0.0, "spender", has_output=True))
    first, second = turn(0, 1.0, "first"), turn(0, 2.0, "second")
    assert not budget.withdraw(0.0, first)
    assert not budget.withdraw(1.0, second), "it would overtake"
    budget.leave(first)
    assert budget.withdraw(1.0, second)
