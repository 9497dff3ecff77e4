"""What every store of journals does. A backend's tests subclass `JournalStoreContract` and make the store."""

import contextlib
from array import array

import pytest
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceRecord, Claim, Outcome, Piece, RequestRecord

STOP = inference_pb2.FINISH_REASON_STOP
KEEP_S = 10.0


def record(request_id="r-1", choices=2, prompt=(1, 2, 3), tenant="tenant"):
    samplings = [inference_pb2.Sampling(max_tokens=8, seed=seed, logprobs=1) for seed in range(choices)]
    return RequestRecord(
        request_id=request_id,
        owner=tenant,
        model="reference",
        digest="model-1",
        tokenizer_digest="tokenizer-1",
        created=1_700_000_000,
        style=Style("chat", stream=True, include_usage=True, logprobs=True),
        stops=("\n", "é"),
        prompts=(array("I", prompt),),
        prefixes=("",),
        choices=tuple(ChoiceRecord(f"s-{index}", sampling) for index, sampling in enumerate(samplings)),
        tenant=tenant,
        session="session:1",
        deadline_at=1_700_000_100.5,
    )


def logprobs(*ids):
    return [inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(id=each, logprob=-0.5)) for each in ids]


class JournalStoreContract:
    """Subclasses give the fixtures `store`, and `advance`: so many seconds pass, and what was appended is written."""

    async def test_stream_is_read_as_it_was_written(self, store, advance):
        await store.open(record())
        store.append("r-1", Piece(0, 0, [5, 6], logprobs(5, 6), cached_tokens=2))
        store.append("r-1", Piece(1, 0, [7], logprobs(7), STOP, is_inexact=True))
        store.append("r-1", Piece(0, 2, [8], logprobs(8)))
        store.append("r-1", Piece(0, 3, [], [], STOP))
        await store.seal("r-1", Outcome(), KEEP_S)
        await advance(0)
        stored = await store.read("r-1")
        assert stored.record == record()
        assert stored.outcome == Outcome()
        first, second = stored.logs
        assert (list(first.ids), first.logprobs, first.finish, first.is_inexact) == (
            [5, 6, 8],
            logprobs(5, 6, 8),
            STOP,
            False,
        )
        assert (list(second.ids), second.finish, second.is_inexact) == ([7], STOP, True)

    async def test_running_stream_has_no_outcome(self, store, advance):
        await store.open(record())
        store.append("r-1", Piece(0, 0, [5], logprobs(5)))
        await advance(KEEP_S * 2)
        stored = await store.read("r-1")
        assert stored.outcome is None
        assert list(stored.logs[0].ids) == [5]

    async def test_failure_is_kept_with_all_its_parts(self, store, advance):
        await store.open(record())
        failure = LockstepError(ErrorCode.WORKER_LOST, "gone", field="model", retry_after_s=5)
        await store.seal("r-1", Outcome(failure), KEEP_S)
        await advance(0)
        kept = (await store.read("r-1")).outcome.failure
        assert (kept.code, kept.message, kept.field, kept.retry_after_s) == (ErrorCode.WORKER_LOST, "gone", "model", 5)

    async def test_tokens_that_are_there_are_not_added_again(self, store, advance):
        await store.open(record())
        for position, ids in ((0, [5, 6]), (0, [5, 6]), (1, [6, 7])):
            store.append("r-1", Piece(0, position, ids, logprobs(*ids)))
        await advance(0)
        log = (await store.read("r-1")).logs[0]
        assert (list(log.ids), log.logprobs) == ([5, 6, 7], logprobs(5, 6, 7))

    async def test_gap_is_a_defect(self, store):
        await store.open(record())
        with pytest.raises(ValueError, match="does not continue"):
            store.append("r-1", Piece(0, 1, [5]))

    async def test_tokens_after_the_end_are_a_defect(self, store):
        await store.open(record())
        store.append("r-1", Piece(0, 0, [5], logprobs(5), STOP))
        with pytest.raises(ValueError, match="does not continue"):
            store.append("r-1", Piece(0, 1, [6], logprobs(6)))

    async def test_streams_that_are_not_open_take_nothing(self, store, advance):
        store.append("r-0", Piece(0, 0, [5]))
        await store.seal("r-0", Outcome(), KEEP_S)
        await store.remove("r-0")
        assert await store.read("r-0") is None
        await store.open(record())
        await store.seal("r-1", Outcome(), KEEP_S)
        store.append("r-1", Piece(0, 0, [5]))
        await advance(0)
        assert list((await store.read("r-1")).logs[0].ids) == []

    async def test_sealed_stream_expires(self, store, advance):
        await store.open(record())
        await store.seal("r-1", Outcome(), KEEP_S)
        await advance(KEEP_S / 2)
        assert await store.read("r-1") is not None
        await advance(KEEP_S / 2 + 1)
        assert await store.read("r-1") is None

    async def test_removed_stream_is_gone_with_its_key(self, store):
        assert await store.claim("key", Claim("r-1", b"body")) is None
        await store.open(record())
        await store.remove("r-1")
        assert await store.read("r-1") is None
        assert await store.claim("key", Claim("r-2", b"body")) is None

    async def test_key_has_one_stream(self, store):
        assert await store.claim("key", Claim("r-1", b"body")) is None
        assert await store.claim("key", Claim("r-2", b"other")) == Claim("r-1", b"body")
        assert await store.claim("other key", Claim("r-3", b"body")) is None

    async def test_key_tells_its_stream(self, store):
        assert await store.find("key") is None
        await store.claim("key", Claim("r-1", b"body"))
        assert await store.find("key") == Claim("r-1", b"body")
        await store.release("r-1")
        assert await store.find("key") is None

    async def test_tenant_that_fills_the_store_pushes_out_its_own_streams(self, store, advance):
        """Those of others stay, whichever limit it hits: with many streams, with large ones, with growing ones."""
        await store.open(record("small", tenant="small"))
        await store.seal("small", Outcome(), KEEP_S)
        for n in range(50):
            with contextlib.suppress(LockstepError):
                await store.open(record(f"many-{n}", tenant="greedy"))
                await store.seal(f"many-{n}", Outcome(), KEEP_S)
        for n in range(8):
            with contextlib.suppress(LockstepError):
                await store.open(record(f"large-{n}", prompt=[1] * 100_000, tenant="greedy"))
                await store.seal(f"large-{n}", Outcome(), KEEP_S)
        with contextlib.suppress(LockstepError):
            await store.open(record("growing", tenant="greedy"))
            for n in range(8):
                store.append("growing", Piece(0, n * 100_000, [5] * 100_000))
        await advance(0)
        assert await store.read("small") is not None

    async def test_released_key_is_free_and_its_stream_stays(self, store):
        await store.claim("key", Claim("r-1", b"body"))
        await store.open(record())
        await store.release("r-1")
        assert await store.read("r-1") is not None
        assert await store.claim("key", Claim("r-2", b"body")) is None

    async def test_key_expires_with_its_stream(self, store, advance):
        await store.claim("key", Claim("r-1", b"body"))
        await store.open(record())
        await store.seal("r-1", Outcome(), KEEP_S)
        await advance(KEEP_S + 1)
        assert await store.claim("key", Claim("r-2", b"body")) is None
