"""Concurrent clients of one key: what they were told can have happened one after the other.

Hypothesis makes programs of several clients; their histories are checked against the models of `histories.py`. On Redis
the clients share two backends, as two state servers would; on `lossy` connections end now and then before or after
Redis has done an operation, so that nobody knows whether it was done.
"""

import asyncio
import dataclasses
import itertools
import os
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import histories
import pytest
from backends import LIMITS, TTL_S
from histories import Append, Choice, Piece, Read, Recorder, Stream, Trim, is_linearizable
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.errors import LockstepError
from lockstep_state.backend import Backend, Binding, Lease, Opening, StoredStream, Take, Write
from lockstep_state.memory import MemoryBackend
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.values import Values
from tcp_proxy import TcpProxy

CLIENTS = 4
LOSS = 0.05
STOP = inference_pb2.FINISH_REASON_STOP

_numbers = itertools.count()


@dataclasses.dataclass
class Bench:
    """An event loop with backends, for all examples of one test."""

    runner: asyncio.Runner
    backends: list[Backend]

    def play(self, programs: list[list[Any]], act: Callable[..., Any]) -> Recorder:
        """Run a program of each client, all at once, on names that nobody has used."""
        return self.runner.run(self._play(programs, act))

    async def _play(self, programs: list[list[Any]], act: Callable[..., Any]) -> Recorder:
        recorder, example = Recorder(), f"linear-{os.getpid()}-{next(_numbers)}"

        async def client(number: int, program: list[Any]) -> None:
            view: dict[str, Any] = {"owner": f"client-{number}"}
            for intent in program:
                await act(self.backends[number % len(self.backends)], example, recorder, view, intent)

        await asyncio.gather(*(client(number, program) for number, program in enumerate(programs)))
        return recorder


@pytest.fixture(params=["memory", "redis", "lossy"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "memory":
        with asyncio.Runner() as runner:
            yield Bench(runner, [MemoryBackend(64 << 20, LIMITS)])
        return
    server = request.getfixturevalue("redis_server")
    with asyncio.Runner() as runner:
        proxy = TcpProxy(server.port, random.Random(1))
        runner.run(proxy.__aenter__())
        proxy.loss = LOSS if request.param == "lossy" else 0.0
        address = f"redis://127.0.0.1:{proxy.port}/0"
        options = RedisOptions(address, timeout_s=20.0, batch_timeout_s=20.0, breaker_failures=1 << 30)
        backends = [RedisBackend(options, Values(), LIMITS) for _ in range(2)]
        yield Bench(runner, list(backends))
        for backend in backends:
            runner.run(backend.close())
        runner.run(proxy.__aexit__())


async def answered(doing: Any) -> Any:
    """The result; None if the store cannot be used, so that it is not known whether it was done."""
    try:
        return await doing
    except LockstepError:
        return None


# Streams.

APPENDS = st.tuples(
    st.just("append"),
    st.lists(
        st.tuples(
            st.integers(0, 2),  # choice
            st.integers(-1, 3),  # so many tokens before the end that the client knows
            st.integers(0, 3),  # tokens
            st.integers(0, 7),  # 0: other tokens than most clients have
            st.booleans(),  # the end
        ),
        max_size=2,
        unique_by=lambda piece: piece[0],
    ),
    st.sampled_from([None, b"record", b"record", b"record", b"record", b"other"]),
    st.sampled_from([None, None, None, b"end", b"another end"]),
)
STREAM_INTENTS = st.one_of(
    *[APPENDS] * 10, st.just(("read",)), st.just(("read",)), st.just(("take",)), st.just(("trim",))
)


async def act_on_stream(backend: Backend, key: str, recorder: Recorder, view: dict[str, Any], intent: Any) -> None:
    match intent:
        case ("append", pieces, record, seal):
            operation = make_append(view, pieces, record, seal)
            write = make_write(key, operation)
            response = await recorder.record(key, operation, append(backend, write))
            note_append(view, operation, response)
        case ("trim",):
            await recorder.record(key, Trim(), answered(backend.trim(key, [key], TTL_S)))
        case (name,):
            operation = Read(view["owner"] if name == "take" else "")
            response = await recorder.record(key, operation, read(backend, key, operation))
            if isinstance(response, Stream):
                view["lengths"] = {at: len(choice.ids) for at, choice in enumerate(response.choices)}
                if operation.taker:
                    view["epoch"] = response.epoch


def make_append(view: dict[str, Any], pieces: Any, record: bytes | None, seal: bytes | None) -> Append:
    lengths = view.setdefault("lengths", {})
    made = []
    for choice, back, count, variant, ends in pieces:
        position = max(0, lengths.get(choice, 0) - back)
        ids = tuple(100 * choice + 10 * (not variant) + at for at in range(position, position + count))
        made.append(Piece(choice, position, ids, STOP if ends else 0))
    choices = 2 if record == b"record" else 1
    return Append(view.get("epoch", 1), record, choices, view["owner"], tuple(made), seal)


def make_write(key: str, operation: Append) -> Write:
    pieces = [
        state_pb2.Piece(choice=each.choice, position=each.position, ids=each.ids, finish=each.finish)
        for each in operation.pieces
    ]
    opening = None if operation.record is None else Opening(operation.record, operation.choices, operation.owner)
    return Write(key, key, operation.epoch, TTL_S, opening, pieces, operation.seal)


async def append(backend: Backend, write: Write) -> tuple[Any, ...] | None:
    (result,) = await backend.append([write])
    name = state_pb2.WriteOutcome.Name(result.outcome).removeprefix("WRITE_OUTCOME_")
    match name:
        case "UNAVAILABLE":
            return None
        case "OK" | "STALE":
            return name, result.epoch
        case "GAP" | "CONFLICT":
            return name, result.choice, result.length
        case _:
            return (name,)


def note_append(view: dict[str, Any], operation: Append, response: tuple[Any, ...] | None) -> None:
    """What the client knows of the stream now."""
    match response:
        case ("OK", _):
            for piece in operation.pieces:
                end = piece.position + len(piece.ids)
                view["lengths"][piece.choice] = max(view["lengths"].get(piece.choice, 0), end)
        case ("GAP" | "CONFLICT", choice, length):
            view["lengths"][choice] = length
        case ("UNKNOWN",):
            view["lengths"] = {}


async def read(backend: Backend, key: str, operation: Read) -> Any:
    try:
        stored = await backend.read(key, Take(operation.taker, TTL_S) if operation.taker else None)
    except LockstepError:
        return None
    return "none" if stored is None else as_model(stored)


def as_model(stored: StoredStream) -> Stream:
    choices = tuple(Choice(tuple(log.ids), log.finish) for log in stored.logs)
    return Stream(stored.record, stored.epoch, stored.owner, choices, stored.seal)


# Names.

TARGETS = st.sampled_from([b"a", b"b", b"c"])
NAME_INTENTS = st.one_of(
    st.builds(histories.Bind, TARGETS, st.one_of(st.none(), st.just(b""), TARGETS)),
    st.builds(histories.LookUp),
    st.builds(histories.Unbind, st.one_of(st.none(), TARGETS)),
)


async def act_on_name(backend: Backend, key: str, recorder: Recorder, _: dict[str, Any], intent: Any) -> None:
    await recorder.record(key, intent, do_with_name(backend, key, intent))


async def do_with_name(backend: Backend, key: str, intent: Any) -> Any:
    try:
        match intent:
            case histories.Bind(target, expected):
                done, now = await backend.bind("t", key, Binding(target), TTL_S, expected)
                return done, now.target
            case histories.Unbind(target):
                return await backend.unbind("t", key, target)
            case _:
                asked = backend.bound(key) if random.random() < 0.5 else backend.touch("t", key, TTL_S)
                binding = await asked
                return b"" if binding is None else binding.target
    except LockstepError:
        return None


# Leases.

LEASE_INTENTS = st.sampled_from(["acquire", "acquire", "renew", "release", "look up"])


async def act_on_lease(backend: Backend, key: str, recorder: Recorder, view: dict[str, Any], intent: str) -> None:
    owner, epoch = view["owner"], view.get("epoch", 1)
    operation: Any
    match intent:
        case "acquire":
            operation, doing = histories.Acquire(owner), backend.acquire(key, owner, TTL_S)
        case "renew":
            operation, doing = histories.Renew(owner, epoch), backend.renew(key, owner, epoch, TTL_S)
        case "release":
            operation, doing = histories.Release(owner, epoch), backend.release(key, owner, epoch)
        case _:
            operation, doing = histories.LookUp(), look_up(backend, key)
    response = await recorder.record(key, operation, lease_answer(doing))
    if response is not None and response[0] and intent == "acquire":
        view["epoch"] = response[1].epoch


async def look_up(backend: Backend, key: str) -> tuple[bool, Lease]:
    lease = await backend.lease(key)
    return bool(lease.owner), lease


async def lease_answer(doing: Any) -> Any:
    try:
        done, lease = await doing
    except LockstepError:
        return None
    return done, histories.Lease(lease.owner, lease.epoch)


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "streams": (STREAM_INTENTS, act_on_stream, None, histories.stream_step),
    "names": (NAME_INTENTS, act_on_name, b"", histories.name_step),
    "leases": (LEASE_INTENTS, act_on_lease, histories.Lease(), histories.lease_step),
}


def check(bench: Bench, case: str, examples: int) -> None:
    intents, act, start, step = CASES[case]
    outcomes: dict[str, int] = {}
    number = secrets.randbelow(1 << 32)
    print(f"seed {number}")

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # interleavings differ, so that shrinking may take for ever
    )
    @given(st.lists(st.lists(intents, max_size=6), min_size=CLIENTS, max_size=CLIENTS))
    def run(programs: list[list[Any]]) -> None:
        for calls in bench.play(programs, act).calls.values():
            assert is_linearizable(calls, start, step), "\n".join(map(str, calls))
            for call in calls:
                name = call.response[0] if isinstance(call.response, tuple) else type(call.response).__name__
                outcomes[str(name)] = outcomes.get(str(name), 0) + 1

    run()
    print(outcomes)
    assert len(outcomes) >= 2, "the operations did not differ"


@pytest.mark.parametrize("case", list(CASES))
def test_concurrent_operations_are_linearizable(bench: Bench, case: str) -> None:
    check(bench, case, 100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(CASES))
def test_many_concurrent_operations_are_linearizable(bench: Bench, case: str) -> None:
    check(bench, case, 1500)


def test_a_history_that_cannot_have_happened_is_found() -> None:
    """The checker can fail: two grants with one epoch, a read of what was not written, an order that time forbids."""
    call = histories.Call
    held = (True, histories.Lease("a", 5))
    both = [call(histories.Acquire("a"), 0, 3, held), call(histories.Acquire("a"), 1, 2, held)]
    assert not is_linearizable(both, histories.Lease(), histories.lease_step)
    assert is_linearizable(both[:1], histories.Lease(), histories.lease_step)
    bound = [call(histories.Bind(b"a"), 0, 1, (True, b"a")), call(histories.LookUp(), 2, 3, b"")]
    assert not is_linearizable(bound, b"", histories.name_step)
    bound[1].began = 0.5  # at the same time both orders are right
    assert is_linearizable(bound, b"", histories.name_step)
    bound[0].ended, bound[0].response = histories.NEVER, None
    assert is_linearizable(bound, b"", histories.name_step), "what may have been done need not have been"
    opened = Append(1, b"record", 1, "a", (Piece(0, 0, (7,)),))
    other = Stream(b"record", 1, "a", (Choice((8,)),))
    streams = [call(opened, 0, 1, ("OK", 1)), call(Read(), 2, 3, other)]
    assert not is_linearizable(streams, None, histories.stream_step)
    streams[1].response = dataclasses.replace(other, choices=(Choice((7,)),))
    assert is_linearizable(streams, None, histories.stream_step)
