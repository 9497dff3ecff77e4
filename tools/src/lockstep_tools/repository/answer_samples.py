"""Samples of all answers of a router, written by the router's own code. Nothing here writes a field of an answer, and
nothing listens or connects.
"""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal, cast

import httpx
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_router.faces.openai.chunks import chunks_of, complete_body_of
from lockstep_router.faces.openai.format import inexact_mark, usage_body
from lockstep_router.faces.openai.responses.format import ResponseEvent, ResponsesFormat, options_of
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.faces.rest.app import create_app
from lockstep_router.faces.websocket import messages
from lockstep_router.generation.choices import Delta, TokenEntry
from lockstep_router.generation.embedding import Embedding, EmbeddingRequest, PreparedEmbedding
from lockstep_router.generation.generation import Usage
from lockstep_router.generation.request import PromptSource
from lockstep_router.generation.style import Style
from lockstep_router.journals import RequestRecord
from lockstep_router.journals.records import ChoiceRecord
from lockstep_router.output import CallArguments, CallName, Content, Reasoning
from lockstep_router.resumption import Event, Position, Reading, Runs
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account

Samples = dict[str, list[Any]]
"""JSON values by what they are."""

MODEL = "reference"
_ID = "r-0123456789abcdef0123456789abcdef"
_CREATED = 1_700_000_000
_USAGE = Usage(12, 5, 8, 2)
_TOKEN = inference_pb2.TokenLogprob(id=1, logprob=-0.25)
_ENTRY = TokenEntry(inference_pb2.Logprobs(chosen=_TOKEN, top=[_TOKEN]), 0)

_PLAIN = (Delta(0, "Hi", 1), Delta(0, "", 2, "stop"))
_WITH_LOGPROBS = (Delta(0, "Hi", 1, entries=[_ENTRY]), Delta(0, "!", 2, "length", entries=[_ENTRY]))
_CALL = (
    Delta(0, "", 1, parts=(CallName(0, "call-1", "weather"),)),
    Delta(0, "", 2, parts=(CallArguments(0, "{}"),)),
    Delta(0, "", 3, "tool_calls"),
)
_REASONED = (
    Delta(0, "", 1, parts=(Reasoning("Well"),)),
    Delta(0, "Hi", 2, parts=(Content("Hi"),)),
    Delta(0, "", 3, "stop"),
)
_ANSWERS: tuple[tuple[Literal["chat", "text"], str, tuple[tuple[tuple[Delta, ...], bool], ...]], ...] = (
    (
        "chat",
        "Chat completion",
        ((_PLAIN, False), (_WITH_LOGPROBS, True), (_CALL, False), (_REASONED, False)),
    ),
    ("text", "Text completion", ((_PLAIN, False), (_WITH_LOGPROBS, True))),
)
"""The form of an answer, its name, and its deltas with whether they have log probabilities."""

_RESPONSES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "input": "Hi"},
    {
        "model": MODEL,
        "input": "Hi",
        "instructions": "Be short.",
        "max_output_tokens": 16,
        "temperature": 0.7,
        "top_p": 0.9,
        "user": "me",
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "weather"}],
        "tool_choice": {"type": "function", "name": "weather"},
    },
)

_REQUESTS: tuple[tuple[str, str, str, Any], ...] = (
    ("Embeddings", "POST", "/v1/embeddings", {"model": MODEL, "input": "Hi"}),
    ("Embeddings", "POST", "/v1/embeddings", {"model": MODEL, "input": "Hi", "encoding_format": "base64"}),
    ("Model list", "GET", "/v1/models", None),
    ("Model", "GET", f"/v1/models/{MODEL}", None),
    ("Token ids", "POST", "/tokenize", {"model": MODEL, "prompt": "Hi"}),
    ("Text of token ids", "POST", "/detokenize", {"model": MODEL, "tokens": [1, 2]}),
    ("Deleted stream", "DELETE", f"/v1/streams/{_ID}", None),
    ("Error", "GET", "/v1/models/unknown", None),
    ("Error", "GET", "/nowhere", None),
    ("Error", "PUT", "/v1/models", None),
    ("Health", "GET", "/healthz", None),
    ("Health", "GET", "/readyz", None),
)
"""Requests whose answers need no tokens of a model: what the answer is, method, path and body."""


def samples() -> Samples:
    """Samples of all answers over REST, and of the events of streams, by the names of their shapes."""
    return asyncio.run(_samples())


def socket_samples() -> list[Any]:
    """Samples of all messages that a router sends on a WebSocket."""
    busy = LockstepError(ErrorCode.OVERLOADED, "no room", retry_after_s=1)
    written = (
        messages.started("a", _ID),
        messages.event(b'"a"', f"{_ID}:1", b'{"choices":[]}'),
        messages.done("a", usage_body(_USAGE)),
        messages.failed(None, invalid("type", "is wrong")),
        messages.failed("a", busy),
        messages.cancelled("key", _ID),
        messages.PONG,
        messages.DRAINING,
    )
    return [json.loads(each) for each in written]


class SampleRouter(Router):
    """A router without workers that answers in their place what needs no stream of tokens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(RouterSettings.model_validate({"workers": ["unix:/nowhere"]} | settings))
        defaults = inference_pb2.Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
        card = worker_pb2.ModelCard(name=MODEL, context_length=4096, created=_CREATED, default_sampling=defaults)
        without = worker_pb2.ModelCard(name="without defaults", context_length=4096, created=_CREATED)
        self.workers.models |= {each.name: each for each in (card, without)}
        self.runs = cast("Runs", _Runs())

    async def tokenize(self, model: str, source: PromptSource) -> tuple[list[int], worker_pb2.ModelCard]:  # noqa: ARG002
        """Two tokens."""
        return [1, 2], self.model(model)

    async def detokenize(self, model: str, ids: list[int], field: str) -> str:  # noqa: ARG002
        """A text."""
        return "Hi"

    async def prepare_embedding(self, request: EmbeddingRequest, account: Account) -> PreparedEmbedding:  # noqa: ARG002
        """One text of two tokens."""
        prepared = SimpleNamespace(prompt_tokens=2, journals=[None], card=self.model(request.model))
        return cast("PreparedEmbedding", prepared)

    @asynccontextmanager
    async def embedding(self, prepared: PreparedEmbedding, account: Account) -> AsyncIterator[Embedding]:  # noqa: ARG002
        """One vector."""
        yield cast("Embedding", _Vector())


class _Runs:
    """In the place of the streams that clients can come back to."""

    running = detached = readings = 0

    async def cancel(self, *_: object) -> None:
        """Forget a stream."""


class _Vector:
    """In the place of a computation of embeddings."""

    failovers = 0

    async def run(self, take: Callable[[int, "array[float]"], None]) -> None:
        """Give one vector."""
        take(0, array("f", [0.5, 0.25]))


class _Tokenizer:
    """Of a vocabulary of one token."""

    def token_bytes(self, _: int) -> bytes:
        """The token's text."""
        return b"Hi"


class _Reading:
    """A client's reading of deltas that are there already."""

    usage = _USAGE
    tokenizer = _Tokenizer()

    def __init__(self, style: Style, deltas: Sequence[Delta], *, is_inexact: bool) -> None:
        choice = ChoiceRecord("s", inference_pb2.Sampling())
        self.record = RequestRecord(
            request_id=_ID,
            owner="",
            model=MODEL,
            digest="",
            tokenizer_digest="",
            created=_CREATED,
            style=style,
            stops=(),
            prompts=(array("I", [1]),),
            prefixes=("",),
            choices=(choice,),
            tenant="",
            session="",
        )
        self.inexact_choices = {0} if is_inexact else set()
        self.position = Position.start(1)
        self._deltas = deltas

    def open_choice(self, index: int) -> Position:
        """Give what precedes the first token."""
        self.position = self.position.opened(index)
        return self.position

    def give_usage(self) -> Position:
        """Give the usage."""
        self.position = self.position.with_usage()
        return self.position

    async def events(self) -> AsyncIterator[list[Event]]:
        """Each delta by itself."""
        for delta in self._deltas:
            self.position = self.position.after(delta)
            yield [Event(delta, self.position)]


async def _samples() -> Samples:
    found: Samples = {}
    for kind, name, answers in _ANSWERS:
        for deltas, has_logprobs in answers:
            for is_inexact in (False, True):
                style = Style(kind, stream=True, include_usage=is_inexact, logprobs=has_logprobs)
                reading = cast("Reading", _Reading(style, deltas, is_inexact=is_inexact))
                found.setdefault(name, []).append(json.loads(b"".join(await complete_body_of(reading))))
                reading = cast("Reading", _Reading(style, deltas, is_inexact=is_inexact))
                async for chunks in chunks_of(reading):
                    found.setdefault(f"{name} chunk", []).extend(json.loads(each.data) for each in chunks)
    found["Response events"] = list(_response_events())
    found["Response"] = [each["response"] for each in found["Response events"] if "response" in each]
    for name, answer in await rest_answers():
        found.setdefault(name, []).append(answer.json())
    return found


async def rest_answers() -> list[tuple[str, httpx.Response]]:
    """The answers to requests that need no tokens of a model, with the names of their shapes.

    Raises:
        ValueError: the router has failed.
    """
    transport = httpx.ASGITransport(create_app(SampleRouter()))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answers = [(name, await client.request(method, path, json=body)) for name, method, path, body in _REQUESTS]
    failed = [answer.url.path for name, answer in answers if answer.is_server_error and name != "Health"]
    if failed:
        raise ValueError(f"the sample router has no answer to {', '.join(failed)}")
    return answers


def _response_events() -> Iterable[Any]:
    """The events of three responses: one that is complete, one that was cut off, one that has failed."""
    short = (Delta(0, "Hi", 1), Delta(0, "", 2, "length"))
    for body in _RESPONSES:
        for deltas, is_inexact in (((*_REASONED[:-1], *_CALL), True), (short, False)):
            answer = _response(body)
            yield from _events(answer.opening())
            for delta in deltas:
                yield from _events(answer.events(delta))
            yield from _events(answer.closing(_USAGE, inexact_mark(is_inexact=is_inexact)))
        answer = _response(body)
        yield from _events(answer.opening())
        yield from _events(answer.failure(LockstepError(ErrorCode.NUMERICAL_ERROR, "NaN"), _USAGE))


def _response(body: dict[str, Any]) -> ResponsesFormat:
    return ResponsesFormat(options_of(ResponsesRequest.model_validate(body)), _ID, MODEL, _CREATED)


def _events(given: Iterable[ResponseEvent]) -> Iterable[Any]:
    return (json.loads(event.data) for event in given)
