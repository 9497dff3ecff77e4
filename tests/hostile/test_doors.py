"""Whatever bytes come in at the WebSocket and at the gRPC port, no defect shows and no other stream notices it.

`--fuzz-cases 100000` or `--fuzz-seconds 600` for a long run by hand. A seed makes the same cases again, but with
`--fuzz-seconds` the machine's speed decides how many.
"""

import asyncio
import base64
import contextlib
import json
import random
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import httpx
import pytest
from bent import bent
from fuzzing import PREFACE, run_cases
from lockstep_api.v1 import inference_pb2
from target import Target

_TIMEOUT_S = 20.0
_QUIET_S = 5.0
"""The longest silence of a well-behaved stream; each gives a token every twentieth of a second."""
_BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 4, "seed": 7}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
_FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": _SCHEMA}
_CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    _CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
]
_RESPONSE = {"model": "reference", "input": _ITEMS, "max_output_tokens": 4}
_BODIES = [
    ("completions", _BODY),
    ("completions", _BODY | {"resumable": False, "structured_outputs": {"choice": ["a", "b"]}}),
    ("chat.completions", _CHAT | {"n": 2}),
    ("chat.completions", _CHAT | {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"}),
    (
        "chat.completions",
        _CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    ),
    ("responses", _RESPONSE),
    ("responses", _RESPONSE | {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}),
    ("responses", _RESPONSE | {"tools": [{"type": "function"} | _FUNCTION], "tool_choice": "auto"}),
    ("responses", _RESPONSE | {"text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}}),
]
_KEYS = [f"key-{number}" for number in range(8)]
_ODD = [None, True, -1, 0, 1e308, 2**70, "", "a", "\x00", "\ud800", "x" * 300, [], [[]], {}, {"a": []}]
_EVENT_ID = re.compile(rb'"event_id":"([^"]{1,200})"')
_NOT_SENT = "Internal error from Core"
"""What the client's own library says if the call has ended while it sends."""
_INTERNAL = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(grpc=True) as running:
        yield running


class Behaved:
    """A stream that is read as it should be, under everything else."""

    def __init__(self, target: Target) -> None:
        self._url = "http://{}:{}".format(*target.address)
        self.silence_s = 0.0
        self.silent_at_s = 0.0
        """When the longest silence ended, on the wall clock as in the router's log."""
        self.texts: list[str] = []
        self.ended = False

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        body = _BODY | {"max_tokens": 100_000, "stream": True, "user": "behaved"}
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            last = loop.time()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    if loop.time() - last > self.silence_s:
                        self.silence_s, self.silent_at_s = loop.time() - last, time.time()
                    last = loop.time()
                    self.texts.append(json.loads(line[6:])["choices"][0]["text"])
        self.ended = True


@contextlib.asynccontextmanager
async def behaved(target: Target) -> AsyncIterator[None]:
    """A stream and a short request under what is done within; both are as without it."""
    stream = Behaved(target)
    async with httpx.AsyncClient(base_url="http://{}:{}".format(*target.address), timeout=_TIMEOUT_S) as client:
        before = (await client.post("/v1/completions", json=_BODY)).json()["choices"]
        reading = asyncio.create_task(stream.read())
        async with asyncio.timeout(_TIMEOUT_S):
            while not stream.texts:
                await asyncio.sleep(0.01)
        yield
        count = len(stream.texts)
        async with asyncio.timeout(_TIMEOUT_S):
            while len(stream.texts) < count + 5:
                assert not reading.done()
                await asyncio.sleep(0.01)
        reading.cancel()
        assert not stream.ended
        warned = [line for line in target.log() if line["level"] == "warning"]
        assert stream.silence_s < _QUIET_S, (stream.silent_at_s, warned[-20:])
        assert (await client.post("/v1/completions", json=_BODY)).json()["choices"] == before
        assert (await client.get("/healthz")).status_code == 200
    assert target.is_alive
    assert not [line for line in target.log() if line["level"] in ("error", "critical")]


def noise(draw: random.Random, most: int = 200) -> bytes:
    return draw.randbytes(draw.randrange(most))


# WebSocket.


def handshake(draw: random.Random) -> bytes:
    key = base64.b64encode(draw.randbytes(16))
    return (
        b"GET /v1/stream HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: " + key + b"\r\n\r\n"
    )


def frame(opcode: int, payload: bytes, *, fin: bool = True, reserved: int = 0) -> bytes:
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2)
    return bytes([fin << 7 | reserved << 4 | opcode]) + length + bytes(4) + payload


def message_of(draw: random.Random, event_ids: Sequence[str]) -> dict[str, Any]:
    """A valid message; `event_ids` are those of streams that there are or were."""
    match draw.randrange(6):
        case 0:
            event_id = draw.choice([*event_ids, "r-1:3,f"])
            message = {"type": "resume", "id": "c", "stream": event_id.partition(":")[0]}
            return message | ({"last_event_id": event_id} if draw.random() < 0.7 else {})
        case 1:
            named = {"id": draw.choice("abc")} if draw.random() < 0.5 else {"idempotency_key": draw.choice(_KEYS)}
            return {"type": "cancel"} | named
        case 2:
            return {"type": "ping"}
    endpoint, body = draw.choice(_BODIES)
    message = {"type": "generate", "id": draw.choice("ab"), "endpoint": endpoint, "body": body}
    options = {"idempotency_key": draw.choice(_KEYS), "session": "s", "timeout_s": draw.choice([1e-6, 0.05, 10])}
    return message | {name: value for name, value in options.items() if draw.random() < 0.3}


def odd_message(draw: random.Random, event_ids: Sequence[str]) -> bytes:
    message = json.loads(json.dumps(message_of(draw, event_ids)))
    inside: Any = message
    while draw.random() < 0.6 and (deeper := [each for each in fields_of(inside) if isinstance(each, dict | list)]):
        inside = draw.choice(deeper)
    if draw.random() < 0.7:
        if isinstance(inside, list):
            inside.insert(draw.randrange(len(inside) + 1), draw.choice(_ODD))
        else:
            inside[draw.choice([*inside, "colour"])] = draw.choice(_ODD)
    text = json.dumps(message).encode()
    if draw.random() < 0.1:
        text = text.replace(b"1e+308", b"1e999")
    return bent(draw, text) if draw.random() < 0.3 else text


def fields_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def frames(draw: random.Random, event_ids: Sequence[str]) -> bytes:
    made = b""
    for _ in range(draw.randrange(1, 6)):
        match draw.randrange(6):
            case 0 | 1 | 2:
                made += frame(1, odd_message(draw, event_ids))
            case 3:
                made += frame(draw.randrange(16), noise(draw), fin=draw.random() < 0.7, reserved=draw.randrange(8))
            case 4:
                text = odd_message(draw, event_ids)
                cut = draw.randrange(len(text) + 1)
                made += frame(1, text[:cut], fin=False) + frame(9, b"") + frame(0, text[cut:])
            case _:
                made += noise(draw)
    return bent(draw, made) if draw.random() < 0.1 else made


async def test_bytes_of_a_websocket(target, seeded, pytestconfig, summarize) -> None:
    outcomes: Counter[str] = Counter()
    event_ids: deque[str] = deque(maxlen=64)

    async def case() -> None:
        opening = handshake(seeded)
        if seeded.random() < 0.1:
            opening = bent(seeded, opening)
        data, wants_answer = frames(seeded, event_ids), seeded.random() < 0.5
        reader, writer = await asyncio.open_connection(*target.address)
        received = b""
        with contextlib.suppress(ConnectionError):
            writer.write(opening)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    received = await reader.read(4096)
            writer.write(data + (frame(8, b"\x03\xe8") if wants_answer else b""))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3 if wants_answer else 0.02):
                    while piece := await reader.read(1 << 16):
                        received += piece
        writer.transport.abort()
        assert b'"internal"' not in received, data
        event_ids.extend(each.decode() for each in _EVENT_ID.findall(received)[-2:])
        outcomes[received[9:12].decode("ascii", "replace") or "nothing"] += 1

    async with behaved(target):
        cases = await run_cases(pytestconfig, case, share=4, timeout_s=_TIMEOUT_S)
    summarize(f"websocket: {cases} cases, answers to the handshake: {dict(outcomes)}")
    assert outcomes["101"] > cases / 2
    assert event_ids or cases < 1000


# gRPC.


def odd_request(draw: random.Random) -> bytes:
    request = inference_pb2.GenerateRequest(model="reference", prompt="hello", user="u")
    request.sampling.max_tokens = draw.choice([0, 1, 4, 2**32 - 1])
    request.sampling.temperature = draw.choice([0.0, 1.0, 2.5, float("nan"), float("inf")])
    request.sampling.logit_bias[draw.randrange(2**32)] = draw.uniform(-200, 200)
    request.stop.extend(draw.choices(["", "a", "\x00", "x" * 300], k=draw.randrange(3)))
    match draw.randrange(7):
        case 4:
            json_text = draw.choice(["", "{}", "[]", "[" * 1000, '{"a":1e999}', '{"type":"object"}', "\ufeff{}"])
            request.conversation.messages.add(role="user", content="hi", content_parts=["a"] * draw.randrange(2))
            request.conversation.tools.add(name=draw.choice(["f", "", "a b"]), parameters=json_text)
            request.conversation.tool_choice.mode = draw.choice([0, 1, 3, 77])  # type: ignore[assignment]
            request.conversation.chat_template_kwargs[draw.choice(["", "x"])].number = draw.choice([0.5, float("nan")])
            request.response_format.json_schema.schema = json_text
        case 5:
            request.prompts.texts.extend(draw.choices(["", "a"], k=draw.randrange(70)))
            request.best_of = draw.choice([0, 1, 2**32 - 1])
            request.structured_outputs.choice.texts.extend(draw.choices(["", "a"], k=draw.randrange(3)))
        case 6:
            request.prompt_id_lists.lists.add(ids=draw.choices([0, 2**32 - 1], k=draw.randrange(3)))
            request.echo = True
            request.suffix = draw.choice(["", "x"])
        case 0:
            request.prompt_ids.ids.extend(draw.randrange(2**32) for _ in range(draw.randrange(5)))
        case 1:
            request.conversation.messages.add(role=draw.choice(["user", "robot", ""]), content="hi")
        case 2:
            del request.stop[:]
            request.sampling.Clear()
            request.sampling.max_tokens = 4
        case _:
            request.n = draw.choice([0, 1, 3, 2**32 - 1])
    data = request.SerializeToString()
    return bent(draw, data) if draw.random() < 0.5 else data


def odd_other(draw: random.Random, name: str, event_ids: Sequence[str]) -> bytes:
    """A message of another call than Generate; `event_ids` are those of streams that there are or were."""
    event_id = draw.choice([*event_ids, "r-1:3"])
    if name == "Embed":
        data = inference_pb2.EmbedRequest(
            model="reference", texts=inference_pb2.Texts(texts=["a", ""]), dimensions=draw.choice([0, 4, 2**32 - 1])
        ).SerializeToString()
    elif name == "Tokenize":
        data = inference_pb2.TokenizeRequest(model="reference", prompt=draw.choice(["", "a"])).SerializeToString()
    elif name == "Detokenize":
        ids = draw.choices([0, 5, 2**32 - 1], k=draw.randrange(4))
        data = inference_pb2.DetokenizeRequest(model="reference", tokens=ids).SerializeToString()
    elif name == "Resume":
        last = event_id if draw.random() < 0.7 else draw.choice(["", "a", "\x00", "x" * 300])
        stream_id = event_id.partition(":")[0]
        data = inference_pb2.ResumeRequest(request_id=stream_id, last_event_id=last).SerializeToString()
    elif name == "Cancel" and draw.random() < 0.5:
        data = inference_pb2.CancelRequest(request_id=event_id.partition(":")[0]).SerializeToString()
    elif name == "Cancel":
        data = inference_pb2.CancelRequest(idempotency_key=draw.choice([*_KEYS, ""])).SerializeToString()
    else:
        return noise(draw)
    return bent(draw, data) if draw.random() < 0.5 else data


async def test_messages_of_grpc(target, seeded, pytestconfig, summarize) -> None:
    statuses: Counter[str] = Counter()
    resumed: Counter[str] = Counter()
    event_ids: deque[str] = deque(maxlen=64)
    names = [*["Generate"] * 4, "Embed", "Tokenize", "Detokenize", "ListModels", "Nothing"]
    names += ["Resume", "Cancel"] * 2
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:

        async def case() -> None:
            name, leaves = seeded.choice(names), seeded.random() < 0.1
            message = odd_request(seeded) if name == "Generate" else odd_other(seeded, name, event_ids)
            count = seeded.choice([0, 1, 1, 1, 1])
            given = {"idempotency-key": seeded.choice([*_KEYS, "", "a b", "x" * 300]), "x-session-id": "s"}
            metadata = tuple((key, value) for key, value in given.items() if seeded.random() < 0.3)
            timeout_s = seeded.choice([0.02, 10, 10, 10])
            call = channel.stream_stream(f"/lockstep.v1.Inference/{name}")(
                iter([message] * count), timeout=timeout_s, metadata=metadata
            )
            try:
                async for event in call:
                    if name == "Generate":
                        event_ids.append(inference_pb2.GenerateEvent.FromString(event).event_id)
                    if leaves:
                        call.cancel()
                status = await call.code()
            except grpc.aio.AioRpcError as error:
                if error.details() == _NOT_SENT:
                    return
                status = error.code()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The client's own library cancels calls, too: those whose message it cannot send any more.
                status = grpc.StatusCode.CANCELLED
            assert status not in _INTERNAL, (name, message, metadata)
            statuses[status.name] += 1
            resumed[status.name] += name == "Resume"

        async with behaved(target):
            cases = await run_cases(pytestconfig, case, share=4, timeout_s=_TIMEOUT_S)
    summarize(f"gRPC messages: {cases} cases, by status: {dict(statuses)}, Resume: {dict(resumed)}")
    assert statuses["OK"]
    assert resumed["OK"] or cases < 1000
    assert statuses["INVALID_ARGUMENT"] > cases / 4


async def test_bytes_of_grpc(target, seeded, pytestconfig, summarize) -> None:

    async def case() -> None:
        data = PREFACE if seeded.random() < 0.8 else noise(seeded)
        for _ in range(seeded.randrange(1, 6)):
            payload = noise(seeded)
            head = len(payload).to_bytes(3) + bytes([seeded.randrange(11), seeded.randrange(256)])
            data += head + seeded.randrange(8).to_bytes(4) + payload
        if seeded.random() < 0.3:
            data = bent(seeded, data)
        reader, writer = await asyncio.open_connection("127.0.0.1", target.grpc_port)
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(0.05):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()

    async with behaved(target):
        cases = await run_cases(pytestconfig, case, share=4, timeout_s=_TIMEOUT_S)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:
            message = inference_pb2.GenerateRequest(model="reference", prompt="hello").SerializeToString()
            call = channel.unary_stream("/lockstep.v1.Inference/Generate")(message, timeout=_TIMEOUT_S)
            assert [event async for event in call]
    summarize(f"gRPC bytes: {cases} cases")
