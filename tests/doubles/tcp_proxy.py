"""A TCP proxy whose connections can be delayed, silenced, lost and cut, for tests. It runs in the test's event loop."""

import asyncio
import contextlib
import random

_PATIENCE_S = 60.0
_CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Forwards connections to a port of this machine.

    Args:
        port: where connections go.
        rng: of delays and losses.
    """

    def __init__(self, port, rng=None):
        self._target_port = port
        self._random = rng or random.Random(0)
        self._server = None
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers = set()
        self.delay_s = (0.0, 0.0)
        """The least and the greatest delay of what passes, in each direction."""
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
        """Nothing passes any more, and nobody is told."""
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
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._forward(reader, there_writer), self._forward(there_reader, writer))
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _forward(self, reader, writer):
        """Each piece passes after its delay, and none overtakes another."""
        loop = asyncio.get_running_loop()
        pieces = asyncio.Queue(1024)

        async def receive():
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    await pieces.put((loop.time() + self._random.uniform(*self.delay_s), data))
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
