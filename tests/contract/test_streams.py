"""What a router may rely on while a worker is healthy and when it loses a rank. The double passes too."""

import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from harness import Router
from implementations import Implementation, submit
from lockstep_api.v1 import inference_pb2, worker_pb2
from tokenizers import Tokenizer

READY = worker_pb2.WORKER_STATE_READY
RESTARTING = worker_pb2.WORKER_STATE_RESTARTING
SAMPLINGS = pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9}], ids=["greedy", "seeded"])

HEARTBEAT_TIMEOUT_S = 1.5
"""Routers treat a worker as silent after this time without a frame."""


async def frames_of(router: Router, stream_id: str) -> AsyncIterator[worker_pb2.StreamTokens]:
    """The frames of a stream up to its end."""
    while True:
        for frame in (await router.next("tokens")).tokens.streams:
            if frame.stream_id == stream_id:
                yield frame
                if frame.finish:
                    return


async def all_ids(router: Router, message: worker_pb2.Submit) -> list[int]:
    """All ids of a stream."""
    await router.send(submit=message)
    return [token for frame in [each async for each in frames_of(router, message.stream_id)] for token in frame.ids]


async def test_tokens_of_an_attempt_with_a_handle_may_come_in_columns(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    expected = await all_ids(router, submit("plain", max_tokens=20))
    message = submit("named", max_tokens=20)
    message.handle = 7
    await router.send(submit=message)
    ids: list[int] = []
    in_columns, is_over = 0, False
    while not is_over:
        tokens = (await router.next("tokens")).tokens
        for handle, position, token in zip(tokens.handles, tokens.positions, tokens.ids, strict=True):
            assert handle == 7
            assert position == len(ids)
            ids.append(token)
            in_columns += 1
        for frame in tokens.streams:
            assert frame.stream_id == "named"
            assert frame.position == len(ids)
            ids += frame.ids
            is_over = bool(frame.finish)
    assert ids == expected
    assert in_columns > 10, "most tokens need no message of their own"


async def test_columns_are_for_tokens_with_nothing_else_to_say(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    message = submit("s", max_tokens=8, logprobs=1)
    message.handle = 7
    await router.send(submit=message)
    frames = [frame async for frame in frames_of(router, "s")]
    assert all(len(frame.logprobs) == len(frame.ids) for frame in frames)
    assert not any(each.tokens.handles for each in router.seen)


async def test_hello_comes_first_and_describes_the_model(worker: Implementation) -> None:
    router = worker.router()
    hello = await router.greet()
    assert router.kinds() == ["hello"]
    assert router.seen[0].epoch >= 1
    assert (await router.next()).HasField("status")
    assert hello.worker_id == "w0"
    assert 0 < time.time_ns() - hello.incarnation < 3600 * 10**9
    card = hello.model
    assert card.name
    assert card.digest
    assert card.architecture.endswith("ForCausalLM")
    assert card.tokenizer_digest
    assert card.tp == 2
    assert card.context_length >= 256
    assert card.vocab_size > 1
    assert 0 < card.created <= time.time()


async def test_status_is_a_heartbeat(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    found = []
    for _ in range(5):  # a machine may pause the worker or this process for longer than the timeout
        began_s, arrivals_s = time.monotonic(), []
        while not arrivals_s or arrivals_s[-1] < 1.0:
            status = (await router.next("status")).status
            arrivals_s.append(time.monotonic() - began_s)
            assert status.state == READY
            assert status.free_blocks <= status.total_blocks > 0
            assert [rank.rank for rank in status.ranks] == [0, 1]
            assert status.pid > 0
        longest_s = max((after - before for before, after in pairwise(arrivals_s)), default=arrivals_s[0])
        found.append((len(arrivals_s), longest_s))
        # Ten a second, on a machine that may be busy.
        if 3 <= len(arrivals_s) <= 20 and longest_s < HEARTBEAT_TIMEOUT_S:
            return
    pytest.fail(f"statuses of each second, and the longest time between two: {found}")


async def test_positions_count_from_zero_without_a_hole(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await router.send(submit=submit("s", attempt=3, max_tokens=20))
    frames = [frame async for frame in frames_of(router, "s")]
    position = 0
    for frame in frames:
        assert (frame.position, frame.attempt) == (position, 3)
        assert not frame.logprobs
        position += len(frame.ids)
    assert position == 20
    assert [frame.finish for frame in frames[:-1]] == [0] * (len(frames) - 1)
    assert frames[-1].finish == inference_pb2.FINISH_REASON_LENGTH
    assert {frame.epoch for frame in router.seen} == {router.seen[0].epoch}


async def test_a_stream_is_said_to_run_before_its_first_ids(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await all_ids(router, submit("s", attempt=2, max_tokens=3))
    news = [frame for frame in router.seen if frame.WhichOneof("frame") in ("phases", "tokens")]
    assert [frame.WhichOneof("frame") for frame in news].index("phases") == 0
    (change,) = news[0].phases.streams
    assert (change.stream_id, change.attempt, change.phase) == ("s", 2, worker_pb2.STREAM_PHASE_RUNNING)


async def test_nothing_comes_after_the_end_of_a_stream(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await all_ids(router, submit("s", max_tokens=3))
    await all_ids(router, submit("fence"))
    ends = [
        frame.finish
        for each in router.seen
        for frame in each.tokens.streams
        if frame.stream_id == "s" and frame.position + len(frame.ids) >= 3
    ]
    assert len(ends) == 1


async def test_streams_run_side_by_side(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    for n in range(4):
        await router.send(submit=submit(f"s{n}", prompt_ids=(5 + n, 6), max_tokens=10 + n))
    positions = dict.fromkeys((f"s{n}" for n in range(4)), 0)
    finished: set[str] = set()
    while len(finished) < 4:
        for frame in (await router.next("tokens")).tokens.streams:
            assert frame.position == positions[frame.stream_id]
            positions[frame.stream_id] += len(frame.ids)
            finished |= {frame.stream_id} if frame.finish else set()
    assert positions == {f"s{n}": 10 + n for n in range(4)}


@SAMPLINGS
async def test_equal_submits_give_equal_ids(worker: Implementation, sampling: dict[str, float]) -> None:
    router, _ = await worker.greeted()
    assert await all_ids(router, submit("a", **sampling)) == await all_ids(router, submit("b", **sampling))


@SAMPLINGS
async def test_a_stream_goes_on_after_what_was_emitted(worker: Implementation, sampling: dict[str, float]) -> None:
    router, _ = await worker.greeted()
    ids = await all_ids(router, submit("unbroken", **sampling))
    for known in (1, 5, len(ids) - 1):
        resumed = submit(f"after {known}", 2, emitted_ids=tuple(ids[:known]), **sampling)
        await router.send(submit=resumed)
        frames = [frame async for frame in frames_of(router, resumed.stream_id)]
        assert frames[0].position == known
        assert [token for frame in frames for token in frame.ids] == ids[known:]


async def test_logprobs_come_with_every_id_if_wanted(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    for top in (0, 3):
        message = submit(f"top {top}", logprobs=top)
        await router.send(submit=message)
        async for frame in frames_of(router, message.stream_id):
            assert [entry.chosen.id for entry in frame.logprobs] == list(frame.ids)
            for entry in frame.logprobs:
                assert entry.chosen.logprob <= 0
                assert len(entry.top) == top
                likely = [alternative.logprob for alternative in entry.top]
                assert likely == sorted(likely, reverse=True)


async def test_a_cancelled_stream_gives_no_more(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await router.send(submit=submit("long", max_tokens=200))
    await anext(frames_of(router, "long"))
    await router.send(cancel=worker_pb2.Cancel(stream_id="long", attempt=1))
    await all_ids(router, submit("fence", max_tokens=2))
    seen = len(router.seen)
    await all_ids(router, submit("second fence"))
    since = [frame.stream_id for each in router.seen[seen:] for frame in each.tokens.streams]
    assert set(since) == {"second fence"}
    assert "rejected" not in router.kinds()


async def test_cancelling_what_does_not_run_does_nothing(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await router.send(cancel=worker_pb2.Cancel(stream_id="unknown", attempt=1))
    assert len(await all_ids(router, submit("s"))) == 12


async def test_routers_do_not_see_each_others_streams(worker: Implementation) -> None:
    (first, _), (second, _) = await worker.greeted(), await worker.greeted()
    await first.send(submit=submit("same", max_tokens=10))
    await second.send(submit=submit("same", prompt_ids=(9, 10), max_tokens=11))
    a, b = [
        [token for frame in [each async for each in frames_of(router, "same")] for token in frame.ids]
        for router in (first, second)
    ]
    assert (len(a), len(b)) == (10, 11)
    assert a != b[:10]


async def test_the_same_life_greets_again_with_the_same_numbers(worker: Implementation) -> None:
    first, hello = await worker.greeted()
    first.call.cancel()
    second, again = await worker.greeted()
    assert again == hello
    assert first.seen[-1].epoch == second.seen[0].epoch


async def test_the_tokenizer_of_the_card_can_be_fetched(worker: Implementation) -> None:
    _, hello = await worker.greeted()
    files = await worker.stub.Tokenizer(worker_pb2.TokenizerRequest(digest=hello.model.tokenizer_digest))
    assert files.digest == hello.model.tokenizer_digest
    assert Tokenizer.from_buffer(files.tokenizer_json).encode("night").ids
    assert json.loads(files.tokenizer_config_json)["eos_token"] == "</s>"
    assert "messages" in files.chat_template


async def test_a_lost_rank_fails_streams_as_retryable_and_begins_the_next_epoch(worker: Implementation) -> None:
    router, hello = await worker.greeted()
    # Ranks make hundreds of steps a second. The others make fewer, and have a smaller context.
    many_tokens = hello.model.context_length // 4
    unbroken = await all_ids(router, submit("unbroken", max_tokens=many_tokens))
    for attempt in (1, 3, 5, 7, 9):  # where the machine pauses the test, the streams may end before the rank is lost
        begun, epoch = len(router.seen), router.seen[-1].epoch
        attempts = {"s": attempt, "t": attempt + 3}
        for name, number in attempts.items():
            await router.send(submit=submit(name, number, max_tokens=many_tokens))
        emitted: list[int] = []
        async for frame in frames_of(router, "s"):
            emitted += frame.ids
            if len(emitted) >= 5:
                break
        seen = len(router.seen)
        await worker.lose_rank(router)
        after = await router.next("hello")
        assert after.epoch > epoch
        assert (after.hello.worker_id, after.hello.incarnation) == (hello.worker_id, hello.incarnation)
        await router.ready()
        ended = {each.stream_id for frame in router.seen[begun:] for each in frame.tokens.streams if each.finish}
        rejections = [frame.rejected for frame in router.seen[begun:] if frame.HasField("rejected")]
        lost = {name: number for name, number in attempts.items() if name not in ended}
        assert sorted((each.stream_id, each.attempt) for each in rejections) == sorted(lost.items())
        for rejected in rejections:
            assert (rejected.code, rejected.retryable, rejected.field) == ("worker_lost", True, "")
            assert rejected.message
        if not ended:
            break
    else:
        pytest.fail("the streams have ended before the rank was lost, in every try")

    since = router.seen[seen:]
    epochs = [frame.epoch for frame in since]
    assert epochs == sorted(epochs)
    assert all(frame.epoch == epoch for frame in since if frame.HasField("tokens") or frame.HasField("rejected"))
    restarting = [frame.HasField("status") and frame.status.state == RESTARTING for frame in since].index(True)
    assert restarting < [frame.HasField("rejected") for frame in since].index(True)
    given = [
        (tokens.position, token)
        for frame in since
        for tokens in frame.tokens.streams
        if tokens.stream_id == "s"
        for token in tokens.ids
    ]
    assert [position for position, _ in given] == list(range(len(emitted), len(emitted) + len(given)))
    emitted += [token for _, token in given]

    resumed = await all_ids(router, submit("s", attempt + 1, emitted_ids=tuple(emitted), max_tokens=many_tokens))
    assert emitted + resumed == unbroken
