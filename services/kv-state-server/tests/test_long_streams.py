"""A stream that is long is read while others are served, and comes as it was written."""

import asyncio
import time
import uuid
from functools import partial

import pytest
from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_state.backend import StoredStream
from lockstep_state.logs import Log
from lockstep_state.server import make_backend
from lockstep_state.services.calls import Running
from lockstep_state.services.encoded import encode
from lockstep_state.services.journal import Journal
from state_serving import make_settings
from test_journal_service import piece, record

TOKENS = 24_000
PIECE = 1000
TOP = 20


def logprobs(count):
    top = [inference_pb2.TokenLogprob(id=100_000 + n, logprob=-n / 3) for n in range(TOP)]
    return [
        inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(id=n, logprob=-1.5), top=top) for n in range(count)
    ]


class Context:
    """Of a call without a deadline."""

    @staticmethod
    def time_remaining():
        return None


@pytest.fixture
async def call(tmp_path, store):
    """Calls the service itself: gRPC copies the bytes of an answer, on either side, which takes time of its own."""
    settings = make_settings(tmp_path, store=store)
    backend = make_backend(settings)
    journal = Journal(backend, settings, Running(settings.max_calls))
    running = asyncio.create_task(backend.run())
    yield lambda method, request: getattr(journal, method)(request, Context())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await backend.close()


async def fill(call, tenant):
    """A stream of two choices with many tokens."""
    each = logprobs(PIECE)
    for position in range(0, TOKENS // 2, PIECE):
        ids = range(position, position + PIECE)
        written = state_pb2.StreamWrite(tenant=tenant, stream_id="stream", epoch=1)
        if position == 0:
            written.record.CopyFrom(record(2))
            written.owner = "router-1"
        written.pieces.extend(piece(choice, position, *ids, logprobs=each) for choice in range(2))
        (result,) = (await call("Append", state_pb2.AppendRequest(writes=[written]))).results
        assert result.outcome == state_pb2.WRITE_OUTCOME_OK


async def note_turns(turns_s, done):
    """Note the time between two turns of this task: of the processor, so that other processes do not count."""
    last = time.thread_time()
    while not done.is_set():
        await asyncio.sleep(0)
        now = time.thread_time()
        turns_s.append(now - last)
        last = now


async def look_up(call, tenant, answered, done):
    while not done.is_set():
        await call("LookUpClaim", state_pb2.LookUpClaimRequest(tenant=tenant, key="key"))
        answered.append(True)
        await asyncio.sleep(0)


@pytest.mark.parametrize("method", ["Read", "Take"])
async def test_others_are_served_while_a_long_stream_is_read(call, method):
    """No turn of the event loop is as long as a small part of what it takes to parse the stream's log probabilities."""
    tenant = f"tenant-{uuid.uuid4()}"
    await fill(call, tenant)
    request = {"Read": state_pb2.ReadRequest, "Take": partial(state_pb2.TakeRequest, owner="router-2")}[method]
    turns_s, answered, done = [], [], asyncio.Event()
    async with asyncio.TaskGroup() as others:
        others.create_task(note_turns(turns_s, done))
        others.create_task(look_up(call, f"{tenant}-other", answered, done))
        answer = await call(method, request(tenant=tenant, stream_id="stream"))
        done.set()
    read = state_pb2.ReadResponse.FromString(answer.SerializeToString())
    stored = [each.SerializeToString() for log in read.logs for each in log.logprobs]
    assert len(stored) == TOKENS
    began = time.thread_time()
    assert all(list(map(inference_pb2.Logprobs.FromString, stored)))
    parse_s = time.thread_time() - began
    assert len(answered) >= 3
    assert max(turns_s) < parse_s / 4


async def test_answer_has_what_is_stored():
    """Also if the stream grows meanwhile: then what was there when the answer was begun."""
    parts = logprobs(5000)
    plain, grown = Log(), Log()
    grown.add(piece(0, 0, *range(5000), logprobs=parts, cached_tokens=3, numerics="n"))
    logs = [Log(), plain, grown]
    plain.add(piece(1, 0, *range(1 << 20, (1 << 20) + 10_000), finish=inference_pb2.FINISH_REASON_STOP, inexact=True))
    stored = StoredStream(
        record(3).SerializeToString(), logs, state_pb2.Seal(outcome=b"end").SerializeToString(), 4, "o"
    )
    encoding = asyncio.create_task(encode(stored, [7, 9_000]))
    await asyncio.sleep(0)
    grown.add(piece(2, 5000, 1, logprobs=logprobs(1), finish=inference_pb2.FINISH_REASON_STOP))
    answer = state_pb2.ReadResponse.FromString((await encoding).content)
    assert (answer.record, answer.seal.outcome, answer.epoch, answer.owner) == (record(3), b"end", 4, "o")
    first, second, third = answer.logs
    assert first == state_pb2.ChoiceLog()
    assert (second.position, list(second.ids)) == (9_000, list(range((1 << 20) + 9_000, (1 << 20) + 10_000)))
    assert (second.finish, second.inexact, len(second.logprobs)) == (inference_pb2.FINISH_REASON_STOP, True, 0)
    assert (list(third.ids), list(third.logprobs)) == (list(range(5000)), parts)
    assert (third.finish, third.cached_tokens, third.numerics) == (0, 3, "n")


async def test_end_that_is_not_known_is_answered_as_it_is_stored():
    """A newer state server on the same Redis has written it."""
    log = Log()
    log.add(piece(0, 0, 5, finish=99))
    answer = await encode(StoredStream(record(1).SerializeToString(), [log], None, 1, "o"), ())
    (read,) = state_pb2.ReadResponse.FromString(answer.content).logs
    assert (list(read.ids), read.finish) == ([5], 99)
