"""What an answer consists of: events of a stream, and whole answers; made from OpenAI's JSON."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_client.errors import ProtocolError

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Logprob:
    """A token of the text, and the most likely tokens at its place."""

    token: str
    logprob: float | None
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TextPiece:
    """More text of a choice; its log probabilities, if they were asked for."""

    choice: int
    text: str
    logprobs: tuple[Logprob, ...] = ()
    event_id: str = ""


@dataclass(frozen=True)
class ReasoningPiece:
    """More of what the model thinks before its answer."""

    choice: int
    text: str
    event_id: str = ""


@dataclass(frozen=True)
class ToolCallPiece:
    """More of a tool call. The first piece has id and name, and each has the next part of the arguments' JSON."""

    choice: int
    index: int
    id: str | None
    name: str | None
    arguments: str
    event_id: str = ""


@dataclass(frozen=True)
class Finish:
    """The end of a choice."""

    choice: int
    reason: str
    is_inexact: bool = False
    """The stream moved to a worker with other numerics: its text may differ from the undisturbed one."""
    event_id: str = ""


@dataclass(frozen=True)
class Usage:
    """The tokens of the whole answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    event_id: str = ""

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


Event = TextPiece | ReasoningPiece | ToolCallPiece | Finish | Usage


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """One answer of a request."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: tuple[Logprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None
    raw: Json = field(repr=False)
    """The server's JSON."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Model:
    """A model that the routers serve; lengths in tokens."""

    id: str
    created: int
    max_model_len: int | None


@dataclass(frozen=True)
class Tokens:
    """A text's token ids, and the most that the model takes."""

    tokens: tuple[int, ...]
    max_model_len: int | None


@dataclass(frozen=True)
class Embeddings:
    """The vectors of texts."""

    model: str
    vectors: tuple[tuple[float, ...], ...] = field(repr=False)
    """One for each text, in the order of the texts: numbers of single precision. Lockstep's have the norm 1."""
    prompt_tokens: int
    """Of all texts together."""


def events_of(body: Json, event_id: str) -> list[Event]:
    """The events in one chunk of a stream.

    Raises:
        ProtocolError: it has not the form of a chunk.
    """
    try:
        events = [event for choice in body.get("choices") or () for event in _choice_events(choice, body, event_id)]
        if body.get("usage"):
            events.append(_usage(body["usage"], event_id))
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ProtocolError("the stream has a chunk of an unknown form") from None
    return events


def _choice_events(choice: Json, body: Json, event_id: str) -> list[Event]:
    index = int(choice.get("index", 0))
    delta = choice.get("delta") or {}
    text = delta.get("content") if "delta" in choice else choice.get("text")
    logprobs = _logprobs(choice.get("logprobs"))
    events: list[Event] = []
    if delta.get("reasoning_content"):
        events.append(ReasoningPiece(index, delta["reasoning_content"], event_id))
    if text or logprobs:
        events.append(TextPiece(index, text or "", logprobs, event_id))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        events.append(
            ToolCallPiece(index, int(call["index"]), call.get("id"), function.get("name"), arguments, event_id)
        )
    if choice.get("finish_reason"):
        is_inexact = bool((body.get("lockstep") or {}).get("inexact"))
        events.append(Finish(index, str(choice["finish_reason"]), is_inexact, event_id))
    return events


def answer_of(body: Json) -> Answer:
    """A whole answer.

    Raises:
        ProtocolError: it has not the form of one.
    """
    try:
        return Answer(
            id=str(body["id"]),
            model=str(body["model"]),
            choices=tuple(_whole_choice(choice) for choice in body["choices"]),
            usage=_usage(body["usage"], "") if body.get("usage") else None,
            raw=body,
        )
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ProtocolError("the answer has an unknown form") from None


def models_of(body: Json) -> list[Model]:
    """The list of models.

    Raises:
        ProtocolError: it has not the form of one.
    """
    try:
        return [
            Model(str(model["id"]), int(model.get("created") or 0), model.get("max_model_len"))
            for model in body["data"]
        ]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ProtocolError("the list of models has an unknown form") from None


def tokens_of(body: Json) -> Tokens:
    """A text's tokens.

    Raises:
        ProtocolError: the answer has another form.
    """
    try:
        return Tokens(tuple(int(token) for token in body["tokens"]), body.get("max_model_len"))
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ProtocolError("the list of tokens has an unknown form") from None


def embeddings_of(body: Json) -> Embeddings:
    """The vectors of texts.

    Raises:
        ProtocolError: the answer has another form.
    """
    try:
        vectors = {int(each["index"]): _vector(each["embedding"]) for each in body["data"]}
        ordered = tuple(vectors[index] for index in range(len(body["data"])))
        return Embeddings(str(body["model"]), ordered, int(body["usage"]["prompt_tokens"]))
    except (TypeError, KeyError, AttributeError, ValueError, struct.error):
        raise ProtocolError("the list of embeddings has an unknown form") from None


def _vector(given: str | Sequence[float]) -> tuple[float, ...]:
    """The numbers of a vector in either of OpenAI's two forms. Some servers give lists whatever they are asked for."""
    if not isinstance(given, str):
        return tuple(map(float, given))
    content = base64.b64decode(given, validate=True)
    return struct.unpack(f"<{len(content) // 4}f", content)


def _whole_choice(choice: Json) -> Choice:
    message = choice.get("message") or {}
    text = message.get("content") if "message" in choice else choice["text"]
    calls = [
        ToolCall(str(call["id"]), str(call["function"]["name"]), str(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    logprobs = _logprobs(choice.get("logprobs"))
    return Choice(
        int(choice["index"]),
        text or "",
        choice.get("finish_reason"),
        logprobs,
        tuple(calls),
        message.get("reasoning_content") or "",
    )


def _logprobs(given: Json | None) -> tuple[Logprob, ...]:
    """Log probabilities in either of OpenAI's two forms."""
    if not given:
        return ()
    if "content" in given:
        return tuple(
            Logprob(
                entry["token"],
                entry["logprob"],
                {top["token"]: top["logprob"] for top in reversed(entry.get("top_logprobs") or ())},
            )
            for entry in given["content"] or ()
        )
    tokens: Sequence[str] = given.get("tokens") or ()
    tops: Sequence[Json | None] = given.get("top_logprobs") or (None,) * len(tokens)
    return tuple(
        Logprob(token, logprob, top or {})
        for token, logprob, top in zip(tokens, given["token_logprobs"], tops, strict=True)
    )


def _usage(given: Json, event_id: str) -> Usage:
    details = given.get("prompt_tokens_details") or {}
    return Usage(
        int(given["prompt_tokens"]),
        int(given.get("completion_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        event_id,
    )
