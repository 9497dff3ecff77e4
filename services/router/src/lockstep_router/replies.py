"""Answers that live as long as their client: written in step with it, given up as soon as it leaves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from lockstep_common.errors import MEANINGS, ErrorCode, LockstepError
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_router.access import Record

logger = logging.getLogger("lockstep.router")

CLIENT_LEFT_STATUS = MEANINGS[ErrorCode.CANCELLED].http_status

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A finished JSON answer."""
    return Response(to_json(body), status, headers, media_type="application/json")


def error_reply(error: LockstepError) -> Response:
    """An error in OpenAI's shape."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return json_reply(error.openai_body(), error.meaning.http_status, headers)


def event(event_id: str, body: Any) -> bytes:
    """One server-sent event."""
    return b"id: " + event_id.encode() + b"\ndata: " + to_json(body) + b"\n\n"


class Client:
    """The one who waits for an answer, as something to write to.

    Nothing is sent before the first bytes of the answer are there: until then a failure still is an HTTP status.
    """

    def __init__(self, send: Send, record: Record, write_timeout_s: float) -> None:
        self._send = send
        self._record = record
        self._write_timeout_s = write_timeout_s

    async def reply(self, response: Response) -> None:
        """Send a finished answer."""
        await self._write_start(response.status_code, response.raw_headers)
        await self._write(bytes(response.body), more=False)

    async def reply_events(self, events: AsyncIterator[bytes]) -> None:
        """Send server-sent events as they come, then `[DONE]`, or an event with the error if there is one.

        Raises:
            LockstepError: before the first event.
        """
        started = False
        try:
            async for data in events:
                if not started:
                    await self._write_start(200, _EVENT_STREAM_HEADERS)
                    started = True
                await self._write(data, more=True)
            await self._write(_DONE, more=False)
        except LockstepError as error:
            if not started:
                raise
            self._record.status = error.meaning.http_status
            await self._write(b"data: " + to_json(error.openai_body()) + b"\n\n", more=False)

    async def _write_start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        # The server holds back once its buffer is full: a client that does not read makes this wait.
        async with asyncio.timeout(self._write_timeout_s):
            await self._send(message)


class LiveReply(Response):
    """An answer that is computed while its client waits. A client that leaves cancels the computation."""

    def __init__(self, answer: Callable[[Client], Awaitable[None]], *, record: Record, write_timeout_s: float) -> None:
        super().__init__()
        self._answer = answer
        self._record = record
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Run the computation against the client's leaving."""
        client = Client(send, self._record, self._write_timeout_s)
        answering = asyncio.ensure_future(self._run(client))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._record.status = CLIENT_LEFT_STATUS
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _run(self, client: Client) -> None:
        try:
            try:
                await self._answer(client)
            except LockstepError as error:
                await client.reply(error_reply(error))
        except TimeoutError:
            # The unfinished answer makes the server close the connection.
            self._record.status = CLIENT_LEFT_STATUS
            logger.warning("client does not read", extra={"request_id": self._record.request_id})


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
