"""Calls in progress are bounded for all clients together, and for each."""

import pytest
from lockstep_common.call_bounds import CallBounds, address_of
from lockstep_common.errors import ErrorCode, LockstepError


class Context:
    """A call that ends when it is told."""

    def __init__(self):
        self._callbacks = []

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def end(self):
        for callback in self._callbacks:
            callback(self)


def refused(bounds, client):
    with pytest.raises(LockstepError) as caught:
        bounds.take(client, Context())
    assert caught.value.code is ErrorCode.OVERLOADED
    return caught.value.message


def test_one_client_cannot_take_the_place_of_others():
    bounds, calls = CallBounds("calls", 2, 3), [Context() for _ in range(3)]
    for call, client in zip(calls, ("a", "a", "b"), strict=True):
        bounds.take(client, call)
        if client == "a" and call is calls[1]:
            assert refused(bounds, "a") == "2 calls of this client are in progress already, the limit for one"
    assert refused(bounds, "c") == "3 calls are in progress already, the limit for all"
    calls[0].end()
    bounds.take("a", Context())


def test_clients_that_are_not_known_count_together_only():
    bounds = CallBounds("calls", 1, 2)
    bounds.take("", Context())
    bounds.take("", Context())
    refused(bounds, "")


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.1.2.3:5000", "10.1.2.3"), ("ipv6:%5B::1%5D:5000", "::1"), ("unix:/a", ""), ("", "")],
)
def test_address_of_a_peer(peer, address):
    assert address_of(peer) == address
