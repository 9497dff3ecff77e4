"""A key is replaced in the steps of docs/deployment.md: state servers of two steps beside each other, on one Redis."""

import itertools

import pytest
from backends import LIMITS, OPTIONS, TTL_S, Kept, piece
from lockstep_api.v1 import state_pb2
from lockstep_state.backend import Binding
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.values import Values

OLD, NEW = bytes([1] * 32), bytes([2] * 32)
STEPS = [[OLD], [OLD, NEW], [NEW, OLD], [NEW]]
OK = state_pb2.WRITE_OUTCOME_OK

_numbers = itertools.count()


@pytest.fixture(params=range(1, len(STEPS)), ids=["all read it", "it encrypts", "the old one is gone"])
async def beside(request, redis_server):
    """State servers before and after a step, and after and before it."""
    options = RedisOptions(redis_server.address, prefix=f"replaced-{next(_numbers)}:", **OPTIONS)
    # Values that were written before the last but one step have expired before the last one.
    backends = [RedisBackend(options, Values(keys), LIMITS) for keys in STEPS[request.param - 1 : request.param + 1]]
    yield [[Kept(each, "tenant", options) for each in order] for order in (backends, backends[::-1])]
    for backend in backends:
        await backend.close()


async def test_a_repeat_at_another_state_server_is_no_conflict(beside):
    for name, (first, second) in zip("ab", beside, strict=True):
        ids = {"pieces": [piece(0, 0, 5, 6)]}
        assert (await first.open(name, **ids)).outcome == OK
        assert (await second.open(name, **ids)).outcome == OK
        assert (await first.append(name, seal=b"end")).outcome == OK
        assert (await second.append(name, seal=b"end")).outcome == OK
        assert (await second.append(name, seal=b"another")).outcome == state_pb2.WRITE_OUTCOME_SEALED


async def test_a_claim_is_renewed_and_given_up_at_another_state_server(beside):
    claim, other = Binding(b"router-1"), Binding(b"router-2")
    for name, (first, second) in zip("ab", beside, strict=True):
        assert await first.backend.bind("t", name, claim, TTL_S, b"") == (True, claim)
        assert await second.backend.bind("t", name, claim, TTL_S, b"router-1") == (True, claim)
        assert await first.backend.bind("t", name, other, TTL_S, b"router-3") == (False, claim)
        assert not await first.backend.unbind("t", name, b"router-2")
        assert await first.backend.unbind("t", name, b"router-1")
