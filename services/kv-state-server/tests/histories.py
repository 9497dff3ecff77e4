"""Histories of concurrent operations on one key, and whether they are linearizable.

The search is Wing and Gong's: take an operation that no other one ended before, apply it to the model, go on with the
rest. States that were reached with the same operations done are not looked at again.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NEVER = float("inf")

State = Hashable
Step = Callable[[Any, Any, Any], list[Any]]
"""(state, operation, response) -> the states after it; none if the response is wrong. The response None: it is not
known whether the operation was done."""


@dataclass
class Call:
    """One operation: when it began and ended, and what came of it."""

    operation: Any
    began: float
    ended: float = NEVER
    response: Any = None


@dataclass
class Recorder:
    """Histories by key. Times are numbers in the order in which things happened in this event loop."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    clock: Any = field(default_factory=itertools.count)

    async def record(self, key: str, operation: Any, doing: Any) -> Any:
        """The response of what is done; None if it fails, which leaves open whether it was done."""
        call = Call(operation, next(self.clock))
        self.calls.setdefault(key, []).append(call)
        response = await doing
        if response is not None:
            call.ended, call.response = next(self.clock), response
        return response


def is_linearizable(calls: Sequence[Call], start: State, step: Step) -> bool:
    """Whether the operations can have happened one after the other, each between its beginning and its end."""
    seen: set[tuple[int, State]] = set()
    todo: list[tuple[int, State]] = [(0, start)]
    certain = sum(1 << at for at, call in enumerate(calls) if call.ended != NEVER)
    while todo:
        done, state = todo.pop()
        if done & certain == certain:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        left = [(at, call) for at, call in enumerate(calls) if not done >> at & 1]
        first_end = min(call.ended for _, call in left)
        for at, call in left:
            if call.began <= first_end:
                todo += [(done | 1 << at, after) for after in step(state, call.operation, call.response)]
    return False


# Streams.


@dataclass(frozen=True)
class Choice:
    ids: tuple[int, ...] = ()
    finish: int = 0


@dataclass(frozen=True)
class Stream:
    record: bytes
    epoch: int
    owner: str
    choices: tuple[Choice, ...]
    seal: bytes | None = None


@dataclass(frozen=True)
class Tombstone:
    """What a stream that was taken leaves when it is trimmed."""

    epoch: int


@dataclass(frozen=True)
class Piece:
    choice: int
    position: int
    ids: tuple[int, ...] = ()
    finish: int = 0


@dataclass(frozen=True)
class Append:
    epoch: int
    record: bytes | None = None
    choices: int = 0
    owner: str = ""
    pieces: tuple[Piece, ...] = ()
    seal: bytes | None = None


@dataclass(frozen=True)
class Read:
    taker: str = ""


@dataclass(frozen=True)
class Trim:
    pass


def piece_refusals(choices: Sequence[Choice], piece: Piece) -> list[tuple[Any, ...]]:
    """Why a piece cannot be added: (outcome, choice, length)."""
    if piece.choice >= len(choices):
        return [("CONFLICT", piece.choice, 0)]
    ids, finish = choices[piece.choice].ids, choices[piece.choice].finish
    if piece.position > len(ids):
        return [("GAP", piece.choice, len(ids))]
    known = piece.ids[: len(ids) - piece.position]
    end = piece.position + len(piece.ids)
    is_other = ids[piece.position : piece.position + len(known)] != known
    if finish:
        is_other = is_other or end > len(ids) or piece.finish not in (0, finish)
    else:
        is_other = is_other or bool(piece.finish and end < len(ids))
    return [("CONFLICT", piece.choice, len(ids))] if is_other else []


def is_news(choice: Choice, piece: Piece) -> bool:
    return piece.position + len(piece.ids) > len(choice.ids) or bool(piece.finish and not choice.finish)


def append_outcome(stream: Stream | Tombstone | None, write: Append) -> tuple[list[tuple[Any, ...]], Stream | None]:
    """The refusals that hold, or, without one, the stream after the write."""
    if isinstance(stream, Tombstone) and write.epoch < stream.epoch:
        return [("STALE", stream.epoch)], None
    if not isinstance(stream, Stream):
        if write.record is None:
            return [("UNKNOWN",)], None
        stream = Stream(write.record, write.epoch, write.owner, (Choice(),) * write.choices)
    if write.epoch < stream.epoch:
        return [("STALE", stream.epoch)], None
    if write.record not in (None, stream.record):
        return [("CONFLICT", 0, 0)], None
    refusals = [refusal for piece in write.pieces for refusal in piece_refusals(stream.choices, piece)]
    if stream.seal is not None:
        changes = [p for p in write.pieces if p.choice < len(stream.choices) and is_news(stream.choices[p.choice], p)]
        if changes or write.seal not in (None, stream.seal):
            refusals.append(("SEALED",))
    if refusals:
        return refusals, None
    choices = list(stream.choices)
    for piece in write.pieces:
        old = choices[piece.choice]
        ids = old.ids + piece.ids[len(old.ids) - piece.position :] if is_news(old, piece) else old.ids
        choices[piece.choice] = Choice(ids, old.finish or piece.finish)
    return [], replace(stream, epoch=write.epoch, choices=tuple(choices), seal=stream.seal or write.seal)


def stream_step(stream: Stream | Tombstone | None, operation: Any, response: Any) -> list[Any]:
    """The model of a stream."""
    if isinstance(operation, Append):
        refusals, after = append_outcome(stream, operation)
        if response is None:
            return [stream] if refusals else [stream, after]
        if refusals:
            return [stream] if response in refusals else []
        return [after] if response == ("OK", operation.epoch) else []
    if isinstance(operation, Trim):
        is_there = isinstance(stream, Stream)
        trimmed = (Tombstone(stream.epoch) if stream.epoch > 1 else None) if isinstance(stream, Stream) else stream
        if response is None:
            return [trimmed, stream]
        return [trimmed] if response == int(is_there) else []
    after = stream
    if isinstance(stream, Stream) and operation.taker:
        after = replace(stream, epoch=stream.epoch + 1, owner=operation.taker)
    if response is None:
        return [stream, after]
    return [after] if response == (after if isinstance(after, Stream) else "none") else []


# Names.


@dataclass(frozen=True)
class Bind:
    target: bytes
    expected: bytes | None = None


@dataclass(frozen=True)
class LookUp:
    pass


@dataclass(frozen=True)
class Unbind:
    target: bytes | None = None


def name_step(target: bytes, operation: Any, response: Any) -> list[Any]:
    """The model of a name; it is bound to b"" if it is not bound."""
    if isinstance(operation, LookUp):
        return [target] if response in (None, target) else []
    if isinstance(operation, Bind):
        is_done = operation.expected is None or target in (operation.expected, operation.target)
        after = operation.target if is_done else target
        right: Any = (is_done, after)
    else:
        is_done = bool(target) and operation.target in (None, target)
        after = b"" if is_done else target
        right = is_done
    if response is None:
        return [target, after]
    return [after] if response == right else []


# Leases.


@dataclass(frozen=True)
class Lease:
    owner: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class Acquire:
    owner: str


@dataclass(frozen=True)
class Renew:
    owner: str
    epoch: int


@dataclass(frozen=True)
class Release:
    owner: str
    epoch: int


UNKNOWN_EPOCH = -1
"""Of a grant whose answer was lost."""


def lease_step(lease: Lease, operation: Any, response: Any) -> list[Any]:
    """The model of a lease; the response is (whether it was done, the lease then). The store chooses the epochs."""
    if isinstance(operation, Acquire):
        return acquire_step(lease, operation.owner, response)
    is_done = bool(lease.owner)
    if not isinstance(operation, LookUp):
        is_done = lease == Lease(operation.owner, operation.epoch) and is_done
    after = Lease("", lease.epoch) if is_done and isinstance(operation, Release) else lease
    if response is None:
        return [lease, after]
    return [response[1]] if response[0] == is_done and is_same(after, response[1]) else []


def acquire_step(lease: Lease, owner: str, response: Any) -> list[Any]:
    """The model of a grant: each has a higher epoch than the one before it."""
    is_free = lease.owner in ("", owner)
    if response is None:
        return [lease, Lease(owner, UNKNOWN_EPOCH)] if is_free else [lease]
    done, after = response
    if not is_free:
        return [after] if not done and is_same(lease, after) else []
    return [after] if done and after.owner == owner and after.epoch > lease.epoch else []


def is_same(lease: Lease, seen: Lease) -> bool:
    return lease.owner == seen.owner and lease.epoch in (UNKNOWN_EPOCH, seen.epoch)
