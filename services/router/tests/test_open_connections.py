"""Idle connections are closed in their order, by one timer."""

import asyncio

from lockstep_router.faces.rest.open_connections import ConnectionLimits, Connections
from router_cluster import eventually


class Idle:
    def __init__(self, closed):
        self.closed = closed

    def close_idle(self):
        self.closed.append(self)


def connections(keep_alive_s):
    return Connections(ConnectionLimits(10, 0, 1 << 16, 10.0, 1 << 20, keep_alive_s))


async def test_idle_connections_are_closed_in_their_order():
    opened, closed, loop = connections(0.05), [], asyncio.get_running_loop()
    idle = [Idle(closed) for _ in range(3)]
    for each in idle:
        opened.note_idle(each, loop)
        await asyncio.sleep(0.01)
    await eventually(lambda: len(closed) == 3)
    assert closed == idle
    assert not opened.idle


async def test_a_connection_with_a_request_stays_and_waits_anew_afterwards():
    opened, closed, loop = connections(0.05), [], asyncio.get_running_loop()
    busy, idle = Idle(closed), Idle(closed)
    opened.note_idle(busy, loop)
    opened.note_idle(idle, loop)
    del opened.idle[busy]
    await eventually(lambda: closed)
    assert closed == [idle]
    opened.note_idle(busy, loop)
    await eventually(lambda: len(closed) == 2)
    assert closed == [idle, busy]
