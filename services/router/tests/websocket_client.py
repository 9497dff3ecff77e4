"""A client of the router's WebSocket face, as tests use it."""

import asyncio
import contextlib
import json

import websockets.asyncio.client


class SocketClient:
    """One socket. Messages that arrive are kept by their request's id."""

    def __init__(self, connection):
        self.connection = connection
        self.messages = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self):
        with contextlib.suppress(websockets.ConnectionClosed):
            async for text in self.connection:
                self.messages.append(json.loads(text))
                self._news.set()
        self._news.set()

    @property
    def close_code(self):
        return self.connection.close_code

    async def send(self, **message):
        await self.connection.send(json.dumps(message))

    async def generate(self, client_id, endpoint="completions", *, more=None, **fields):
        body = {"model": "reference", "max_tokens": 12, "seed": 7, "user": "u"}
        body |= {"prompt": "hello world"} if endpoint == "completions" else {}
        body |= fields
        await self.send(type="generate", id=client_id, endpoint=endpoint, body=body, **(more or {}))

    def of(self, client_id):
        return [message for message in self.messages if message.get("id") == client_id]

    async def until(self, condition, timeout_s=30):
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self._reading.done(), (self.close_code, self.messages)
                self._news.clear()
                await self._news.wait()

    async def answer(self, client_id):
        """All messages of a request, the last one included."""
        await self.until(lambda: any(message["type"] in ("done", "error") for message in self.of(client_id)))
        return self.of(client_id)

    async def all(self):
        """All messages, as they arrive."""
        read = 0
        while True:
            await self.until(lambda count=read: len(self.messages) > count)
            yield self.messages[read]
            read += 1

    async def closed(self):
        async with asyncio.timeout(30):
            await self._reading
            await self.connection.wait_closed()
        return self.close_code


def text_of(messages, index=0):
    """The text of a choice of plain completions."""
    chunks = [choice for each in messages if each["type"] == "event" for choice in each["data"]["choices"]]
    return "".join(choice["text"] for choice in chunks if choice["index"] == index)


@contextlib.asynccontextmanager
async def socket_of(client, *, headers=None, **options):
    """A socket to the server of an HTTP client."""
    url = f"ws://{client.base_url.host}:{client.base_url.port}/v1/stream"
    options = {"open_timeout": 30, "close_timeout": 5, "compression": None, "max_size": 1 << 24} | options
    async with websockets.asyncio.client.connect(url, additional_headers=headers, **options) as connection:
        socket = SocketClient(connection)
        try:
            yield socket
        finally:
            socket._reading.cancel()
