"""New connections are accepted under a full load: some in each turn of the event loop, never all of a burst in one."""

import asyncio
import contextlib
import json
import socket
import time

from lockstep_router.faces.rest.listener import Listener
from lockstep_router.faces.rest.open_connections import ConnectionLimits, Connections
from test_connections import connection

BODY = json.dumps({"model": "reference", "prompt": "hello world", "max_tokens": 1}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
OLD = 64
NEW = 100  # fewer than the socket keeps waiting


async def read_answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def test_new_clients_are_served_beside_many_that_ask_again_at_once(cluster):
    answered = 0

    async def keep_asking(reader, writer):
        nonlocal answered
        while True:
            writer.write(REQUEST)
            await read_answer(reader)
            answered += 1

    async with cluster.over_http() as client, contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        old = [await stack.enter_async_context(connection(client)) for _ in range(OLD)]
        asking = [asyncio.create_task(keep_asking(*each)) for each in old]
        while answered < 2 * OLD:
            await asyncio.sleep(0)
        before, new = answered, []
        for _ in range(NEW):  # without a turn of the event loop, which the server shares
            each = stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port)))
            each.sendall(REQUEST)
            new.append(each)
        for each in new:
            reader, writer = await asyncio.open_connection(sock=each)
            await read_answer(reader)
            writer.close()
        meanwhile = answered - before
        assert not any(task.done() for task in asking), "the old clients go on"
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert meanwhile, "they had answers while the new ones waited"


@contextlib.contextmanager
def waiting(count):
    """A socket on which so many clients have connected that were not accepted yet; and the clients."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        for _ in range(count):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        yield listener


async def turns_to_accept(count, busy_s):
    """The number of accepted connections after each turn of an event loop whose turns take at least so long."""
    made, after = [], []

    def make_protocol(on_connected, wire):
        made.append(wire)
        return asyncio.Protocol()

    connections = Connections(ConnectionLimits(2 * count, 0, 1 << 16, 10.0, 1 << 20, 75.0))
    with waiting(count) as sock:
        listener = Listener(sock, None, connections, 10.0, make_protocol)
        async with asyncio.timeout(60):
            while len(made) < count:
                time.sleep(busy_s)
                await asyncio.sleep(0)
                after.append(len(made))
        listener.close()
        await listener.wait_closed()
        for wire in made:
            wire.close()
    return [turn for turn in after if turn]


async def test_burst_is_spread_over_turns():
    after = await turns_to_accept(1000, 0)
    assert after[0] < 100, "other work has its turn before most of them are accepted"
    assert len(after) <= 50, "and they need no turn each"


async def test_long_turns_take_more_connections_each():
    after = await turns_to_accept(400, 0.05)
    assert after[0] < 100
    assert len(after) <= 8
