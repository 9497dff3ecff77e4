"""The fields of requests: OpenAI's names and meanings, and those that routers take besides."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Message = Mapping[str, Any]
"""A message: `role`, `content`, and what else OpenAI's API has."""


class StructuredOutputs(TypedDict, total=False):
    """What an answer conforms to; vLLM's field of this name. Exactly one of its fields is given."""

    json: str | Mapping[str, Any]
    """A JSON schema."""
    regex: str
    """In the syntax of Rust's regex library."""
    choice: Sequence[str]
    """The answer is one of these."""
    grammar: str
    """Lark (llguidance's variant) or GBNF."""
    json_object: Literal[True]
    """Any JSON object."""


class SamplingFields(TypedDict, total=False):
    """The fields that both kinds of request have."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int | None
    seed: int | None
    """Drawn by the client if it is not given, so that a repeat of the request has the same tokens."""
    stop: str | Sequence[str] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None
    user: str | None
    response_format: Mapping[str, Any] | None
    structured_outputs: StructuredOutputs | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None


class ChatFields(SamplingFields, total=False):
    """The fields of a conversation."""

    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, bool | int | float | str] | None
    """Further values for the model's chat template. Routers refuse those that it does not use."""


class CompletionFields(SamplingFields, total=False):
    """The fields of a text to continue."""

    logprobs: int | None
    echo: bool | None
    suffix: str | None
    """The answer belongs between the prompt and this text; for models that fill in the middle."""
    best_of: int | None
    """So many answers are computed for each prompt, and the `n` most likely ones given. More than `n` over HTTP only,
    and not in a stream: the best answers are known at the end."""


Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
