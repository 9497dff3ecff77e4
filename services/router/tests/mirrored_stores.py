"""Mirrored stores of journals: streams with tokens in them, and waits for what the state server has."""

from journal_store_contract import STOP, logprobs, record
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.journals import Outcome, Piece
from router_cluster import eventually

WINDOW_S = 100.0
TIMEOUT_S = 5.0
"""Tests that are not about time do not count on the machine's."""
FAILED = Outcome(LockstepError(ErrorCode.WORKER_LOST, "gone"))
"""The stream may go on."""


async def mirrored(store):
    """Wait until the state server has everything."""
    await eventually(lambda: store.mirror.is_idle)


def count(metric, *labels):
    return metric.labels(*labels)._value.get() if labels else metric._value.get()


async def fill(store, request_id="r-1", **changes):
    """A stream with a few tokens of two choices."""
    await store.open(record(request_id, **changes))
    store.append(request_id, Piece(0, 0, [5, 6], logprobs(5, 6), cached_tokens=2, numerics="numerics-1"))
    store.append(request_id, Piece(1, 0, [7], logprobs(7), STOP, is_inexact=True))


async def take(store, request_id="r-1"):
    """Have a store take a stream, as another router that was asked for it."""
    return await store.take(await store.look_up(request_id, "tenant"))


async def all_told(store):
    """Wait until the state server has everything, and it is known which routers have the streams that were taken."""
    await eventually(lambda: not store.is_away and store.mirror.is_idle and not store._reporting)
