"""The four faces of a router behind one interface: a body of the REST API in, an answer or a failure out."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from websocket_client import SocketClient, socket_of

REST, SSE, WEBSOCKET, GRPC = "rest", "sse", "websocket", "grpc"
NAMES = (REST, SSE, WEBSOCKET, GRPC)
STREAMED = (SSE, WEBSOCKET, GRPC)
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions"}
_ENDPOINTS = {"text": "completions", "chat": "chat.completions"}
_FINISHES = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}

Body = dict[str, Any]


class FailureError(Exception):
    """What a client gets in place of an answer, or after a part of it."""

    def __init__(self, code: str, field: str | None) -> None:
        super().__init__(code, field)
        self.code = code
        self.field = field


@dataclass
class Answer:
    """What a client has got, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Of the chosen tokens."""
    usage: tuple[int, int, int] | None = None
    """Prompt, completion and cached tokens."""
    stream: str = ""
    last_event_id: str = ""
    events: int = 0

    def add(self, index: int, text: str, finish: str | None, logprobs: Iterable[float]) -> None:
        """Append the next piece of a choice."""
        self.texts[index] = self.texts.get(index, "") + text
        self.logprobs.setdefault(index, []).extend(round(each, 4) for each in logprobs)
        if finish:
            assert index not in self.finishes, "a choice ends once"
            self.finishes[index] = finish

    def add_choice(self, choice: Body) -> None:
        """Append a choice of OpenAI's format, or a piece of it."""
        chat = choice.get("message") or choice.get("delta")
        text = choice["text"] if chat is None else chat.get("content") or ""
        logprobs = choice.get("logprobs") or {}
        columns = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or []]
        self.add(choice["index"], text, choice["finish_reason"], columns)

    def take_usage(self, usage: Body) -> None:
        """Note OpenAI's usage."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.usage = (usage["prompt_tokens"], usage["completion_tokens"], cached)


class Face(Protocol):
    """One client of one face."""

    def ask(self, kind: str, body: Body, key: str | None = None) -> AsyncIterator[Answer]:
        """The answer so far, again and again; the client leaves when the iteration is left.

        Raises:
            FailureError: the request has failed.
        """

    def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        """The same for what comes after an event."""


async def whole(answers: AsyncIterator[Answer]) -> Answer:
    """The complete answer."""
    return [answer async for answer in answers][-1]


async def part(answers: AsyncIterator[Answer], events: int) -> Answer:
    """What a client has that leaves after so many events."""
    async with contextlib.aclosing(answers) as each:  # type: ignore[type-var]
        async for answer in each:
            if answer.events >= events:
                return answer
    raise AssertionError("the answer has fewer events")


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _raise_for(response: httpx.Response) -> None:
    if response.status_code != 200:
        error = response.json()["error"]
        raise FailureError(error["code"], error["param"])


class Rest:
    """Answers in one piece."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None) -> AsyncIterator[Answer]:
        body = {name: value for name, value in body.items() if name != "resumable"}
        response = await self._client.post(PATHS[kind], json=body, headers=_headers(key))
        _raise_for(response)
        answer = Answer(events=1)
        for choice in response.json()["choices"]:
            answer.add_choice(choice)
        answer.take_usage(response.json()["usage"])
        yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        raise NotImplementedError
        yield Answer()


class Sse:
    """Server-sent events."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None) -> AsyncIterator[Answer]:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", PATHS[kind], json=body, headers=_headers(key)) as response:
            async for answer in self._read(response):
                yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        headers = _headers(key) | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        async with self._client.stream("GET", f"/v1/streams/{stream}", headers=headers) as response:
            async for answer in self._read(response):
                yield answer

    async def _read(self, response: httpx.Response) -> AsyncIterator[Answer]:
        if response.status_code != 200:
            await response.aread()
        _raise_for(response)
        answer = Answer(stream=response.headers.get("x-lockstep-stream-id", ""))
        event_id = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            if name != "data" or value == "[DONE]":
                continue
            data = json.loads(value)
            if "error" in data:
                raise FailureError(data["error"]["code"], data["error"]["param"])
            _take_chunk(answer, data, event_id)
            yield answer


def _take_chunk(answer: Answer, chunk: Body, event_id: str) -> None:
    for choice in chunk["choices"]:
        answer.add_choice(choice)
    if chunk.get("usage"):
        answer.take_usage(chunk["usage"])
    answer.last_event_id = event_id
    answer.events += 1


class WebSocket:
    """A socket for each request: closing it is how a client leaves."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None) -> AsyncIterator[Answer]:
        body = body | {"stream_options": {"include_usage": True}}  # for those who resume it over REST
        message = {"type": "generate", "id": "x", "endpoint": _ENDPOINTS[kind], "body": body}
        async for answer in self._run(message, key):
            yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        message = {"type": "resume", "id": "x", "stream": stream}
        async for answer in self._run(message | ({"last_event_id": last_event_id} if last_event_id else {}), key):
            yield answer

    async def _run(self, message: Body, key: str | None) -> AsyncIterator[Answer]:
        async with socket_of(self._client, headers=_headers(key)) as socket:
            await socket.send(**message)
            try:
                async for answer in self._read(socket):
                    yield answer
            except GeneratorExit:
                socket.connection.transport.abort()
                raise

    async def _read(self, socket: SocketClient) -> AsyncIterator[Answer]:
        answer = Answer()
        async for message in socket.all():
            match message["type"]:
                case "started":
                    answer.stream = message["stream"]
                case "event":
                    _take_chunk(answer, message["data"], message["event_id"])
                    yield answer
                case "error":
                    error = message["error"]
                    raise FailureError(error["code"], error["param"])
                case "done":
                    answer.take_usage(message["usage"])
                    yield answer
                    return


class Grpc:
    """Calls on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    async def ask(self, kind: str, body: Body, key: str | None = None) -> AsyncIterator[Answer]:
        async for answer in self._read(self._stub.Generate(message_of(kind, body), metadata=_metadata(key))):
            yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        message = inference_pb2.ResumeRequest(request_id=stream, last_event_id=last_event_id)
        async for answer in self._read(self._stub.Resume(message, metadata=_metadata(key))):
            yield answer

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> AsyncIterator[Answer]:
        answer = Answer()
        try:
            async for event in call:
                answer.stream, answer.last_event_id = event.request_id, event.event_id
                answer.events += 1
                if event.HasField("usage"):
                    usage = event.usage
                    answer.usage = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                else:
                    logprobs = [each.chosen.logprob for each in event.logprobs]
                    answer.add(event.choice, event.text, _FINISHES.get(event.finish), logprobs)
                yield answer
        except grpc.aio.AioRpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            raise FailureError(trailing["lockstep-error-code"], trailing.get("lockstep-field")) from None
        finally:
            call.cancel()


def _metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    return tuple(_headers(key).items())


def message_of(kind: str, body: Body) -> inference_pb2.GenerateRequest:
    """A body as the message of a gRPC client that means the same."""
    sampling = {name: body[name] for name in inference_pb2.Sampling.DESCRIPTOR.fields_by_name if name in body}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    if kind == "chat":
        sampling.pop("logprobs", None)
        if body.get("logprobs"):
            sampling["logprobs"] = body.get("top_logprobs", 0)
    stop = body.get("stop", ())
    message = inference_pb2.GenerateRequest(
        model=body["model"],
        sampling=inference_pb2.Sampling(**sampling),
        stop=[stop] if isinstance(stop, str) else stop,
        n=body.get("n"),
        user=body.get("user", ""),
        resumable=body.get("resumable"),
    )
    if kind == "chat":
        messages = [inference_pb2.ChatMessage(**each) for each in body["messages"]]
        message.conversation.CopyFrom(inference_pb2.Conversation(messages=messages))
    elif isinstance(body["prompt"], str):
        message.prompt = body["prompt"]
    else:
        message.prompt_ids.CopyFrom(inference_pb2.TokenIds(ids=body["prompt"]))
    return message
