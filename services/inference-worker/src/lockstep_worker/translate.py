"""Between the protocol's messages and the engine's types. Pure functions; bad input ends here, its field named."""

import math
import re
from collections.abc import Iterable

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import EngineState, EngineStatus, FinishReason, Logprobs, Output, Request, SamplingParams

from lockstep_worker.engine import ModelLike

MAX_STREAM_ID_CHARS = 128
MAX_TENANT_CHARS = 128

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}

WORKER_STATES = {
    EngineState.STARTING: worker_pb2.WORKER_STATE_STARTING,
    EngineState.READY: worker_pb2.WORKER_STATE_READY,
    EngineState.RESTARTING: worker_pb2.WORKER_STATE_RESTARTING,
    EngineState.FAILED: worker_pb2.WORKER_STATE_FAILED,
}

_RANK_STATES = {
    "starting": worker_pb2.RANK_STATE_STARTING,
    "ready": worker_pb2.RANK_STATE_READY,
    "dead": worker_pb2.RANK_STATE_DEAD,
}


def invalid(field: str, sentence: str) -> LockstepError:
    """The error for a field that cannot be used."""
    return LockstepError(ErrorCode.INVALID_REQUEST, f"{field} {sentence}", field=field)


def check_identity(submit: worker_pb2.Submit) -> None:
    """Raise INVALID_REQUEST unless the stream can be told from others."""
    if not 1 <= len(submit.stream_id) <= MAX_STREAM_ID_CHARS:
        raise invalid("stream_id", f"must have 1 to {MAX_STREAM_ID_CHARS} characters")
    if submit.attempt < 1:
        raise invalid("attempt", "must be at least 1")


def engine_request(submit: worker_pb2.Submit, request_id: str, model: ModelLike) -> Request:
    """The engine's request of a Submit whose identity is good.

    Raises:
        LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, naming the field.
    """
    if not (math.isfinite(submit.deadline_s) and submit.deadline_s >= 0):
        raise invalid("deadline_s", "must be a number of seconds, or 0 for none")
    if len(submit.tenant) > MAX_TENANT_CHARS:
        raise invalid("tenant", f"must have at most {MAX_TENANT_CHARS} characters")
    if not submit.prompt_ids:
        raise invalid("prompt_ids", "must have at least one id")
    length = len(submit.prompt_ids) + len(submit.emitted_ids)
    if length > model.context_length:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"prompt_ids and emitted_ids have {length} ids, more than the context of {model.context_length} tokens",
            field="prompt_ids",
        )
    for field, ids in (("prompt_ids", submit.prompt_ids), ("emitted_ids", submit.emitted_ids)):
        _check_ids(field, ids, model.vocab_size)
    return Request(
        id=request_id,
        prompt_ids=tuple(submit.prompt_ids),
        sampling=sampling_params(submit.sampling, model.vocab_size),
        emitted_ids=tuple(submit.emitted_ids),
        priority=submit.priority,
        tenant=submit.tenant,
    )


def sampling_params(message: inference_pb2.Sampling, vocab_size: int) -> SamplingParams:
    """The engine's sampling, with the protocol's defaults for what is not set.

    Raises:
        LockstepError: INVALID_REQUEST naming the field that is out of range.
    """
    sampling = SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
    sampling.validate(vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    return sampling


def trace_context(submit: worker_pb2.Submit) -> str:
    """The W3C trace context if it is well-formed, else nothing (a bad one is ignored, as its specification says)."""
    return submit.traceparent if _TRACEPARENT.fullmatch(submit.traceparent) else ""


def model_card(model: ModelLike, status: EngineStatus, tp: int, tokenizer_digest: str) -> worker_pb2.ModelCard:
    """What a router has to know of the model."""
    return worker_pb2.ModelCard(
        name=model.name,
        digest=model.digest,
        architecture=model.architecture,
        dtype=status.dtype or model.dtype,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        tp=tp,
        block_size=status.block_size,
        eos_ids=model.eos_ids,
        tokenizer_digest=tokenizer_digest,
        deterministic=status.deterministic,
        created=model.created,
    )


def status_message(status: EngineStatus, state: worker_pb2.WorkerState, reason: str, pid: int) -> worker_pb2.Status:
    """The heartbeat of the process `pid`."""
    return worker_pb2.Status(
        state=state,
        reason=reason,
        queued=status.queued,
        running=status.running,
        free_blocks=status.free_blocks,
        total_blocks=status.total_blocks,
        tokens_per_s=status.tokens_per_s,
        steps=status.steps,
        ranks=[
            worker_pb2.RankHealth(
                rank=rank.rank,
                pid=rank.pid,
                state=_RANK_STATES.get(rank.state, worker_pb2.RANK_STATE_UNSPECIFIED),
                steps=rank.steps,
            )
            for rank in status.ranks
        ],
        pid=pid,
    )


def stream_tokens(stream_id: str, attempt: int, output: Output) -> worker_pb2.StreamTokens:
    """What one step gave to one stream."""
    return worker_pb2.StreamTokens(
        stream_id=stream_id,
        attempt=attempt,
        position=output.position,
        ids=output.ids,
        logprobs=[_logprobs(entry) for entry in output.logprobs],
        finish=_FINISH[output.finish] if output.finish else inference_pb2.FINISH_REASON_UNSPECIFIED,
        cached_tokens=output.cached_tokens,
    )


def rejected(stream_id: str, attempt: int, error: LockstepError) -> worker_pb2.Rejected:
    """The end of an attempt that failed. A stream id that is too long is cut."""
    return worker_pb2.Rejected(
        stream_id=stream_id[:MAX_STREAM_ID_CHARS],
        attempt=attempt,
        code=error.code,
        message=error.message,
        field=error.field or "",
        retry_after_s=error.retry_after_s or 0.0,
        retryable=error.meaning.retryable,
    )


def _logprobs(entry: Logprobs) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        chosen=inference_pb2.TokenLogprob(id=entry.chosen.id, logprob=entry.chosen.logprob),
        top=[inference_pb2.TokenLogprob(id=token.id, logprob=token.logprob) for token in entry.top],
    )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise invalid(field, f"has the id {largest}, outside the vocabulary of {vocab_size}")
