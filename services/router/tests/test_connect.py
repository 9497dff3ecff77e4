"""Connecting: a second attempt after a pause, the first established one wins, nothing is left open."""

import asyncio
import contextlib
import socket
import time

import grpc
import pytest
from lockstep_common.ports import free_port
from lockstep_router import metrics
from lockstep_router.discovery import WorkerAddress
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.workers.connect import connect
from router_cluster import eventually
from scripted_worker import ScriptedWorker

IDLE, CONNECTING, READY, FAILED = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)
NEVER = 3600.0


class Channel:
    """A channel whose state a test sets."""

    def __init__(self, target, state):
        self.target = target
        self.state = state
        self.closed = False
        self._changed = asyncio.Event()

    def set(self, state):
        self.state = state
        self._changed.set()

    def get_state(self, *, try_to_connect):
        assert try_to_connect
        return self.state

    async def wait_for_state_change(self, last):
        while self.state is last:
            await self._changed.wait()

    async def close(self):
        self.closed = True


class Network:
    """Opens channels; their first states are those of the attempts in turn."""

    def __init__(self, *states):
        self._states = iter(states)
        self.channels = []

    def open(self, target):
        self.channels.append(Channel(target, next(self._states)))
        return self.channels[-1]

    @property
    def targets(self):
        return [channel.target for channel in self.channels]

    @property
    def left_open(self):
        return [channel.target for channel in self.channels if not channel.closed]


async def test_first_attempt_that_is_established_is_the_only_one():
    network = Network(IDLE)
    connecting = asyncio.create_task(connect(["a", "b"], network.open, NEVER))
    await eventually(lambda: network.channels)
    network.channels[0].set(CONNECTING)
    network.channels[0].set(READY)
    assert (await connecting).target == "a"
    assert network.targets == network.left_open == ["a"]


async def test_second_attempt_follows_after_a_pause_and_the_first_established_wins():
    hedged = metrics.HEDGED_CONNECTS._value.get()
    network = Network(CONNECTING, CONNECTING)
    connecting = asyncio.create_task(connect(["a", "b"], network.open, 0.01))
    await eventually(lambda: network.targets == ["a", "b"])
    network.channels[1].set(READY)
    assert (await connecting).target == "b"
    assert network.left_open == ["b"]
    assert metrics.HEDGED_CONNECTS._value.get() == hedged + 1


async def test_late_first_attempt_may_still_win():
    network = Network(CONNECTING, CONNECTING)
    connecting = asyncio.create_task(connect(["a", "b"], network.open, 0.01))
    await eventually(lambda: len(network.channels) == 2)
    network.channels[0].set(READY)
    assert (await connecting).target == "a"
    assert network.left_open == ["a"]


async def test_single_address_is_tried_twice_but_not_if_it_refuses():
    network = Network(CONNECTING, READY)
    assert (await connect(["a"], network.open, 0.01)) is network.channels[1]
    assert network.left_open == ["a"]
    network = Network(FAILED)
    assert (await connect(["a"], network.open, NEVER)).state is FAILED
    assert network.targets == network.left_open == ["a"], "a call on it says why"


async def test_address_that_refuses_is_followed_at_once():
    network = Network(FAILED, READY)
    assert (await connect(["a", "b"], network.open, NEVER)).target == "b"
    assert network.left_open == ["b"]


async def test_all_refuse():
    network = Network(FAILED, FAILED, FAILED)
    assert (await connect(["a", "b", "c"], network.open, NEVER)).target == "c"
    assert network.left_open == ["c"]


async def test_refusal_after_the_second_attempt_began_waits_for_that():
    network = Network(CONNECTING, CONNECTING)
    connecting = asyncio.create_task(connect(["a", "b"], network.open, 0.01))
    await eventually(lambda: len(network.channels) == 2)
    network.channels[0].set(FAILED)
    await asyncio.sleep(0.01)
    assert not connecting.done()
    network.channels[1].set(READY)
    assert (await connecting).target == "b"
    assert network.left_open == ["b"]


async def test_cancelling_closes_all():
    network = Network(CONNECTING, CONNECTING)
    connecting = asyncio.create_task(connect(["a", "b"], network.open, 0.01))
    await eventually(lambda: len(network.channels) == 2)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert network.left_open == []


# Real sockets.


@contextlib.contextmanager
def black_hole():
    """An address that drops SYNs: a listener whose queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(16):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.05)
            try:
                filler.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("this kernel does not drop SYNs")
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class Known:
    """A discovery that reports one worker."""

    def __init__(self, *workers):
        self._workers = frozenset(workers)

    async def run(self, report):
        report.update(self._workers)
        await asyncio.Event().wait()


async def test_worker_is_reached_at_its_second_address_while_the_first_drops_packets():
    worker = ScriptedWorker("w0", f"127.0.0.1:{free_port()}")
    await worker.start()
    settings = RouterSettings(workers=["unix:/not/asked"], connect_timeout_s=60, connect_hedge_s=0.05)
    with black_hole() as hole:
        address = WorkerAddress(hole, "w0", (worker.target,))
        began = time.monotonic()
        async with Router(settings, Known(address)) as router:
            await eventually(router.workers.ready)
            assert time.monotonic() - began < 60, "not by the deadline"
            (link,) = router.workers.ready()
            assert (link.target, link.worker_id) == (hole, "w0")
            assert len(worker.connections) == 1
    await worker.kill()


async def test_address_that_drops_packets_fails_by_the_deadline_and_is_tried_again():
    with black_hole() as hole:
        hedged = metrics.HEDGED_CONNECTS._value.get()
        settings = RouterSettings(
            workers=[hole], connect_timeout_s=0.1, connect_hedge_s=0.03, backoff_initial_s=0.01, backoff_max_s=0.02
        )
        async with Router(settings) as router:
            await eventually(lambda: metrics.HEDGED_CONNECTS._value.get() >= hedged + 3)
            (link,) = router.workers.links
            assert link.problem == "no answer in time"


async def test_refused_connection_still_says_why():
    settings = RouterSettings(workers=[f"127.0.0.1:{free_port()}"], backoff_initial_s=0.01, backoff_max_s=0.02)
    async with Router(settings) as router:
        await eventually(lambda: router.workers.links and router.workers.links[0].problem)
        assert "refused" in router.workers.links[0].problem.lower()
