"""Turns the typed bodies of the two generation endpoints into requests without any HTTP.

It owns OpenAI's defaults and the rules between fields. It never looks at a model: `generation` checks what depends on
it.
"""

from collections.abc import Sequence
from typing import Any

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import invalid

from lockstep_router.faces import identity
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.openai.json_structure import check_texts
from lockstep_router.faces.openai.plain import PlainChat, PlainCompletion, PlainMessage
from lockstep_router.faces.openai.schemas import ChatCompletionRequest, CompletionRequest, Message, TokenizeRequest
from lockstep_router.faces.openai.structured import grammar
from lockstep_router.faces.openai.tool_turns import tool_use, turns_of
from lockstep_router.generation.request import (
    Conversation,
    GenerationRequest,
    InfillPrompt,
    PromptSource,
    TextPrompt,
    TokenPrompt,
    Turn,
)
from lockstep_router.generation.style import Style
from lockstep_router.settings import RouterSettings

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for plain completions."""

_SET_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Fields of a body that the sampling has too, where a value of 0 is not the same as none."""
_PLAIN_FIELDS = ("frequency_penalty", "presence_penalty", "stop_token_ids", "ignore_eos", "min_tokens")
"""Those for which it is."""

Chat = ChatCompletionRequest | PlainChat
Completion = CompletionRequest | PlainCompletion
Body = Chat | Completion


def chat_request(body: Chat, origin: Origin, settings: RouterSettings) -> GenerationRequest:
    """The request of /v1/chat/completions.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other or a limit of this router.
    """
    _check_choices(body, settings)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "contradicts max_completion_tokens")
    return GenerationRequest(
        model=body.model,
        caller=identity.caller(origin, body.user),
        prompts=(_chat_prompt(body, settings),),
        sampling=_sampling(body, (body.top_logprobs or 0) if body.logprobs else None),
        max_tokens=old if new is None else new,
        max_tokens_field="max_tokens" if new is None else "max_completion_tokens",
        seed=body.seed,
        choices_per_prompt=body.n or 1,
        stops=body.stops,
    )


def completion_request(body: Completion, origin: Origin, settings: RouterSettings) -> GenerationRequest:
    """The request of /v1/completions.

    Raises:
        LockstepError: INVALID_REQUEST, fields contradict each other or a limit of this router.
    """
    _check_choices(body, settings)
    _check_completion(body, settings)
    wanted = body.n or 1
    return GenerationRequest(
        model=body.model,
        caller=identity.caller(origin, body.user),
        prompts=_prompts(body),
        sampling=_sampling(body, body.logprobs),
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
        seed=body.seed,
        choices_per_prompt=body.best_of or wanted,
        kept_per_prompt=wanted if (body.best_of or wanted) > wanted else None,
        stops=body.stops,
        echo=bool(body.echo),
    )


def chat_style(body: Chat) -> Style:
    """How the answer of /v1/chat/completions is written."""
    return Style("chat", stream=bool(body.stream), include_usage=_wants_usage(body), logprobs=bool(body.logprobs))


def completion_style(body: Completion) -> Style:
    """How the answer of /v1/completions is written."""
    return Style(
        "text",
        stream=bool(body.stream),
        include_usage=_wants_usage(body),
        logprobs=body.logprobs is not None,
        echo=bool(body.echo),
    )


def conversation(messages: Sequence[Message | PlainMessage], settings: RouterSettings) -> Conversation:
    """The messages as a prompt.

    Raises:
        LockstepError: INVALID_REQUEST, a message does not fit its role or the messages before it.
    """
    return Conversation(_turns(messages, settings))


def tokenize_source(body: TokenizeRequest, settings: RouterSettings) -> PromptSource:
    """The prompt of /tokenize.

    Raises:
        LockstepError: INVALID_REQUEST, it has not exactly one prompt, or messages that do not fit together.
    """
    if body.messages is not None and body.prompt is None:
        return conversation(body.messages, settings)
    if body.prompt is not None and body.messages is None:
        return TextPrompt(body.prompt, add_special_tokens=body.add_special_tokens)
    raise invalid("prompt", "or messages is required, and not both")


def _turns(messages: Sequence[Message | PlainMessage], settings: RouterSettings) -> tuple[Turn, ...]:
    arguments = [call.function.arguments for each in messages for call in each.tool_calls or ()]
    if arguments:
        check_texts(arguments, settings.max_body_values)
    return turns_of(messages)


def _chat_prompt(body: Chat, settings: RouterSettings) -> Conversation:
    return Conversation(
        _turns(body.messages, settings),
        tools=tool_use(body) if body.tools or body.tool_choice else None,
        template_fields=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
    )


def _prompts(body: Completion) -> tuple[PromptSource, ...]:
    if isinstance(body.prompt, str) and not body.suffix:
        return (TextPrompt(body.prompt),)
    prompts = body.prompts
    fields = [f"prompt[{index}]" for index in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
    return tuple(_prompt(prompt, body.suffix, field) for prompt, field in zip(prompts, fields, strict=True))


def _prompt(prompt: str | list[int], suffix: str | None, field: str) -> PromptSource:
    if not suffix:
        return TextPrompt(prompt, field) if isinstance(prompt, str) else TokenPrompt(prompt, field)
    if not isinstance(prompt, str):
        raise invalid("suffix", "needs prompts that are texts")
    return InfillPrompt(prompt, suffix, field)


def _sampling(body: Body, logprobs: int | None) -> inference_pb2.Sampling:
    # Only what the body has: a call with all fields takes twenty times as long as a call with none.
    fields: dict[str, Any] = {name: value for name in _SET_FIELDS if (value := getattr(body, name)) is not None}
    for name in _PLAIN_FIELDS:
        if value := getattr(body, name):
            fields[name] = value
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)
    if body.logit_bias:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    if logprobs is not None:
        fields["logprobs"] = logprobs
    if (wanted := grammar(body)) is not None:
        fields["grammar"] = wanted
    return inference_pb2.Sampling(**fields)


def _wants_usage(body: Body) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _check_choices(body: Body, settings: RouterSettings) -> None:
    if body.n is not None and body.n > settings.max_n:
        raise invalid("n", f"may be at most {settings.max_n}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")


def _check_completion(body: Completion, settings: RouterSettings) -> None:
    if len(body.prompts) > settings.max_prompts:
        raise invalid("prompt", f"may have at most {settings.max_prompts} prompts")
    if body.best_of is not None:
        _check_best_of(body.best_of, body, settings)
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "is not supported together with logprobs")


def _check_best_of(best_of: int, body: Completion, settings: RouterSettings) -> None:
    wanted = body.n or 1
    if best_of < wanted:
        raise invalid("best_of", f"is {best_of}, less than the {wanted} answers of n")
    if best_of > settings.max_n:
        raise invalid("best_of", f"may be at most {settings.max_n}")
    if best_of > wanted and body.stream:
        raise invalid("best_of", "cannot be more than n in a stream: the best answers are known at the end")
