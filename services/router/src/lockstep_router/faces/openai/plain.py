"""The bodies that most requests have, decoded in one step.

These types have the fields of text generation that clients use most, with the limits of the full schemas. A body that
they do not accept, for whatever reason, goes the general way, which knows all fields and whose errors name them. A body
that they do accept means the same both ways; tests compare the two.
"""

from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from lockstep_router.faces.openai.schemas import (
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
)

MAX_BYTES = 64 << 10
"""Largest body that is decoded so. No such body has more elements than `json_structure` allows; see `decode`."""

_Role = Annotated[str, Meta(pattern=r"^(system|developer|user|assistant)\Z")]  # `$` takes a line break, too
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One turn of a conversation, as text."""

    role: _Role
    content: str

    tool_calls: ClassVar[None] = None
    tool_call_id: ClassVar[None] = None
    reasoning_content: ClassVar[None] = None
    name: ClassVar[None] = None

    @property
    def text(self) -> str:
        """The content."""
        return self.content


class _Plain(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that both endpoints share, in the words of `schemas.SamplingFields`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None

    min_tokens: ClassVar[int] = 0
    repetition_penalty: ClassVar[None] = None
    logit_bias: ClassVar[None] = None
    stop_token_ids: ClassVar[None] = None
    response_format: ClassVar[None] = None
    structured_outputs: ClassVar[None] = None
    resumable: ClassVar[None] = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, in whichever form they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class PlainCompletion(_Plain, frozen=True, kw_only=True):
    """POST /v1/completions with one text."""

    prompt: str

    echo: ClassVar[None] = None
    suffix: ClassVar[None] = None
    best_of: ClassVar[None] = None
    logprobs: ClassVar[None] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompt as a list."""
        return [self.prompt]


class PlainChat(_Plain, frozen=True, kw_only=True):
    """POST /v1/chat/completions with texts and without tools."""

    messages: Annotated[list[PlainMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Tokens | None = None

    logprobs: ClassVar[None] = None
    top_logprobs: ClassVar[None] = None
    tools: ClassVar[None] = None
    tool_choice: ClassVar[None] = None
    parallel_tool_calls: ClassVar[None] = None
    reasoning_effort: ClassVar[None] = None
    chat_template_kwargs: ClassVar[None] = None


Plain = TypeVar("Plain", PlainCompletion, PlainChat)

_SEEDS = range(-(1 << 63), 1 << 64)


def decode(decoder: msgspec.json.Decoder[Plain], body: bytes | bytearray, max_values: int) -> Plain | None:
    """A body in its plain form; None: only the general way can decide what it is.

    Args:
        decoder: of the endpoint's type.
        body: the bytes that the client sent.
        max_values: largest number of list elements and object fields together. Each takes two bytes or more.
    """
    if len(body) > min(MAX_BYTES, 2 * max_values):
        return None
    try:
        plain = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return plain if plain.seed is None or plain.seed in _SEEDS else None
