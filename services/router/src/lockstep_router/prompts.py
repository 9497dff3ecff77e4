"""From a request to token ids and sampling: everything is checked against the model here, before a worker sees it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.schemas import Message, SamplingFields
from lockstep_router.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 64
"""A prompt with more characters than this for each token of the context is refused without tokenizing it."""

_INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread: they would hold up every stream's tokens for a millisecond or more."""

_ALWAYS_TOP = 1e-6
"""`top_p` 0 asks for the most likely token only; workers take values above 0."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    ids: list[int]
    text: str = ""
    """For `echo`."""


async def encode_messages(
    messages: Sequence[Message], tokenizer: Tokenizer, card: worker_pb2.ModelCard, *, add_special_tokens: bool = False
) -> Prompt:
    """A conversation as the model expects it.

    Raises:
        LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED.
    """
    template = tokenizer.chat_template
    if template is None:
        raise LockstepError(
            ErrorCode.INVALID_REQUEST,
            f"the model {card.name!r} has no chat template; use /v1/completions",
            field="model",
        )
    chars = sum(len(message.text) for message in messages)
    _check_chars(chars, card, "messages")
    turns = [_turn(message) for message in messages]

    def encode() -> Prompt:
        text = template.render(turns)
        _check_chars(len(text), card, "messages")
        return Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)

    return _not_empty(await _run(encode, chars + 64 * len(turns)), "messages")


async def encode_text(
    text: str,
    tokenizer: Tokenizer,
    card: worker_pb2.ModelCard,
    *,
    field: str = "prompt",
    add_special_tokens: bool = True,
) -> Prompt:
    """A plain prompt.

    Raises:
        LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED.
    """
    _check_chars(len(text), card, field)
    encode = lambda: Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)  # noqa: E731
    return _not_empty(await _run(encode, len(text)), field)


def check_ids(ids: Sequence[int], card: worker_pb2.ModelCard, field: str = "prompt") -> None:
    """Refuse ids that are no tokens of the model."""
    for index, token_id in enumerate(ids):
        if token_id >= card.vocab_size:
            raise LockstepError(
                ErrorCode.INVALID_REQUEST,
                f"{field}[{index}]: {token_id} is outside the vocabulary of {card.vocab_size}",
                field=f"{field}[{index}]",
            )


def build_sampling(
    request: SamplingFields,
    card: worker_pb2.ModelCard,
    *,
    max_tokens: int,
    logprobs: int | None,
) -> inference_pb2.Sampling:
    """The request's sampling as workers take it, without a seed.

    Raises:
        LockstepError: INVALID_REQUEST, a field does not fit the model or another field.
    """
    if request.min_tokens > max_tokens:
        raise LockstepError(
            ErrorCode.INVALID_REQUEST,
            f"min_tokens {request.min_tokens} is more than the {max_tokens} tokens there may be",
            field="min_tokens",
        )
    check_ids(request.stop_token_ids or (), card, "stop_token_ids")
    top_p = None if request.top_p is None else max(request.top_p, _ALWAYS_TOP)
    return inference_pb2.Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=top_p,
        top_k=min(max(0, request.top_k or 0), card.vocab_size),
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=_logit_bias(request, card),
        logprobs=logprobs,
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
    )


def fit_max_tokens(
    prompt: Prompt,
    card: worker_pb2.ModelCard,
    *,
    wanted: int | None,
    default: int | None,
    prompt_field: str,
    wanted_field: str,
) -> int:
    """How many tokens the stream may have.

    Args:
        prompt: it and the answer share the context.
        card: of the model.
        wanted: by the client; must fit.
        default: if the client does not say, at most this; None: as many as fit.
        prompt_field: named when the prompt alone is too long.
        wanted_field: named when only both together are.

    Raises:
        LockstepError: CONTEXT_LENGTH_EXCEEDED with the numbers.
    """
    room = card.context_length - len(prompt.ids)
    if room < 1:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(prompt.ids)} tokens, but the model's context is {card.context_length} tokens"
            " with the answer",
            field=prompt_field,
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt's {len(prompt.ids)} tokens and {wanted_field} {wanted} make {len(prompt.ids) + wanted},"
            f" but the model's context is {card.context_length} tokens",
            field=wanted_field,
        )
    return wanted


def _logit_bias(request: SamplingFields, card: worker_pb2.ModelCard) -> dict[int, float]:
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    for token_id in bias:
        if token_id >= card.vocab_size:
            raise LockstepError(
                ErrorCode.INVALID_REQUEST,
                f"logit_bias: {token_id} is outside the vocabulary of {card.vocab_size}",
                field="logit_bias",
            )
    return bias


def _turn(message: Message) -> dict[str, str]:
    # Templates know "system"; "developer" is OpenAI's newer name for it.
    turn = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _check_chars(chars: int, card: worker_pb2.ModelCard, field: str) -> None:
    limit = MAX_CHARS_PER_TOKEN * card.context_length
    if chars > limit:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{field} has {chars} characters; a context of {card.context_length} tokens takes at most {limit}",
            field=field,
        )


def _not_empty(prompt: Prompt, field: str) -> Prompt:
    if not prompt.ids:
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"{field}: there must be at least one token", field=field)
    return prompt


async def _run(encode: Callable[[], Prompt], chars: int) -> Prompt:
    return encode() if chars <= _INLINE_CHARS else await asyncio.to_thread(encode)
