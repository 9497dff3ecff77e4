"""The calls of `lockstep.v1.Inference`: whose they are, their messages, their events, their end.

Each call reads its one message itself, so that nothing of it is read for callers who are refused. On the wire that is
the same as a call with a plain message.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.faces.access import Call, report
from lockstep_router.faces.grpc.caller import abort, identify, metadata_of, new_record, origin_of
from lockstep_router.faces.grpc.inbound import Inbound
from lockstep_router.faces.grpc.translate import generation_request, is_chat, parse_generate, token_event, usage_event
from lockstep_router.faces.rest.identity import MAX_TIMEOUT_S, Origin
from lockstep_router.faces.rest.parsing import Parsing
from lockstep_router.faces.rest.record import Record
from lockstep_router.faces.rest.resumable import owner_of
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.resumption import After, Reading, event_id
from lockstep_router.router import Router

logger = logging.getLogger("lockstep.router")

SERVICE = "lockstep.v1.Inference"
ROUTER_METADATA = "x-lockstep-router"
STREAM_METADATA = "x-lockstep-stream-id"
_CHAT, _COMPLETIONS, _STREAMS = "/v1/chat/completions", "/v1/completions", "/v1/streams/{stream_id}"
_MAX_ID_CHARS = 256


class _Progress:
    """One call: who sends it, and what it has come to."""

    def __init__(self, context: grpc.aio.ServicerContext, record: Record, metadata: list[tuple[str, Any]]) -> None:
        self.context = context
        self.record = record
        self.metadata = metadata
        self.endpoint = _STREAMS
        self.is_unwanted = False
        """Whether the stream ends with the call."""
        self.owner: str | None = None
        """Names who may resume the stream, once there is one."""


class Inference:
    """The service's behaviours."""

    def __init__(self, router: Router, inbound: Inbound, parsing: Parsing) -> None:
        self._router = router
        self._inbound = inbound
        self._parsing = parsing

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls by name."""
        behaviours: dict[str, Callable[[_Progress], Awaitable[None]]] = {
            "Generate": self._generate,
            "Resume": self._resume,
            "Cancel": self._cancel,
        }
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(partial(self._serve, behaviour), response_serializer=_serialize)
            for name, behaviour in behaviours.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _serve(
        self, behaviour: Callable[[_Progress], Awaitable[None]], _: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Serve a call; its end is logged and counted, whatever it is."""
        began = time.perf_counter()
        metadata = metadata_of(context)
        record = new_record(self._router, metadata)
        call, failure = _Progress(context, record, metadata), None
        try:
            identify(self._router, metadata, record)
            await behaviour(call)
            record.status = 200
        except LockstepError as error:
            failure = error
        except asyncio.CancelledError:
            record.status = LockstepError(ErrorCode.CANCELLED, "").meaning.http_status
            raise
        except Exception:
            logger.exception("request failed", extra={"request_id": record.request_id})
            failure = LockstepError(ErrorCode.INTERNAL, "something went wrong in the router")
        finally:
            record.release_body()
            if failure is not None:
                record.status = failure.meaning.http_status
            if call.is_unwanted and call.owner is not None and record.status != 200:
                await _forget(self._router, record.request_id, call.owner)
            is_audited = self._router.keys is not None
            report(Call("grpc", call.endpoint), record, time.perf_counter() - began, is_audited=is_audited)
        if failure is not None:
            await abort(context, failure)

    async def _generate(self, call: _Progress) -> None:
        call.endpoint = _COMPLETIONS
        record = call.record
        await record.account.admit()
        raw, record.body = await self._inbound.read(call.context)
        request, style, origin = await self._parsing.run(len(raw), partial(self._request, raw, call))
        del raw
        starting = self._router.runs.start(request, record.account, style, owner=owner_of(origin))
        del request
        reading = await starting
        record.release_body()
        record.prompt_tokens = reading.record.prompt_tokens
        await self._answer(reading, call, owner_of(origin))

    def _request(self, raw: bytes, call: _Progress) -> tuple[GenerationRequest, Style, Origin]:
        message = parse_generate(raw, self._router.settings.max_body_values)
        call.endpoint = _CHAT if is_chat(message) else _COMPLETIONS
        # A client that does not want to come back has no use for what goes on without it.
        call.is_unwanted = message.HasField("resumable") and not message.resumable
        origin = origin_of(self._router, call.context, call.metadata, call.record, message.session)
        request, style = generation_request(message, origin, self._router.settings)
        remaining_s = call.context.time_remaining()
        if remaining_s is not None and remaining_s < MAX_TIMEOUT_S:
            request = replace(request, caller=replace(request.caller, timeout_s=max(remaining_s, 0.001)))
        return request, style, origin

    async def _resume(self, call: _Progress) -> None:
        record = call.record
        record.resumed = True
        await record.account.admit_reading()
        message = _parse(inference_pb2.ResumeRequest, await self._small(call))
        owner = self._owner(call)
        after = After.parse(message.last_event_id, "last_event_id") if message.last_event_id else None
        reading = await self._router.runs.resume(_stream_id(message.request_id), owner, after)
        await self._answer(reading, call, owner)

    async def _cancel(self, call: _Progress) -> None:
        await call.record.account.admit_reading()
        message = _parse(inference_pb2.CancelRequest, await self._small(call))
        await self._router.runs.cancel(_stream_id(message.request_id), self._owner(call))
        await self._begin(call, ())
        await self._write(call, inference_pb2.CancelResponse())

    async def _small(self, call: _Progress) -> bytes:
        """A message that is not kept."""
        raw, reservation = await self._inbound.read(call.context)
        reservation.release()
        return raw

    def _owner(self, call: _Progress) -> str:
        return owner_of(origin_of(self._router, call.context, call.metadata, call.record, ""))

    async def _answer(self, reading: Reading, call: _Progress, owner: str) -> None:
        record = call.record
        request_id = record.request_id = reading.record.request_id
        call.owner = owner
        had = [max(0, tokens) for tokens in reading.position.tokens]
        with closing(reading):
            try:
                await self._begin(call, ((STREAM_METADATA, request_id),))
                async for events in reading.events():
                    for each in events:
                        index = each.delta.index
                        name = event_id(request_id, each.position)
                        await self._write(call, token_event(reading, each, name, had[index]))
                        had[index] = each.delta.tokens
                if not reading.position.has_usage:
                    name = event_id(request_id, reading.give_usage())
                    await self._write(call, usage_event(request_id, reading.usage, name))
            finally:
                record.completion_tokens = reading.delivered_tokens

    async def _begin(self, call: _Progress, more: tuple[tuple[str, str], ...]) -> None:
        router_id = self._router.settings.router_id
        await call.context.send_initial_metadata(((ROUTER_METADATA, router_id), *more))

    async def _write(
        self, call: _Progress, message: inference_pb2.GenerateEvent | inference_pb2.CancelResponse
    ) -> None:
        """Send as soon as the client has read enough of what was sent before."""
        limit_s = self._router.settings.write_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await call.context.write(message)
        except TimeoutError:
            logger.warning("client does not read", extra={"request_id": call.record.request_id})
            raise LockstepError(ErrorCode.CANCELLED, f"nothing was read for {limit_s:g} seconds") from None


def _serialize(message: inference_pb2.GenerateEvent | inference_pb2.CancelResponse) -> bytes:
    return message.SerializeToString()


def _parse(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"this is not a valid {kind.DESCRIPTOR.name}") from None


def _stream_id(given: str) -> str:
    if not 0 < len(given) <= _MAX_ID_CHARS:
        raise invalid("request_id", f"must have 1 to {_MAX_ID_CHARS} characters")
    return given


async def _forget(router: Router, request_id: str, owner: str) -> None:
    try:
        await router.runs.cancel(request_id, owner)
    except LockstepError:
        return
