"""A TCP proxy whose connections can be delayed, slowed down, silenced, lost and cut, for tests. It runs in the test's
event loop, or in a thread with its own.
"""

import asyncio
import contextlib
import math
import random
import threading

_PATIENCE_S = 60.0
_CHUNK_BYTES = 1 << 16
_AHEAD_S = 0.005
"""A link takes data for so long before it has passed: a sleep may end late by less, and costs no bandwidth."""


class TcpProxy:
    """Forwards connections to a port of this machine.

    Args:
        port: where connections go.
        rng: of delays and losses.
    """

    def __init__(self, port, rng=None):
        self.target_port = port
        """Where connections go that are made from now on."""
        self._random = rng or random.Random(0)
        self._server = None
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers = set()
        self.delay_s = (0.0, 0.0)
        """The least and the greatest delay of what passes, in each direction."""
        self.bytes_per_s = math.inf
        """What passes in each direction, over all connections together."""
        self._passed_at = {"there": 0.0, "back": 0.0}
        """When all that was taken in a direction has passed, its delay not included."""
        self.connections = 0
        """So many were made."""
        self.loss = 0.0
        """How often a piece is lost, in each direction, and its connection with it."""

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self._passes.set()
        self.cut()
        async with asyncio.timeout(_PATIENCE_S):
            while self._writers:
                await asyncio.sleep(0.001)

    @property
    def port(self):
        return self._server.sockets[0].getsockname()[1]

    def silence(self):
        """Nothing passes any more, and neither side learns it."""
        self._passes.clear()

    def pass_on(self):
        """What was held back passes, and all that comes."""
        self._passes.set()

    def cut(self):
        """Reset every connection; new ones are made."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._forward(reader, there_writer, "there"), self._forward(there_reader, writer, "back")
            )
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _forward(self, reader, writer, direction):
        """Each piece passes after its delay, and none overtakes another."""
        loop = asyncio.get_running_loop()
        pieces = asyncio.Queue(1024)

        async def receive():
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    at = self._passed_at[direction] = (
                        max(self._passed_at[direction], loop.time()) + len(data) / self.bytes_per_s
                    )
                    await pieces.put((at + self._random.uniform(*self.delay_s), data))
                    if at > loop.time() + _AHEAD_S:
                        await asyncio.sleep(at - _AHEAD_S - loop.time())
            await pieces.put((0.0, b""))

        receiving = asyncio.create_task(receive())
        try:
            while True:
                at, data = await pieces.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                await self._passes.wait()
                if self._random.random() < self.loss:
                    raise ConnectionResetError
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()
        finally:
            receiving.cancel()


@contextlib.contextmanager
def proxy_before(port):
    """A proxy for tests without an event loop: it runs in that of a thread of its own."""
    proxy, is_ready, loop = TcpProxy(port), threading.Event(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve():
        async with proxy:
            is_ready.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(_PATIENCE_S)
        yield proxy
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(_PATIENCE_S)
        loop.close()
