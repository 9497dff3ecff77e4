"""A stream outlives its workers, and its text does not show it."""

import asyncio

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router import metrics
from lockstep_router.status import status_body
from router_cluster import EVENT_IDS, events_of, eventually
from scripted_worker import Script, model_card

PROMPT = "hello world"
TOKENS = 12


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def rejection(code, *, retryable=True, message="no", field="", retry_after_s=0.0):
    return worker_pb2.Rejected(
        code=code, message=message, field=field, retry_after_s=retry_after_s, retryable=retryable
    )


async def test_text_is_the_same_wherever_the_worker_dies(make_cluster):
    cluster = await make_cluster(eject_after=0)
    expected = cluster.undisturbed(PROMPT, 7, TOKENS)
    first, _ = cluster.worker_of("user:u")
    for position in range(TOKENS):
        first.script.die_after = position
        assert text_of(await cluster.complete(PROMPT)) == expected
        await eventually(lambda: len(cluster.router.workers.ready()) == 2)
    assert cluster.router.failovers == TOKENS


async def test_streamed_text_is_the_same_when_several_attempts_die(make_cluster):
    cluster = await make_cluster(3, quarantine_after=100)
    for worker in cluster.workers:
        worker.script = Script(die_after=2, delay_s=0.001)
    response = await cluster.complete(PROMPT, stream=True, headers=EVENT_IDS)
    events = events_of(response)
    assert events[-1] == (None, "[DONE]")
    assert "".join(data["choices"][0]["text"] for _, data in events[:-1]) == cluster.undisturbed(PROMPT, 7, TOKENS)
    positions = [int(event_id.rpartition(":")[2]) for event_id, _ in events[:-1]]
    assert positions == sorted(set(positions)), "strictly ascending"
    assert positions[-1] == TOKENS


async def test_resumed_attempt_carries_the_emitted_ids(cluster):
    first, (second,) = cluster.worker_of("user:u")
    first.script.die_after = 5
    await cluster.complete(PROMPT)
    before, after = first.submits[0], second.submits[0]
    assert (before.attempt, after.attempt) == (1, 2)
    assert list(before.emitted_ids) == []
    assert len(after.emitted_ids) == 5
    assert after.prompt_ids == before.prompt_ids
    assert after.sampling == before.sampling
    assert after.stream_id == before.stream_id


async def test_killed_worker_process_is_left_at_once(cluster):
    first, _ = cluster.worker_of("user:u")
    first.script.delay_s = 0.02
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: first.submits)
    await asyncio.sleep(0.05)
    await first.kill()
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)


async def test_stream_waits_for_the_only_worker_to_come_back(make_cluster):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script.die_after = 4
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: worker.submits)
    worker.script = Script()
    await worker.restart()
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert len(worker.submits) == 2


async def test_hanging_stream_moves_after_its_deadline(make_cluster):
    cluster = await make_cluster(inter_token_deadline_s=0.6)
    first, (second,) = cluster.worker_of("user:u")
    first.script.hang_after = 3
    first.steps_advance = False
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    await eventually(lambda: first.cancels)
    assert [cancel.attempt for cancel in first.cancels] == [1]
    assert len(second.submits[0].emitted_ids) == 3


async def test_stream_that_waits_its_turn_is_not_taken_for_hanging(make_cluster):
    cluster = await make_cluster(inter_token_deadline_s=0.6)
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(delay_s=1.5)
    assert first.steps_advance
    assert text_of(await cluster.complete(PROMPT, max_tokens=2)) == cluster.undisturbed(PROMPT, 7, 2)
    assert not second.submits


async def test_stream_without_first_token_moves_after_its_deadline(make_cluster):
    cluster = await make_cluster(first_token_deadline_s=0.6)
    first, _ = cluster.worker_of("user:u")
    first.script.hang_after = 0
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    await eventually(lambda: first.cancels)
    assert len(first.cancels) == 1


async def test_silent_worker_loses_its_streams_and_is_taken_back(make_cluster):
    cluster = await make_cluster(heartbeat_timeout_s=1.0)
    first, _ = cluster.worker_of("user:u")
    first.script.delay_s = 0.2
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: first.submits)
    await asyncio.sleep(0.3)
    first.silent = True
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert [link.state for link in cluster.router.workers.links].count("silent") == 1
    first.silent = False
    await eventually(lambda: len(cluster.router.workers.ready()) == 2)


@pytest.mark.parametrize("state", [worker_pb2.WORKER_STATE_RESTARTING, worker_pb2.WORKER_STATE_FAILED])
async def test_worker_without_ranks_loses_its_streams(cluster, state):
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(hang_after=3)
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: first.hung_streams)
    first.announce(state=state)
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert len(second.submits[0].emitted_ids) == 3


async def test_new_epoch_ends_the_attempts_of_the_old_one(make_cluster):
    cluster = await make_cluster(1)
    worker = cluster.workers[0]
    worker.script = Script(hang_after=3)
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: worker.hung_streams)
    worker.script = Script()
    worker.announce(epoch=2)
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert [submit.attempt for submit in worker.submits] == [1, 2]


async def test_frames_of_old_attempts_epochs_and_positions_are_dropped(cluster):
    first, _ = cluster.worker_of("user:u")
    first.epoch = 3
    first.announce(epoch=3)
    first.script.noise = True
    reasons = ("stale_epoch", "stale_attempt", "duplicate", "late")
    before = {reason: metrics.DROPPED_FRAMES.labels(reason)._value.get() for reason in reasons}
    await eventually(lambda: any(link.epoch == 3 for link in cluster.router.workers.links))
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    for reason in reasons:
        assert metrics.DROPPED_FRAMES.labels(reason)._value.get() > before[reason], reason
    assert cluster.router.failovers == 0


async def test_missing_position_fails_the_attempt(cluster):
    first, _ = cluster.worker_of("user:u")
    first.script.skip_at = 4
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert cluster.router.failovers >= 1


@pytest.mark.parametrize("code", ["worker_lost", "draining", "unavailable", "overloaded"])
async def test_retryable_rejection_moves_a_running_stream(cluster, code):
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(rejection=rejection(code), reject_after=4)
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert len(second.submits[0].emitted_ids) == 4
    assert not first.cancels


async def test_draining_worker_finishes_what_it_has_and_gets_nothing_new(cluster):
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(delay_s=0.01)
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: first.submits)
    first.announce(state=worker_pb2.WORKER_STATE_DRAINING)
    await eventually(lambda: len(cluster.router.workers.ready()) == 1)
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert (len(first.submits), len(second.submits)) == (1, 1)


async def test_rejection_of_the_request_itself_is_the_clients_error(cluster):
    for worker in cluster.workers:
        worker.script = Script(rejection=rejection("invalid_request", retryable=False, message="bad", field="top_k"))
    response = await cluster.complete(PROMPT)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_k"
    assert cluster.router.failovers == 0


async def test_error_after_the_first_token_ends_the_event_stream(cluster):
    for worker in cluster.workers:
        worker.script = Script(rejection=rejection("internal", retryable=False, message="bad"), reject_after=2)
    response = await cluster.complete(PROMPT, stream=True)
    assert response.status_code == 200
    events = events_of(response)
    assert events[-1][1]["error"]["code"] == "internal"
    assert len(events) == 3


async def test_logits_that_are_no_numbers_are_tried_on_one_worker_only(cluster):
    error = LockstepError(ErrorCode.NUMERICAL_ERROR, "the model's logits are no numbers")
    for worker in cluster.workers:
        worker.script = Script(
            rejection=rejection(error.code.value, retryable=error.meaning.retryable, message=error.message),
            reject_after=0,
        )
    response = await cluster.complete(PROMPT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "numerical_error"
    assert sum(len(worker.submits) for worker in cluster.workers) == 1
    assert cluster.router.failovers == 0


async def test_stream_that_fails_on_every_worker_is_given_up(make_cluster):
    cluster = await make_cluster(max_attempts=3)
    for worker in cluster.workers:
        worker.script.skip_at = 1
    response = await cluster.complete(PROMPT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"
    assert sum(len(worker.submits) for worker in cluster.workers) == 3, "a token now and then changes nothing"


@pytest.mark.parametrize(("position", "attempts"), [(0, 2), (5, 2), (1, 1)])
async def test_end_without_ids_is_checked_for_its_position(cluster, position, attempts):
    """The worker says that a stream of one token is over, and means another place than that."""
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(end_position=position)
    expected = 1 if attempts == 1 else TOKENS
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, expected)
    assert len(first.submits) + len(second.submits) == attempts


async def test_busy_workers_turn_new_requests_away_with_a_time(cluster):
    for worker in cluster.workers:
        worker.script = Script(rejection=rejection("overloaded", retry_after_s=3))
    response = await cluster.complete(PROMPT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"
    assert [len(worker.submits) for worker in cluster.workers] == [1, 1]


async def test_request_waits_for_a_worker_and_then_gets_503(make_cluster):
    cluster = await make_cluster(1, max_queue_wait_s=0.3)
    await cluster.workers[0].kill()
    await eventually(lambda: not cluster.router.workers.ready())
    response = await cluster.complete(PROMPT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert "retry-after" in response.headers


async def test_router_that_never_saw_a_worker_answers_503(make_cluster):
    cluster = await make_cluster(0, ready=False, max_queue_wait_s=0.2)
    response = await cluster.complete(PROMPT)
    assert response.status_code == 503
    assert (await cluster.client.get("/readyz")).status_code == 503
    assert (await cluster.client.get("/healthz")).status_code == 200


async def test_stream_goes_only_to_workers_with_the_same_model(make_cluster):
    cluster = await make_cluster(2)
    first, (second,) = cluster.worker_of("user:u")
    second.card = model_card(digest="model-2")
    second.announce(epoch=2)
    await eventually(lambda: len(cluster.router.workers.ready("reference", "model-1")) == 1)
    first.script.die_after = 3
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: first.submits)
    first.script = Script()
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert not second.submits


async def test_failover_keeps_each_choice_apart(cluster):
    undisturbed = (await cluster.complete(PROMPT, n=3)).json()["choices"]
    first, _ = cluster.worker_of("user:u")
    first.script = Script(die_after=4, delay_s=0.001)
    choices = (await cluster.complete(PROMPT, n=3)).json()["choices"]
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in undisturbed]
    assert len({choice["text"] for choice in choices}) == 3


async def test_unknown_finish_reason_moves_the_stream(cluster):
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(unknown_finish_after=3)
    assert text_of(await cluster.complete(PROMPT)) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert len(second.submits[0].emitted_ids) == 3


async def with_fingerprints(make_cluster, first, second, **settings):
    """Two workers, the session's own one first, with these fingerprints; the first dies after five tokens."""
    cluster = await make_cluster(2, **settings)
    own, (other,) = cluster.worker_of("user:u")
    for worker, fingerprint in ((own, first), (other, second)):
        worker.card = model_card(fingerprint=fingerprint)
        worker.announce(epoch=2)
    await eventually(lambda: {link.epoch for link in cluster.router.workers.links} == {2})
    own.script = Script(die_after=5)
    return cluster, own, other


def inexact_continuations():
    return metrics.INEXACT_CONTINUATIONS._value.get()


async def test_stream_goes_on_on_a_worker_with_the_same_fingerprint_unmarked(make_cluster):
    cluster, *_ = await with_fingerprints(make_cluster, "a", "a")
    before = inexact_continuations()
    body = (await cluster.complete(PROMPT)).json()
    assert "lockstep" not in body
    assert inexact_continuations() == before


async def test_worker_with_the_same_fingerprint_is_preferred(make_cluster):
    cluster = await make_cluster(3, eject_after=0)
    own, others = cluster.worker_of("user:u")
    cards = {"equal": others[0], "other": others[1]}
    cards["other"].card = model_card(fingerprint="other numerics")
    cards["other"].announce(epoch=2)
    await eventually(lambda: 2 in {link.epoch for link in cluster.router.workers.links})
    for number in range(8):
        own.script = Script(die_after=5)
        assert text_of(await cluster.complete(PROMPT, seed=number)) == cluster.undisturbed(PROMPT, number, TOKENS)
        await eventually(lambda: len(cluster.router.workers.ready()) == 3)
    assert len(cards["equal"].submits) == 8
    assert not cards["other"].submits


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", ""), ("", "a"), ("", "")])
@pytest.mark.parametrize("stream", [False, True])
async def test_inexact_continuation_is_marked_and_counted(make_cluster, first, second, stream):
    cluster, *_ = await with_fingerprints(make_cluster, first, second)
    before = inexact_continuations()
    response = await cluster.complete(PROMPT, stream=stream)
    assert inexact_continuations() == before + 1
    if not stream:
        assert response.json()["lockstep"] == {"inexact": True}
        return
    bodies = [body for _, body in events_of(response)[:-1]]
    assert [body.get("lockstep") for body in bodies if body["choices"][0]["finish_reason"]] == [{"inexact": True}]
    assert sum("lockstep" in body for body in bodies) == 1


async def test_stream_without_a_token_yet_may_go_to_any_worker_exactly(make_cluster):
    cluster, own, _ = await with_fingerprints(make_cluster, "a", "b", exact_failover="strict")
    own.script = Script(die_after=0)
    response = await cluster.complete(PROMPT)
    assert text_of(response) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert "lockstep" not in response.json()


async def lost_with_tokens(cluster, own):
    """A request whose worker is killed after five of its tokens have come."""
    own.script = Script(hang_after=5)
    running = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: [stream.tokens for stream in cluster.router.workers.history.streams] == [5])
    await own.kill()
    return running


async def test_strict_failover_waits_for_a_worker_with_the_same_fingerprint(make_cluster):
    cluster, own, other = await with_fingerprints(make_cluster, "a", "b", exact_failover="strict")
    running = await lost_with_tokens(cluster, own)
    own.script = Script()
    await asyncio.sleep(0.3)
    assert not running.done()
    await own.start()
    assert text_of(await running) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert not other.submits


async def test_strict_failover_does_not_wait_for_ever(make_cluster):
    cluster, own, other = await with_fingerprints(make_cluster, "a", "b", exact_failover="strict", max_queue_wait_s=0.5)
    response = await (await lost_with_tokens(cluster, own))
    assert response.status_code == 503
    assert "with the numerics fingerprint 'a' (exact_failover is strict)" in response.json()["error"]["message"]
    assert not other.submits


async def test_worker_whose_tokens_depend_on_the_batch_continues_nothing_exactly(make_cluster):
    cluster, _, other = await with_fingerprints(make_cluster, "a", "a")
    other.card = model_card(fingerprint="a", deterministic=False)
    other.announce(epoch=3)
    await eventually(lambda: 3 in {link.epoch for link in cluster.router.workers.links})
    assert (await cluster.complete(PROMPT)).json()["lockstep"] == {"inexact": True}


async def test_status_shows_fingerprints_and_suspects(make_cluster):
    cluster, *_ = await with_fingerprints(make_cluster, "a", "b")
    status = status_body(cluster.router)
    assert sorted(worker["fingerprint"] for worker in status["workers"]) == ["a", "b"]
    assert status["router"]["exact_failover"] == "prefer"
    assert status["router"]["suspects"] == {"suspected": 0, "tried": 0, "quarantined": 0}


async def test_attempt_that_is_on_its_way_while_the_ranks_die_is_cancelled_in_the_next_epoch(cluster):
    first, (second,) = cluster.worker_of("user:u")
    first.deaf = True
    answering = asyncio.create_task(cluster.complete(PROMPT))
    await eventually(lambda: any(link.has_streams for link in cluster.router.workers.links))
    first.script = Script(hang_after=0)
    first.restart_ranks()
    assert text_of(await answering) == cluster.undisturbed(PROMPT, 7, TOKENS)
    assert [submit.attempt for submit in second.submits] == [2]
    first.deaf = False
    await eventually(lambda: first.submits and first.cancels)
    assert [submit.attempt for submit in first.submits] == [1]
    assert [cancel.attempt for cancel in first.cancels] == [1]
