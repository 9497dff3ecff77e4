"""The calls of `lockstep.v1.Inference`: whose they are, their messages, their events, their end. The calls of other
services, except for health, have the same rules.

Each call reads its one message itself, so that nothing of it is read for callers who are refused. On the wire that is
the same as a call with a plain message.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from lockstep_api.v1 import inference_pb2
from lockstep_common.call_bounds import CallBounds
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.faces.access import Call, report
from lockstep_router.faces.body_turns import BodyTurns
from lockstep_router.faces.forwarded import ForwardedClients
from lockstep_router.faces.grpc.caller import (
    ROUTER_METADATA,
    abort,
    client_address,
    identify,
    metadata_of,
    new_record,
    origin_of,
)
from lockstep_router.faces.grpc.events import (
    echo_events,
    embedding_usage,
    model_message,
    token_event,
    usage_event,
    vector_event,
)
from lockstep_router.faces.grpc.inbound import Inbound
from lockstep_router.faces.grpc.requests import (
    detokenize_body,
    embedding_body,
    generation_body,
    is_chat,
    parse_message,
    tokenize_body,
)
from lockstep_router.faces.idempotency import idempotency_key, scope_of
from lockstep_router.faces.identity import MAX_TIMEOUT_S, Origin, owner_of
from lockstep_router.faces.openai.completions import (
    chat_request,
    chat_style,
    completion_request,
    completion_style,
    tokenize_source,
)
from lockstep_router.faces.openai.embeddings import EmbeddingBody, embedding_request
from lockstep_router.faces.openai.fields import validate
from lockstep_router.faces.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep_router.generation.embedding import Embedding, EmbeddingRequest
from lockstep_router.generation.request import Caller, GenerationRequest, PromptSource
from lockstep_router.generation.style import Style
from lockstep_router.resumption import After, IdempotencyKey, Reading
from lockstep_router.router import Router

logger = logging.getLogger("lockstep.router")

T = TypeVar("T")
M = TypeVar("M", bound=Message)

SERVICE = "lockstep.v1.Inference"
STREAM_METADATA = "x-lockstep-stream-id"
KEY_METADATA = "idempotency-key"
_CHAT, _COMPLETIONS, _STREAMS = "/v1/chat/completions", "/v1/completions", "/v1/streams/{stream_id}"
_EMBEDDINGS, _MODELS = "/v1/embeddings", "/v1/models"
_TOKENIZE, _DETOKENIZE = "/tokenize", "/detokenize"
_DESCRIPTION, _OTHER = "/openapi.json", "other"
_MAX_ID_CHARS = 256
MAX_DESCRIBING = 16
"""Calls of reflection at a time. Their clients may send nothing, and each is one of the server's calls."""
DESCRIBING_S = 10.0
"""Longest time of one."""


@dataclass(frozen=True)
class _Wanted:
    """What a message asks for."""

    request: GenerationRequest
    style: Style
    owner: str
    key: IdempotencyKey | None


class _Progress:
    """One call: its sender, and how far it has come."""

    def __init__(self, endpoint: str, requests: Any, context: grpc.aio.ServicerContext, router: Router) -> None:
        self.endpoint = endpoint
        self.requests = requests
        """The call's messages, for handlers that do not read them by the context."""
        self.context = context
        self.metadata = metadata_of(context)
        self.record = new_record(router, self.metadata)
        self.address = ""
        """The client's; empty: it is not known."""
        self.is_unwanted = False
        """Whether the stream ends with the call."""
        self.stream_id: str | None = None
        """The stream that it began or reads, once there is one."""

    @property
    def sender(self) -> str:
        """Names whose calls share what one sender may take: the tenant's, or those of an address."""
        return self.record.account.tenant.name or self.address


_Behaviour = Callable[[_Progress], Awaitable[None]]


class Inference:
    """The service's behaviours.

    Args:
        router: the router.
        inbound: where messages arrive.
        turns: in which they are parsed.
        max_calls_each: calls in progress of one address, and of one tenant.
    """

    def __init__(self, router: Router, inbound: Inbound, turns: BodyTurns, max_calls_each: int) -> None:
        self._router = router
        self._inbound = inbound
        self._turns = turns
        self._describing = 0
        self._of_addresses = CallBounds("calls", max_calls_each, owner="address")
        self._of_tenants = CallBounds("calls", max_calls_each, owner="tenant")
        proxies = router.settings.trusted_proxies
        self._forwarded = ForwardedClients(proxies) if proxies else None

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls by name."""
        behaviours: dict[str, tuple[str, _Behaviour]] = {
            "Generate": (_COMPLETIONS, self._generate),
            "Resume": (_STREAMS, self._resume),
            "Cancel": (_STREAMS, self._cancel),
            "Embed": (_EMBEDDINGS, self._embed),
            "Tokenize": (_TOKENIZE, self._tokenize),
            "Detokenize": (_DETOKENIZE, self._detokenize),
            "ListModels": (_MODELS, self._list_models),
        }
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(
                partial(self._serve, endpoint, behaviour), response_serializer=_serialize
            )
            for name, (endpoint, behaviour) in behaviours.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def describing(self, reflection: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Reflection's own handler, with the rules of the calls here: it needs a key, is limited, and is reported."""

        async def answer(call: _Progress) -> None:
            await self._begin(call, ())
            async for reply in reflection.stream_stream(call.requests, call.context):
                await self._write(call, reply)

        return grpc.stream_stream_rpc_method_handler(
            partial(self._serve, _DESCRIPTION, partial(self._describe, answer)),
            reflection.request_deserializer,
            reflection.response_serializer,
        )

    def unknown(self) -> grpc.RpcMethodHandler:
        """A handler of calls that there are not: they need a key, and are reported, too."""

        async def refuse(_: _Progress) -> None:
            raise LockstepError(ErrorCode.METHOD_NOT_ALLOWED, "there is no such call")

        return grpc.stream_stream_rpc_method_handler(partial(self._serve, _OTHER, refuse))

    async def _describe(self, answer: _Behaviour, call: _Progress) -> None:
        await call.record.account.admit_reading()
        if self._describing >= MAX_DESCRIBING:
            sentence = f"{MAX_DESCRIBING} calls of reflection are in progress already"
            raise LockstepError(ErrorCode.OVERLOADED, sentence, retry_after_s=1)
        self._describing += 1
        try:
            async with asyncio.timeout(DESCRIBING_S):
                await answer(call)
        except TimeoutError:
            sentence = f"a call of reflection lasts at most {DESCRIBING_S:g} seconds"
            raise LockstepError(ErrorCode.CANCELLED, sentence) from None
        finally:
            self._describing -= 1

    async def _serve(
        self, endpoint: str, behaviour: _Behaviour, requests: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Serve a call; its end is logged and counted, whatever it is."""
        began = time.perf_counter()
        call, failure = _Progress(endpoint, requests, context, self._router), None
        record = call.record
        try:
            call.address = await client_address(self._forwarded, context, call.metadata)
            self._of_addresses.take(call.address, context)
            identify(self._router, call.metadata, record)
            self._of_tenants.take(record.account.tenant.name, context)
            await behaviour(call)
            record.status = 200
        except LockstepError as error:
            failure = error
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # gRPC's error says that the client has gone, before this task is cancelled for that.
            record.status = LockstepError(ErrorCode.CANCELLED, "").meaning.http_status
            raise asyncio.CancelledError from None
        except Exception:
            logger.exception("request failed", extra=record.log_fields())
            failure = LockstepError(ErrorCode.INTERNAL, "something went wrong in the router")
        finally:
            record.release_body()
            if failure is not None:
                record.status = failure.meaning.http_status
            try:
                # Not if another call began the stream: its client may want it.
                if call.is_unwanted and call.stream_id is not None and record.status != 200 and not record.resumed:
                    await _forget(self._router, call.stream_id, owner_of(self._origin(call)))
            finally:  # also if this is cancelled meanwhile
                is_audited = self._router.keys is not None
                report(Call("grpc", call.endpoint), record, time.perf_counter() - began, is_audited=is_audited)
        if failure is not None:
            await abort(context, failure, self._router.settings.router_id)

    async def _generate(self, call: _Progress) -> None:
        record = call.record
        given_key = dict(call.metadata).get(KEY_METADATA)
        # A request with a key may be answered by an earlier one, which is among the tenant's streams.
        await (record.account.admit() if given_key is None else record.account.admit_reading())
        raw, record.body = await self._inbound.read(call.context, call.sender)
        wanted = await self._turns.run(len(raw), partial(self._wanted, raw, given_key, call))
        del raw

        def on_stream(stream_id: str, is_resumed: bool) -> None:
            # At once: the client may leave before this call reads it.
            if not is_resumed:
                call.stream_id = stream_id

        starting = self._router.runs.start(
            wanted.request, record.account, wanted.style, owner=wanted.owner, key=wanted.key, on_stream=on_stream
        )
        del wanted
        try:
            reading = await starting
        except LockstepError:
            call.stream_id = None  # it is over
            raise
        record.release_body()
        record.resumed = reading.is_resumed
        if not reading.is_resumed:
            record.prompt_tokens = reading.record.prompt_tokens
        await self._answer(reading, call)

    def _wanted(self, raw: bytes, given_key: str | None, call: _Progress) -> _Wanted:
        settings = self._router.settings
        message = parse_message(inference_pb2.GenerateRequest, raw, settings.max_body_values)
        is_conversation = is_chat(message)
        call.endpoint = _CHAT if is_conversation else _COMPLETIONS
        # A client that does not want to come back has no use for what goes on without it.
        call.is_unwanted = message.HasField("resumable") and not message.resumable
        origin = self._origin(call, message.session)
        fields = generation_body(message, settings.max_body_values)
        body: ChatCompletionRequest | CompletionRequest
        if is_conversation:
            body = validate(ChatCompletionRequest, fields)
            request, style = chat_request(body, origin, settings), chat_style(body)
        else:
            body = validate(CompletionRequest, fields)
            request, style = completion_request(body, origin, settings), completion_style(body)
        key = None
        if given_key is not None:
            key = idempotency_key(str(given_key), KEY_METADATA, origin, body, style.kind)
        request = replace(request, caller=self._timed(request.caller, call))
        return _Wanted(request, style, owner_of(origin), key)

    async def _resume(self, call: _Progress) -> None:
        record = call.record
        record.come_back()
        await record.account.admit_reading()
        message = _parse(inference_pb2.ResumeRequest, await self._small(call))
        owner = owner_of(self._origin(call))
        after = After.parse(message.last_event_id, "last_event_id") if message.last_event_id else None
        reading = await self._router.runs.resume(_stream_id(message.request_id), owner, record.account, after)
        await self._answer(reading, call)

    async def _cancel(self, call: _Progress) -> None:
        await call.record.account.admit_reading()
        message = _parse(inference_pb2.CancelRequest, await self._small(call))
        origin = self._origin(call)
        if message.WhichOneof("named_by") == "idempotency_key":
            scope = scope_of(message.idempotency_key, "idempotency_key", origin)
            await self._router.runs.cancel_key(scope, owner_of(origin))
        else:
            await self._router.runs.cancel(_stream_id(message.request_id), owner_of(origin))
        await self._reply(call, inference_pb2.CancelResponse())

    async def _embed(self, call: _Progress) -> None:
        record, settings = call.record, self._router.settings

        def parse(raw: bytes) -> EmbeddingRequest:
            message = parse_message(inference_pb2.EmbedRequest, raw, settings.max_body_values)
            body = validate(EmbeddingBody, embedding_body(message))
            return embedding_request(body, self._origin(call, message.session), settings)

        request = await self._read(call, parse)
        request = replace(request, caller=self._timed(request.caller, call))
        with self._router.admitted(record.account):
            prepared = await self._router.prepare_embedding(request, record.account)
            del request
            record.release_body()
            record.prompt_tokens = prepared.prompt_tokens
            async with self._router.embedding(prepared, record.account) as embedding:
                try:
                    await self._write_vectors(embedding, call)
                finally:
                    record.failovers = embedding.failovers
            await self._write(call, embedding_usage(prepared.prompt_tokens))

    async def _write_vectors(self, embedding: Embedding, call: _Progress) -> None:
        """Write each vector as it arrives. Those that wait for the client are within the limit of one answer."""
        vectors: asyncio.Queue[tuple[int, array[float]] | None] = asyncio.Queue()
        running = asyncio.create_task(embedding.run(lambda index, vector: vectors.put_nowait((index, vector))))
        running.add_done_callback(lambda _: vectors.put_nowait(None))
        try:
            is_begun = False
            while (each := await vectors.get()) is not None:
                if not is_begun:
                    await self._begin(call, ())
                    is_begun = True
                await self._write(call, vector_event(*each))
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _tokenize(self, call: _Progress) -> None:
        settings = self._router.settings

        def parse(raw: bytes) -> tuple[str, PromptSource]:
            message = parse_message(inference_pb2.TokenizeRequest, raw, settings.max_body_values)
            body = validate(TokenizeRequest, tokenize_body(message, settings.max_body_values))
            return body.model, tokenize_source(body, settings)

        model, source = await self._read(call, parse)
        with self._router.admitted(call.record.account):
            ids, card = await self._router.tokenize(model, source)
            del source
            call.record.release_body()
            await self._reply(call, inference_pb2.TokenizeResponse(tokens=ids, max_model_len=card.context_length))

    async def _detokenize(self, call: _Progress) -> None:
        def parse(raw: bytes) -> DetokenizeRequest:
            message = parse_message(inference_pb2.DetokenizeRequest, raw, self._router.settings.max_body_values)
            return validate(DetokenizeRequest, detokenize_body(message))

        body = await self._read(call, parse)
        with self._router.admitted(call.record.account):
            text = await self._router.detokenize(body.model, body.tokens, "tokens")
            del body
            call.record.release_body()
            await self._reply(call, inference_pb2.DetokenizeResponse(prompt=text))

    async def _list_models(self, call: _Progress) -> None:
        message = _parse(inference_pb2.ListModelsRequest, await self._small(call))
        cards = [self._router.model(message.model)] if message.model else self._router.models()
        await self._reply(call, inference_pb2.ListModelsResponse(models=map(model_message, cards)))

    async def _read(self, call: _Progress, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the message, which counts in the budget until it is released."""
        await call.record.account.admit()
        raw, call.record.body = await self._inbound.read(call.context, call.sender)
        return await self._turns.run(len(raw), partial(parse, raw))

    async def _small(self, call: _Progress) -> bytes:
        """A message of a few bytes, which is not kept."""
        raw, reservation = await self._inbound.read(call.context, call.sender, is_short=True)
        reservation.release()
        return raw

    def _origin(self, call: _Progress, session: str = "") -> Origin:
        return origin_of(self._router, call.address, call.metadata, call.record, session)

    def _timed(self, caller: Caller, call: _Progress) -> Caller:
        """The caller with the call's deadline."""
        remaining_s = call.context.time_remaining()
        if remaining_s is None or remaining_s >= MAX_TIMEOUT_S:
            return caller
        return replace(caller, timeout_s=max(remaining_s, 0.001))

    async def _answer(self, reading: Reading, call: _Progress) -> None:
        record = call.record
        request_id = record.request_id = call.stream_id = reading.record.request_id
        with closing(reading):
            try:
                await self._begin(call, ((STREAM_METADATA, request_id),))
                had = [max(0, tokens) for tokens in reading.position.tokens]
                for message in echo_events(reading):
                    await self._write(call, message)
                async for events in reading.events():
                    for each in events:
                        index = each.delta.index
                        await self._write(call, token_event(reading, each, had[index]))
                        had[index] = each.delta.tokens
                if not reading.position.has_usage:
                    await self._write(call, usage_event(reading))
            finally:
                record.completion_tokens = reading.delivered_tokens
                record.failovers = reading.failovers

    async def _reply(self, call: _Progress, message: Message) -> None:
        """Send the only message of an answer."""
        await self._begin(call, ())
        await self._write(call, message)

    async def _begin(self, call: _Progress, more: tuple[tuple[str, str], ...]) -> None:
        router_id = self._router.settings.router_id
        await call.context.send_initial_metadata(((ROUTER_METADATA, router_id), *more))

    async def _write(self, call: _Progress, message: Message) -> None:
        """Send as soon as the client has read enough of what was sent before."""
        limit_s = self._router.settings.write_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await call.record.write(call.context.write(message))
        except TimeoutError:
            logger.warning("client does not read", extra=call.record.log_fields())
            raise LockstepError(ErrorCode.CANCELLED, f"nothing was read for {limit_s:g} seconds") from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parse(kind: type[M], raw: bytes) -> M:
    """A message without lists."""
    return parse_message(kind, raw, 0)


def _stream_id(given: str) -> str:
    if not 0 < len(given) <= _MAX_ID_CHARS:
        raise invalid("request_id", f"must have 1 to {_MAX_ID_CHARS} characters")
    return given


async def _forget(router: Router, request_id: str, owner: str) -> None:
    try:
        await router.runs.cancel(request_id, owner)
    except LockstepError:
        return
