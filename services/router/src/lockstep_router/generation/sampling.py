"""Completes a request's sampling for the model's workers: limits, defaults and seeds."""

from typing import Literal

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.protocol import MAX_STOP_IDS

from lockstep_router.generation.prompts import Prompt, check_ids
from lockstep_router.generation.request import GenerationRequest

_MIN_TOP_P = 1e-6
"""`top_p` 0 asks for the most likely token only; workers take values above 0."""

MODEL_SETTINGS: tuple[Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"], ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)
"""Fields of the sampling for which a model's card may have a default."""


def resolve_sampling(
    request: GenerationRequest, prompt: Prompt, prompt_field: str, card: worker_pb2.ModelCard
) -> inference_pb2.Sampling:
    """The sampling of one prompt's streams, complete except for the seed.

    Raises:
        LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, a field does not fit the model or another field.
    """
    max_tokens = _fit_max_tokens(request, prompt, prompt_field, card)
    sampling = with_defaults(request.sampling, card.default_sampling)
    sampling.max_tokens = max_tokens
    if sampling.min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {sampling.min_tokens}, more than the {max_tokens} tokens there may be")
    check_ids(sampling.stop_token_ids, card, "stop_token_ids")
    if prompt.end_id is not None and not sampling.ignore_eos and prompt.end_id not in sampling.stop_token_ids:
        if len(sampling.stop_token_ids) == MAX_STOP_IDS:
            raise invalid("stop_token_ids", f"may have at most {MAX_STOP_IDS - 1} ids together with suffix")
        sampling.stop_token_ids.append(prompt.end_id)
    if request.kept_per_prompt is not None and not sampling.HasField("logprobs"):
        sampling.logprobs = 0  # the choices are compared by the log probabilities of their tokens
    for token_id in sampling.logit_bias:
        if token_id >= card.vocab_size:
            raise invalid("logit_bias", f"has {token_id}, outside the vocabulary of {card.vocab_size}")
    if sampling.HasField("top_p"):
        sampling.top_p = max(sampling.top_p, _MIN_TOP_P)
    if sampling.HasField("top_k"):
        sampling.top_k = min(sampling.top_k, card.vocab_size)
    return sampling


def with_defaults(sampling: inference_pb2.Sampling, defaults: inference_pb2.Sampling) -> inference_pb2.Sampling:
    """The sampling with the model's own settings for the fields that the client did not set."""
    complete = inference_pb2.Sampling()
    for descriptor, value in defaults.ListFields():
        if descriptor.name in MODEL_SETTINGS:
            setattr(complete, descriptor.name, value)
    complete.MergeFrom(sampling)
    return complete


def with_seed(sampling: inference_pb2.Sampling, seed: int) -> inference_pb2.Sampling:
    """A copy of the sampling with another seed."""
    copy = inference_pb2.Sampling()
    copy.CopyFrom(sampling)
    copy.seed = seed
    return copy


def derive_seed(seed: int, index: int) -> int:
    """The seed of the choice `index`: the first has the request's own, the others are mixed from both (SplitMix64)."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _fit_max_tokens(request: GenerationRequest, prompt: Prompt, prompt_field: str, card: worker_pb2.ModelCard) -> int:
    """Largest number of tokens of each answer to the prompt: prompt and answer share the context."""
    room = card.context_length - len(prompt.ids)
    if room < 1:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(prompt.ids)} tokens, but this model's maximum context length is"
            f" {card.context_length} tokens with the answer",
            field=prompt_field,
        )
    wanted = request.max_tokens
    if wanted is None:
        return room if request.default_max_tokens is None else min(request.default_max_tokens, room)
    if wanted > room:
        name = request.max_tokens_field
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt's {len(prompt.ids)} tokens and {name} {wanted} make {len(prompt.ids) + wanted},"
            f" but this model's maximum context length is {card.context_length} tokens",
            field=name,
        )
    return wanted
