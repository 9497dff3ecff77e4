"""The four faces of a router behind one interface: a body of the REST API in, an answer or a failure out."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from lockstep_client.grpc_messages import generate_message
from websocket_client import SocketClient, socket_of

REST, SSE, WEBSOCKET, GRPC = "rest", "sse", "websocket", "grpc"
NAMES = (REST, SSE, WEBSOCKET, GRPC)
STREAMED = (SSE, WEBSOCKET, GRPC)
RESPONSES = "responses"
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions", RESPONSES: "/v1/responses"}
_ENDPOINTS = {"text": "completions", "chat": "chat.completions", RESPONSES: "responses"}
_FINISHES = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

Body = dict[str, Any]


def names_of(kind: str) -> tuple[str, ...]:
    """The faces that take requests of a kind: gRPC has no Responses API."""
    return (REST, SSE, WEBSOCKET) if kind == RESPONSES else NAMES


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
    reasoning: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[list[str]]] = field(default_factory=dict)
    """Id, name and arguments of each."""
    usage: tuple[int, int, int, int] | None = None
    """Prompt, completion, cached and reasoning tokens."""
    reported_usage: tuple[int, int, int, int] | None = None
    """What a finish has said of the usage."""
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

    def add_call(self, choice: int, call: int, given: tuple[str | None, str | None, str | None]) -> None:
        """Append a piece of a call: its id, name and arguments."""
        calls = self.calls.setdefault(choice, [])
        if call == len(calls):
            calls.append(["", "", ""])
        calls[call] = [known + (piece or "") for known, piece in zip(calls[call], given, strict=True)]

    def add_choice(self, choice: Body) -> None:
        """Append a choice of OpenAI's format, or a piece of it."""
        chat = choice.get("message") or choice.get("delta")
        text = choice["text"] if chat is None else chat.get("content") or ""
        index = choice["index"]
        if chat and chat.get("reasoning_content"):
            self.reasoning[index] = self.reasoning.get(index, "") + chat["reasoning_content"]
        for number, call in enumerate((chat or {}).get("tool_calls") or ()):
            function = call["function"]
            given = call.get("id"), function.get("name"), function.get("arguments")
            self.add_call(index, call.get("index", number), given)
        logprobs = choice.get("logprobs") or {}
        columns = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or []]
        self.add(choice["index"], text, choice["finish_reason"], columns)

    def add_item(self, item: Body) -> None:
        """Append a complete item of a response."""
        text = "".join(part["text"] for part in item.get("content", ()))
        match item["type"]:
            case "message":
                self.add(0, text, None, ())
            case "reasoning":
                self.reasoning[0] = self.reasoning.get(0, "") + text
            case "function_call":
                call = item["call_id"], item["name"], item["arguments"]
                self.add_call(0, len(self.calls.get(0, ())), call)

    def finish_response(self, response: Body) -> None:
        """Note how a response has ended, and its usage.

        Raises:
            FailureError: it has failed.
        """
        if response["status"] == "failed":
            raise FailureError(response["lockstep"]["code"], None)
        is_whole = response["status"] == "completed"
        self.add(0, "", ("tool_calls" if self.calls else "stop") if is_whole else "length", ())
        self.take_usage(response["usage"])

    def take_usage(self, usage: Body) -> None:
        """Note OpenAI's usage."""
        self.usage = _openai_usage(usage)


def _openai_usage(usage: Body) -> tuple[int, int, int, int]:
    if "input_tokens" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        reasoning = usage["output_tokens_details"]["reasoning_tokens"]
        return usage["input_tokens"], usage["output_tokens"], cached, reasoning
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached, reasoning


def _grpc_usage(usage: inference_pb2.Usage) -> tuple[int, int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens


class Face(Protocol):
    """One client of one face."""

    def ask(self, kind: str, body: Body, key: str | None = None, name: str = "") -> AsyncIterator[Answer]:
        """The answer so far, again and again; `name` is an idempotency key. Leaving the iteration leaves the answer.

        Raises:
            FailureError: the request has failed.
        """

    def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        """The same for what comes after an event."""

    async def cancel(self, name: str, key: str | None = None) -> None:
        """End the request with an idempotency key."""


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


def _headers(key: str | None, name: str = "") -> dict[str, str]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return headers | ({"idempotency-key": name} if name else {})


async def _cancel_over_http(client: httpx.AsyncClient, name: str, key: str | None) -> None:
    _raise_for(await client.delete("/v1/streams", headers=_headers(key, name)))


def _raise_for(response: httpx.Response) -> None:
    if response.status_code != 200:
        error = response.json()["error"]
        raise FailureError(error["code"], error["param"])


class Rest:
    """Answers in one piece."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None, name: str = "") -> AsyncIterator[Answer]:
        body = {name: value for name, value in body.items() if name != "resumable"}
        response = await self._client.post(PATHS[kind], json=body, headers=_headers(key, name))
        _raise_for(response)
        answer, given = Answer(events=1), response.json()
        if kind == RESPONSES:
            for item in given["output"]:
                answer.add_item(item)
            answer.finish_response(given)
        else:
            for choice in given["choices"]:
                answer.add_choice(choice)
            answer.take_usage(given["usage"])
        yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        raise NotImplementedError
        yield Answer()

    async def cancel(self, name: str, key: str | None = None) -> None:
        await _cancel_over_http(self._client, name, key)


class Sse:
    """Server-sent events."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None, name: str = "") -> AsyncIterator[Answer]:
        body = _with_usage(kind, body) | {"stream": True}
        headers = _headers(key, name)
        async with self._client.stream("POST", PATHS[kind], json=body, headers=headers) as response:
            async for answer in self._read(response):
                yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        headers = _headers(key) | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        async with self._client.stream("GET", f"/v1/streams/{stream}", headers=headers) as response:
            async for answer in self._read(response):
                yield answer

    async def cancel(self, name: str, key: str | None = None) -> None:
        await _cancel_over_http(self._client, name, key)

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


def _with_usage(kind: str, body: Body) -> Body:
    """The body that asks for the usage; a response always has it."""
    return body if kind == RESPONSES else body | {"stream_options": {"include_usage": True}}


def _take_event(answer: Answer, event: Body) -> None:
    """Append an event of a response, whose deltas are all that its items have."""
    match event["type"]:
        case "response.output_item.added":
            answer.add_item(event["item"])
        case "response.output_text.delta":
            answer.add(0, event["delta"], None, ())
        case "response.reasoning_text.delta":
            answer.reasoning[0] += event["delta"]
        case "response.function_call_arguments.delta":
            answer.add_call(0, len(answer.calls[0]) - 1, (None, None, event["delta"]))
        case "response.completed" | "response.incomplete" | "response.failed":
            answer.finish_response(event["response"])


def _take_chunk(answer: Answer, chunk: Body, event_id: str) -> None:
    if "choices" not in chunk:
        _take_event(answer, chunk)
    for choice in chunk.get("choices", ()):
        answer.add_choice(choice)
    if chunk.get("usage"):
        answer.take_usage(chunk["usage"])
    if usage := chunk.get("lockstep", {}).get("usage"):
        answer.reported_usage = _openai_usage(usage)
    answer.last_event_id = event_id
    answer.events += 1


class WebSocket:
    """A socket for each request: closing it is how a client leaves."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, kind: str, body: Body, key: str | None = None, name: str = "") -> AsyncIterator[Answer]:
        body = _with_usage(kind, body)  # for those who resume it over REST
        message = {"type": "generate", "id": "x", "endpoint": _ENDPOINTS[kind], "body": body}
        message |= {"idempotency_key": name} if name else {}
        async for answer in self._run(message, key):
            yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        message = {"type": "resume", "id": "x", "stream": stream}
        async for answer in self._run(message | ({"last_event_id": last_event_id} if last_event_id else {}), key):
            yield answer

    async def cancel(self, name: str, key: str | None = None) -> None:
        async with socket_of(self._client, headers=_headers(key)) as socket:
            await socket.send(type="cancel", idempotency_key=name)
            answer = await anext(aiter(socket.all()))
        if answer["type"] == "error":
            raise FailureError(answer["error"]["code"], answer["error"]["param"])
        assert (answer["type"], answer["idempotency_key"]) == ("cancelled", name)

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

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.address = address

    async def ask(self, kind: str, body: Body, key: str | None = None, name: str = "") -> AsyncIterator[Answer]:
        message = generate_message(body, is_chat=kind == "chat")
        metadata = _metadata(key) + ((("idempotency-key", name),) if name else ())
        async for answer in self._read(self.stub.Generate(message, metadata=metadata)):
            yield answer

    async def resume(self, stream: str, last_event_id: str, key: str | None = None) -> AsyncIterator[Answer]:
        message = inference_pb2.ResumeRequest(request_id=stream, last_event_id=last_event_id)
        async for answer in self._read(self.stub.Resume(message, metadata=_metadata(key))):
            yield answer

    async def cancel(self, name: str, key: str | None = None) -> None:
        try:
            await self.stub.Cancel(inference_pb2.CancelRequest(idempotency_key=name), metadata=_metadata(key))
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> AsyncIterator[Answer]:
        answer = Answer()
        try:
            async for event in call:
                answer.stream, answer.last_event_id = event.request_id, event.event_id
                answer.events += 1
                if event.HasField("usage"):
                    answer.usage = _grpc_usage(event.usage)
                else:
                    if event.reasoning:
                        answer.reasoning[event.choice] = answer.reasoning.get(event.choice, "") + event.reasoning
                    for piece in event.tool_calls:
                        answer.add_call(event.choice, piece.index, (piece.id, piece.name, piece.arguments))
                    logprobs = [each.chosen.logprob for each in event.logprobs]
                    answer.add(event.choice, event.text, _FINISHES.get(event.finish), logprobs)
                if event.HasField("final_usage"):
                    answer.reported_usage = _grpc_usage(event.final_usage)
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        finally:
            call.cancel()


def _failure(error: grpc.aio.AioRpcError) -> FailureError:
    trailing = dict(error.trailing_metadata() or ())
    return FailureError(trailing["lockstep-error-code"], trailing.get("lockstep-field"))


def _metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    return tuple(_headers(key).items())
