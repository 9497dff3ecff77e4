"""Bodies that are cheap to send must be cheap to refuse, and all bodies together have a limit."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.openai.fields import parse
from lockstep_router.faces.openai.json_structure import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_PAIRS,
    MAX_STRINGS,
    _measure,
    _without_escapes,
    check_structure,
)
from lockstep_router.faces.openai.schemas import MAX_MESSAGES, ChatCompletionRequest, CompletionRequest
from lockstep_router.memory import MemoryTrimmer
from router_cluster import eventually
from starlette.requests import Request

PROMPT = b'{"model": "reference", "prompt": '
SIZE = 4 << 20


def filled(head, item, tail=b""):
    return head + item * ((SIZE - len(head) - len(tail)) // len(item)) + tail


HOSTILE = {
    "a text and then ids": filled(PROMPT + b'["a"', b",1", b"]}"),
    "empty lists of ids": filled(PROMPT + b"[[1]", b",[]", b"]}"),
    "short lists of ids": filled(PROMPT + b"[[1]", b",[1]", b"]}"),
    "empty messages": filled(b'{"model": "reference", "messages": [{}', b",{}", b"]}"),
    "unknown fields": b"{" + b",".join(b'"k%d":1' % index for index in range(330_000)) + b"}",
    "empty texts": filled(PROMPT + b'[""', b',""', b"]}"),
    "depth": filled(PROMPT, b"["),
    "digits": filled(b'{"n": ', b"1", b"}"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bodies_are_refused_before_they_are_validated(cluster, name):
    response = await cluster.client.post("/v1/completions", content=HOSTILE[name])
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", None)
    assert "the body has more than" in error["message"] or "not valid JSON" in error["message"]
    assert cluster.app.state.bodies.used_bytes == 0


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": ["a", *[1] * 20_000]}),
        (CompletionRequest, {"prompt": [1, *["a"] * 20_000]}),
        (CompletionRequest, {"prompt": [[1], *[[]] * 10_000]}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"k{index}": 1 for index in range(10_000)}}),
        (CompletionRequest, {"prompt": "a", "stream_options": {f"k{index}": 1 for index in range(10_000)}}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 10_000}),
        (CompletionRequest, {"prompt": "a", **{f"k{index}": 1 for index in range(10_000)}}),
        (ChatCompletionRequest, {"messages": [{}] * MAX_MESSAGES}),
        (ChatCompletionRequest, {"messages": [{f"k{index}": 1 for index in range(10_000)}]}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * 4096}]}),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{f"k{index}": 1 for index in range(10_000)}]}]},
        ),
    ],
)
def test_first_mistake_ends_the_validation(model, body):
    """What passes the limits of the structure must not be collected mistake by mistake either."""
    with pytest.raises(LockstepError) as caught:
        parse(model, json.dumps({"model": "reference"} | body).encode())
    assert caught.value.field
    cause = caught.value.__cause__
    assert cause is None or cause.error_count() <= 64


LARGEST = [
    {"role": "user", "content": [{"type": "text", "text": 'a "quoted", {bracketed}, [listed]: text\\'}]}
] * MAX_MESSAGES


def test_largest_conversation_is_taken():
    body = parse(ChatCompletionRequest, json.dumps({"model": "reference", "messages": LARGEST}).encode())
    assert len(body.messages) == MAX_MESSAGES


def test_punctuation_in_texts_does_not_count():
    text = '{"a": [1, 2], \\ "b"}' * 20_000
    body = parse(CompletionRequest, json.dumps({"model": "reference", "prompt": text}).encode())
    assert body.prompt == text


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b"]",
        b"{" + b",".join([b'"a":1'] * (MAX_PAIRS + 1)) + b"}",
        b"[" + b",".join([b'""'] * (MAX_STRINGS + 1)) + b"]",
        b"[" + b",".join([b"1"] * 1025) + b"]",
    ],
)
def test_each_limit_counts(body):
    with pytest.raises(LockstepError, match="the body has more than") as caught:
        check_structure(body, 1024 if body.startswith(b"[1") else 1 << 20)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def count(value):
    """(commas and containers, pairs, containers, depth) of parsed JSON."""
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [count(each) for each in (value.values() if isinstance(value, dict) else value)]
    values, pairs, containers, depths = (list(column) for column in zip(*inner, strict=True)) if inner else ([],) * 4
    return (
        sum(values) + max(0, len(value) - 1) + 1,
        sum(pairs) + (len(value) if isinstance(value, dict) else 0),
        sum(containers) + 1,
        max(depths, default=0) + 1,
    )


@given(_VALUES, st.booleans())
def test_structure_is_measured_exactly(value, ascii_only):
    found = _measure(_without_escapes(json.dumps(value, ensure_ascii=ascii_only).encode()))
    assert (found.values, found.pairs, found.containers, found.depth) == count(value)


class Upload:
    """A body that arrives piece by piece."""

    def __init__(self, budget, declared=0):
        self.pieces = asyncio.Queue()
        self.reservation = budget.reserve()
        headers = [(b"content-length", b"%d" % declared)] if declared else []
        request = Request({"type": "http", "headers": headers}, self.pieces.get)
        self.reading = asyncio.create_task(self.reservation.read(request, max_bytes=1 << 20, timeout_s=30))

    async def send(self, count, *, more=True):
        size = self.reservation.size_bytes
        self.pieces.put_nowait({"type": "http.request", "body": b"x" * count, "more_body": more})
        await eventually(lambda: self.reading.done() or self.reservation.size_bytes != size)

    async def arrive(self, count):
        """Send a part of a body whose size was declared."""
        arrived = self.reservation.arrived_bytes + count
        self.pieces.put_nowait({"type": "http.request", "body": b"x" * count, "more_body": True})
        await eventually(lambda: self.reservation.arrived_bytes == arrived)


async def code_of(upload):
    with pytest.raises(LockstepError) as caught:
        await upload.reading
    return caught.value.code


async def test_stalled_bodies_make_room_for_small_ones():
    budget = BodyBudget(300, 1 << 30, MemoryTrimmer())
    first, second = Upload(budget), Upload(budget)
    await first.send(150)
    await second.send(150)
    small = Upload(budget)
    await small.send(50, more=False)
    assert len(await small.reading) == 50
    assert await code_of(first) is ErrorCode.OVERLOADED
    assert not second.reading.done()
    assert budget.used_bytes == 200
    for upload in (first, second, small):
        upload.reservation.release()
    assert budget.used_bytes == 0
    second.reading.cancel()


async def test_the_largest_body_itself_is_refused_when_it_grows():
    budget = BodyBudget(300, 1 << 30, MemoryTrimmer())
    small, large = Upload(budget), Upload(budget)
    await small.send(100)
    await large.send(150)
    await large.send(150)
    assert await code_of(large) is ErrorCode.OVERLOADED
    large.reservation.release()
    assert budget.used_bytes == 100
    small.reading.cancel()


async def test_large_bodies_are_refused_before_they_are_read_unless_others_have_stalled():
    budget = BodyBudget(300_000, 1 << 30, MemoryTrimmer())
    first = Upload(budget, 200_000)
    await eventually(lambda: budget.used_bytes == 200_000)
    assert await code_of(Upload(budget, 200_000)) is ErrorCode.OVERLOADED
    first.reservation.progressed_at -= 60
    second = Upload(budget, 200_000)
    assert await code_of(first) is ErrorCode.OVERLOADED
    assert budget.used_bytes == 200_000
    assert not second.reading.done()
    second.reading.cancel()


async def test_bodies_that_arrive_too_slowly_to_be_complete_in_time_have_stalled():
    budget = BodyBudget(800_000, 1 << 30, MemoryTrimmer())
    trickling, ahead, steady = Upload(budget, 200_000), Upload(budget, 200_000), Upload(budget, 200_000)
    await eventually(lambda: budget.used_bytes == 600_000)
    await ahead.arrive(50_000)
    for _ in range(3):  # at 30 s for the whole, two seconds are worth 13,334 bytes
        for upload, count in ((trickling, 1), (ahead, 1), (steady, 14_000)):
            upload.reservation.progressed_at -= 2
            await upload.arrive(count)
    first = Upload(budget, 200_000)
    assert await code_of(trickling) is ErrorCode.OVERLOADED
    assert not ahead.reading.done(), "more of it has arrived"
    second = Upload(budget, 200_000)
    assert await code_of(ahead) is ErrorCode.OVERLOADED
    assert await code_of(Upload(budget, 200_000)) is ErrorCode.OVERLOADED
    for upload in (steady, first, second):
        assert not upload.reading.done()
        upload.reading.cancel()


async def test_body_that_has_caught_up_has_not_stalled():
    budget = BodyBudget(300_000, 1 << 30, MemoryTrimmer())
    upload = Upload(budget, 200_000)
    upload.reservation.progressed_at -= 8
    await upload.arrive(20_000)
    assert not upload.reading.done()
    await upload.arrive(40_000)
    assert await code_of(Upload(budget, 200_000)) is ErrorCode.OVERLOADED
    assert not upload.reading.done()
    upload.reading.cancel()


async def test_bodies_that_wait_to_become_tokens_still_count():
    budget = BodyBudget(300, 1 << 30, MemoryTrimmer())
    complete, late = Upload(budget), Upload(budget)
    await complete.send(250, more=False)
    await complete.reading
    await late.send(100)
    assert await code_of(late) is ErrorCode.OVERLOADED


async def test_large_bodies_that_wait_to_become_tokens_leave_room_for_small_ones():
    budget = BodyBudget(800_000, 1 << 30, MemoryTrimmer())
    complete = Upload(budget, 600_000)
    await complete.send(600_000, more=False)
    await complete.reading
    assert await code_of(Upload(budget, 150_000)) is ErrorCode.OVERLOADED
    undeclared = Upload(budget)
    await undeclared.send(60_000)
    await undeclared.send(60_000)
    await undeclared.send(60_000)
    assert await code_of(undeclared) is ErrorCode.OVERLOADED
    undeclared.reservation.release()
    for _ in range(3):
        small = Upload(budget)
        await small.send(60_000, more=False)
        assert len(await small.reading) == 60_000


async def test_a_body_that_failed_takes_no_room_and_is_not_refused_again():
    """Its answer may take long to reach the client, and others need the room meanwhile."""
    budget = BodyBudget(4 << 20, 1 << 30, MemoryTrimmer())
    too_large, gone, cancelled = Upload(budget), Upload(budget), Upload(budget)
    for upload in (too_large, gone, cancelled):
        for _ in range(16):
            await upload.send(60_000)
    await too_large.send(200_000)
    assert await code_of(too_large) is ErrorCode.PAYLOAD_TOO_LARGE
    gone.pieces.put_nowait({"type": "http.disconnect"})
    assert await code_of(gone) is ErrorCode.CANCELLED
    cancelled.reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled.reading
    assert budget.used_bytes == 0
    others = [Upload(budget) for _ in range(4)]
    for upload in others:
        for _ in range(16):
            await upload.send(50_000)
    small = Upload(budget)
    await small.send(50_000, more=False)
    assert len(await small.reading) == 50_000
    for upload in others:
        upload.reading.cancel()


async def test_budget_is_whole_again_after_requests_of_all_kinds(cluster):
    for content in (b"no json", b"x" * (5 << 20), b'{"model": "reference", "prompt": "hi"}', b""):
        await cluster.client.post("/v1/completions", content=content)
    assert cluster.app.state.bodies.used_bytes == 0


async def test_large_bodies_come_in_at_a_limited_rate(make_cluster):
    cluster = await make_cluster(1, bodies_bytes_per_s=1 << 20)
    small, large = b'{"model": "reference", "prompt": "hi", "max_tokens": 1}', b" " * (300 << 10)
    loop = asyncio.get_running_loop()

    async def seconds(content):
        began = loop.time()
        await cluster.client.post("/v1/completions", content=content)
        return loop.time() - began

    async def chunks():
        for _ in range(5):
            yield large[: 60 << 10]

    slow = asyncio.create_task(seconds(chunks()))
    await asyncio.sleep(0.05)
    assert await seconds(small) < await slow
    assert slow.result() > 0.1
