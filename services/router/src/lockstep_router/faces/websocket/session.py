"""The requests of one socket: each is a task of its own, and what is wrong with one concerns no other."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

from lockstep_common.errors import ErrorCode, LockstepError, invalid
from pydantic_core import to_json

from lockstep_router.faces.access import NOBODY, Call, report
from lockstep_router.faces.bodies import Reservation
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.idempotency import idempotency_key, scope_of
from lockstep_router.faces.identity import Origin, owner_of
from lockstep_router.faces.openai.chunks import chunks_of
from lockstep_router.faces.openai.completions import chat_request, chat_style, completion_request, completion_style
from lockstep_router.faces.openai.fields import parse_object, validate
from lockstep_router.faces.openai.format import usage_body
from lockstep_router.faces.openai.responses.requests import responses_request, responses_style
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.openai.schemas import ChatCompletionRequest, CompletionRequest
from lockstep_router.faces.record import Record
from lockstep_router.faces.websocket import messages
from lockstep_router.faces.websocket.handshake import PATH
from lockstep_router.faces.websocket.messages import Cancel, Generate, Ping, Resume, client_message, id_of
from lockstep_router.faces.websocket.socket import DEFECT, RESTART, Message, Socket, SocketClosedError
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.resumption import After, IdempotencyKey, Reading
from lockstep_router.router import Router
from lockstep_router.tenants import Access
from lockstep_router.traces import begin_request

logger = logging.getLogger("lockstep.router")

_STREAMS_ENDPOINT = "/v1/streams/{stream_id}"
_ENDPOINTS = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
_KEY_FIELD = "idempotency_key"
_PENALTY_S = 0.01
"""Pause after a message that asks for no answer of the model, so that floods of them cost little."""


@dataclass(frozen=True)
class Client:
    """The client that has opened the socket."""

    headers: Mapping[str, str]
    """Of the handshake, without the API key if the router has keys."""
    address: str
    access: Access | None
    """What its key gave access to then; None if the router has no keys."""


@dataclass(eq=False)
class _Request:
    """A request in progress."""

    client_id: str
    record: Record
    call: Call
    task: asyncio.Task[None] | None = None
    stream_id: str | None = None
    """The stream that it began or reads, once there is one."""
    is_unwanted: bool = False
    """Whether its stream ends with it."""
    is_ending: bool = False
    """Whether the answer is over, and its last message is still to be sent. Nothing stops that."""


class Session:
    """Serves one socket until it closes."""

    def __init__(self, router: Router, socket: Socket, turns: BodyTurns, client: Client) -> None:
        self._router = router
        self._socket = socket
        self._turns = turns
        self._client = client
        self._requests: dict[str, _Request] = {}
        self._is_draining = False
        self._notices: set[asyncio.Task[None]] = set()
        socket.call_on_shutdown(self._on_shutdown)

    async def run(self) -> None:
        """Serve messages until the socket closes. Its streams go on for a time, so that the client can come back."""
        try:
            while (message := await self._socket.receive()) is not None:
                with suppress(SocketClosedError):  # what came behind it may be a cancel
                    await self._serve(message)
                del message  # a request keeps what it needs of it
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._socket.close(RESTART, "the router is shutting down")
            raise
        except Exception:
            logger.exception("session failed")
            # Nobody would take what the client sends from now on.
            self._socket.close(DEFECT, "something went wrong in the router")
        finally:
            self._socket.drop_messages()
            requests = [request.task for request in self._requests.values() if request.task is not None]
            ending = [*requests, *self._notices]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _serve(self, message: Message) -> None:
        client_id = None
        is_begun = False
        began, record = time.perf_counter(), self._record(message.reservation)
        call = Call("websocket", PATH, "GET")
        try:
            data = await self._turns.run(
                len(message.text), lambda: parse_object(message.text, self._router.settings.max_body_values)
            )
            client_id = id_of(data)
            match client_message(data):
                case Generate() as generate:
                    call = Call("websocket", _ENDPOINTS[generate.endpoint], "GET")
                    self._begin(generate.id, partial(self._generate, generate, len(message.text)), record, call)
                    is_begun = True
                case Resume() as resume:
                    call = Call("websocket", _STREAMS_ENDPOINT, "GET")
                    self._begin(resume.id, partial(self._resume, resume), record, call)
                    is_begun = True
                case Cancel() as cancel:
                    call = Call("websocket", _STREAMS_ENDPOINT, "GET")
                    await self._cancel(cancel, record, call)
                case Ping():
                    await self._socket.send(messages.PONG)
        except LockstepError as error:
            if not record.status:  # else it has been reported
                self._refuse(record, call, error, time.perf_counter() - began)
            await self._socket.send(messages.failed(client_id, error))
        finally:
            if not is_begun:
                message.reservation.release()
        if not is_begun:
            await asyncio.sleep(_PENALTY_S)

    def _refuse(self, record: Record, call: Call, error: LockstepError, seconds: float) -> None:
        """Report a message that has begun no request, as one that is refused."""
        with suppress(LockstepError):  # its key is no longer valid
            self._identify(record)
        record.status = error.meaning.http_status
        report(call, record, seconds, is_audited=self._client.access is not None)

    # Requests.

    def _begin(self, client_id: str, answer: Callable[[_Request], Awaitable[None]], record: Record, call: Call) -> None:
        """Begin a request.

        Raises:
            LockstepError: INVALID_REQUEST, its id is in use; OVERLOADED, the socket has too many.
        """
        if client_id in self._requests:
            raise invalid("id", "is that of another request in progress")
        limit = self._router.settings.websocket_max_requests
        if len(self._requests) >= limit:
            raise LockstepError(ErrorCode.OVERLOADED, f"this connection runs {limit} requests already")
        request = self._requests[client_id] = _Request(client_id, record, call)
        self._socket.note_busy(is_busy=True)
        request.task = asyncio.create_task(self._run(request, answer))
        request.task.add_done_callback(lambda _: self._end(request))

    def _end(self, request: _Request) -> None:
        request.record.release_body()
        del self._requests[request.client_id]
        if not self._requests:
            self._socket.note_busy(is_busy=False)
            if self._is_draining:
                self._socket.close(RESTART, "the router is shutting down")

    async def _cancel(self, message: Cancel, record: Record, call: Call) -> None:
        if (message.id is None) == (message.idempotency_key is None):
            raise invalid("id", "or idempotency_key is required, and not both")
        if message.idempotency_key is not None:
            await self._cancel_key(message.idempotency_key, record, call)
            return
        request = self._requests.get(message.id or "")
        if request is None:
            raise LockstepError(ErrorCode.NOT_FOUND, "there is no such request in progress", field="id")
        request.is_unwanted = True
        if not request.is_ending:
            assert request.task is not None
            request.task.cancel()

    async def _cancel_key(self, key: str, record: Record, call: Call) -> None:
        """End the request that has an idempotency key, and answer the client."""
        began = time.perf_counter()
        try:
            self._identify(record)
            await record.account.admit_reading()
            origin = self._origin(record)
            stream = await self._router.runs.cancel_key(scope_of(key, _KEY_FIELD, origin), owner_of(origin))
            record.status = 200
        except LockstepError as error:
            record.status = error.meaning.http_status
            raise
        finally:
            report(call, record, time.perf_counter() - began, is_audited=self._client.access is not None)
        await self._socket.send(messages.cancelled(key, stream))

    async def _run(self, request: _Request, answer: Callable[[_Request], Awaitable[None]]) -> None:
        """Run a request; its end is sent to the client, logged and counted, whatever it is."""
        began = time.perf_counter()
        record, failure = request.record, None
        try:
            self._identify(record)
            record.trace = begin_request(self._router.tracing, self._client.headers)
            answering = answer(request)
            del answer  # it holds the message, which is large and needed at the beginning only
            await answering
            record.status = 200
        except LockstepError as error:
            failure = error
        except SocketClosedError:
            failure = LockstepError(ErrorCode.CANCELLED, "the client has gone")
        except asyncio.CancelledError:
            failure = LockstepError(ErrorCode.CANCELLED, "the request was cancelled")
        except Exception:
            logger.exception("request failed", extra=record.log_fields())
            failure = LockstepError(ErrorCode.INTERNAL, "something went wrong in the router")
        request.is_ending = True
        if failure is not None:
            record.status = failure.meaning.http_status
        try:
            await self._forget_unwanted(request)
        finally:  # also if this is cancelled meanwhile
            report(request.call, record, time.perf_counter() - began, is_audited=self._client.access is not None)
        if failure is not None and self._socket.is_open:
            with suppress(SocketClosedError):
                await self._socket.send(messages.failed(request.client_id, failure))
            await self._forget_unwanted(request)  # it may have been cancelled only now

    async def _forget_unwanted(self, request: _Request) -> None:
        """End the stream of a request that its client does not want, and forget it. A second call does nothing."""
        if request.is_unwanted and request.stream_id is not None:
            stream_id, request.stream_id = request.stream_id, None
            with suppress(LockstepError):
                await self._router.runs.cancel(stream_id, self._owner(request.record))

    def _record(self, reservation: Reservation) -> Record:
        return Record(secrets.token_hex(12), self._router.limits.account(NOBODY), body=reservation)

    def _identify(self, record: Record) -> None:
        """Find out whose request it is now: a socket may outlive its key.

        Raises:
            LockstepError: INVALID_API_KEY.
        """
        if self._router.keys is None or self._client.access is None:
            return
        access = record.access = self._router.keys.renew(self._client.access)
        record.account, record.key_id = self._router.limits.account(access.tenant), access.key_id

    async def _generate(self, message: Generate, size_bytes: int, request: _Request) -> None:
        record = request.record
        # A request with a key may be answered by an earlier one, which is among the tenant's streams.
        await (record.account.admit() if message.idempotency_key is None else record.account.admit_reading())
        # A client that does not want to come back has no use for what goes on without it.
        ends_with_request = message.body.get("resumable") is False
        generation_request, style, key = await self._turns.run(
            size_bytes, partial(self._generation_request, message, record)
        )

        def on_stream(stream_id: str, is_resumed: bool) -> None:
            # At once: it may be cancelled before this request reads it.
            request.stream_id = stream_id
            # If another request began the stream, its client may want it.
            request.is_unwanted = ends_with_request and not is_resumed

        starting = self._router.runs.start(
            generation_request, record.account, style, owner=self._owner(record), key=key, on_stream=on_stream
        )
        del generation_request, message
        try:
            reading = await starting
        except LockstepError:
            request.stream_id = None  # it is over
            raise
        record.release_body()
        record.resumed = reading.is_resumed
        if not reading.is_resumed:
            record.prompt_tokens = reading.record.prompt_tokens
        await self._answer(reading, request)

    async def _resume(self, message: Resume, request: _Request) -> None:
        record = request.record
        record.come_back()
        await record.account.admit_reading()
        given = message.last_event_id
        after = None if given is None else After.parse(given, "last_event_id")
        request.stream_id = message.stream  # it may be cancelled while it is prepared, or taken from another router
        try:
            reading = await self._router.runs.resume(message.stream, self._owner(record), record.account, after)
        except LockstepError:
            request.stream_id = None
            raise
        await self._answer(reading, request)

    async def _answer(self, reading: Reading, request: _Request) -> None:
        record, client_id = request.record, to_json(request.client_id)
        record.request_id = request.stream_id = reading.record.request_id
        with closing(reading):
            try:
                await self._socket.send(messages.started(request.client_id, record.request_id))
                async for chunks in chunks_of(reading):
                    for each in chunks:
                        await record.write(self._socket.send(messages.event(client_id, each.event_id, each.data)))
            finally:
                record.completion_tokens = reading.delivered_tokens
                record.failovers = reading.failovers
        request.is_ending = True
        await self._socket.send(messages.done(request.client_id, usage_body(reading.usage)))

    def _generation_request(
        self, message: Generate, record: Record
    ) -> tuple[GenerationRequest, Style, IdempotencyKey | None]:
        """The request that a message makes, the form of its answer, and its idempotency key.

        Raises:
            LockstepError: INVALID_REQUEST, naming the field of the body.
        """
        settings = self._router.settings
        if message.body.get("stream", True) is not True:
            raise invalid("stream", "may only be true: answers over WebSocket are streams")
        body = message.body | {"stream": True}
        origin = self._origin(record, message.session)
        typed: ChatCompletionRequest | CompletionRequest | ResponsesRequest
        if message.endpoint == "chat.completions":
            typed = validate(ChatCompletionRequest, body)
            request, style = chat_request(typed, origin, settings), chat_style(typed)
        elif message.endpoint == "responses":
            typed = validate(ResponsesRequest, body)
            request, style = responses_request(typed, origin, settings), responses_style(typed)
        else:
            typed = validate(CompletionRequest, body)
            request, style = completion_request(typed, origin, settings), completion_style(typed)
        given, key = message.idempotency_key, None
        if given is not None:
            key = idempotency_key(given, _KEY_FIELD, origin, typed, style.kind)
        if message.timeout_s is not None:
            request = replace(request, caller=replace(request.caller, timeout_s=message.timeout_s))
        return request, style, key

    def _origin(self, record: Record, session: str | None = None) -> Origin:
        headers = self._client.headers
        if session is not None:
            headers = {**headers, "x-session-id": session}
        shares, tenant = self._router.settings.anonymous_cache == "shared", record.account.tenant.name
        return Origin(headers, self._client.address, tenant, record.trace, record.request_id, shares)

    def _owner(self, record: Record) -> str:
        return owner_of(self._origin(record))

    # The end.

    def _on_shutdown(self) -> None:
        """The router drains: no new requests. A second time: it ends."""
        if self._is_draining or not self._requests:
            self._socket.close(RESTART, "the router is shutting down")
            return
        self._is_draining = True
        notice = asyncio.ensure_future(self._send_notice())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _send_notice(self) -> None:
        with suppress(SocketClosedError):
            await self._socket.send(messages.DRAINING)
