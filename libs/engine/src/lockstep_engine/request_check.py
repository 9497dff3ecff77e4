"""What a request must be so that a model can serve it."""

from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_engine.model_config import ModelInfo
from lockstep_engine.request import Request


def check_request(request: Request, model: ModelInfo) -> None:
    """Refuse a request that the model cannot serve.

    Raises:
        LockstepError: INVALID_REQUEST (naming the field) or CONTEXT_LENGTH_EXCEEDED.
    """
    vocab, limit = model.vocab_size, model.context_length
    request.sampling.validate(vocab)
    if not request.prompt_ids:
        raise invalid("prompt_ids", "must not be empty")
    for name in ("prompt_ids", "emitted_ids"):
        ids = getattr(request, name)
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise invalid(name, f"holds an id outside the vocabulary of {vocab}")
    if request.embeds:
        _check_embedding(request, model)
        return
    wanted = len(request.prompt_ids) + request.sampling.max_tokens
    if wanted > limit:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is {request.sampling.max_tokens}: "
            f"{wanted} together, more than the context of {limit}",
            field="max_tokens",
        )


def _check_embedding(request: Request, model: ModelInfo) -> None:
    length, limit = len(request.prompt_ids), model.context_length
    if model.embedding is None:
        raise invalid("embed", f"is not supported: {model.name} gives no embeddings")
    if request.emitted_ids:
        raise invalid("emitted_ids", "must be empty: an embedding is not continued")
    if length > limit:
        sentence = f"the prompt has {length} tokens, more than the context of {limit}"
        raise LockstepError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, sentence, field="prompt_ids")
