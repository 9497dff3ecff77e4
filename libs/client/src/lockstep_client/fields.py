"""The fields of requests: OpenAI's names and meanings, and those that routers take besides."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Message = Mapping[str, Any]
"""A message: `role`, `content`, and what else OpenAI's API has."""


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


class CompletionFields(SamplingFields, total=False):
    """The fields of a text to continue."""

    logprobs: int | None
    echo: bool | None


Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
