"""A client's request, in types that depend on no transport and no face.

A face makes a `GenerationRequest`; everything behind the face starts from it. `Sampling` is the protobuf message of
`inference.proto`: the messages there are the project's own types for generation, shared by all its protocols, so they
are not repeated here. The values have been checked for their form only: `preparation` checks that they fit the model.
Objects of these types are not changed. Those of every request are not frozen: that would make them slow to create.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as field_of

from lockstep_api.v1 import inference_pb2

from lockstep_router.generation.tools import ToolCall, ToolUse
from lockstep_router.traces import RequestTrace


@dataclass(slots=True)
class Caller:
    """The sender of a request, as far as generation depends on it."""

    session: str
    """Decides which worker is preferred."""
    tenant: str = ""
    traceparent: str = ""
    """The client's context, if the request has no trace; `tracestate` belongs to it."""
    timeout_s: float | None = None
    """The client's own limit from the request's arrival to the end of its answer; None: no limit."""
    tracestate: str = ""
    trace: RequestTrace | None = None
    """The request's trace; None: it has none."""
    request_id: str = ""
    """For log lines."""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    reasoning: str = ""
    """What an assistant wrote for itself before its message."""


@dataclass(frozen=True)
class Conversation:
    """A prompt that the model's chat template makes from messages."""

    turns: tuple[Turn, ...]
    field: str = "messages"
    """The field's name in errors, as in the other kinds of prompt."""
    add_special_tokens: bool = False
    tools: ToolUse | None = None
    """None: the model gets no tools, and its answers have no calls."""
    template_fields: Mapping[str, bool | int | float | str] = field_of(default_factory=dict)
    """Further values for the template, by name."""
    reasoning_effort: str | None = None


@dataclass(slots=True)
class TextPrompt:
    """A prompt as plain text."""

    text: str
    field: str = "prompt"
    add_special_tokens: bool = True


@dataclass(slots=True)
class TokenPrompt:
    """A prompt as token ids."""

    ids: list[int]
    field: str = "prompt"


@dataclass(frozen=True)
class InfillPrompt:
    """A prompt whose answer belongs between two texts."""

    prefix: str
    suffix: str
    field: str = "prompt"


PromptSource = Conversation | TextPrompt | TokenPrompt | InfillPrompt


@dataclass(slots=True)
class GenerationRequest:
    """One or more prompts, and how their answers will be sampled."""

    model: str
    caller: Caller
    prompts: tuple[PromptSource, ...]
    sampling: inference_pb2.Sampling
    """The sampling without `max_tokens` and `seed`."""
    max_tokens: int | None = None
    """None: `default_max_tokens`, or fewer if the context has less room."""
    default_max_tokens: int | None = None
    """None: as many as the context has room for."""
    max_tokens_field: str = "max_tokens"
    """The name of the field for `max_tokens` in errors."""
    seed: int | None = None
    """None: a random seed. Each prompt uses the seed as if it had been sent alone."""
    choices_per_prompt: int = 1
    kept_per_prompt: int | None = None
    """Choices of each prompt that the answer has: those whose tokens were the most likely ones; None: all."""
    stops: tuple[str, ...] = ()
    echo: bool = False
    """Whether the prompts' texts are part of the answer."""

    @property
    def tools(self) -> ToolUse | None:
        """The tools of a conversation."""
        prompt = self.prompts[0]
        return prompt.tools if isinstance(prompt, Conversation) else None
