"""Translates between the protocol's messages and the engine's types. Pure functions; invalid input is refused here, by
the name of its field.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_engine import (
    EngineState,
    EngineStatus,
    FinishReason,
    Grammar,
    GrammarKind,
    Logprobs,
    Output,
    Phase,
    Request,
    SamplingParams,
)

from lockstep_worker.engine import ModelLike
from lockstep_worker.rank_pace import NO_STEPS, Pace

NO_PACE: Mapping[int, Pace] = MappingProxyType({})

MAX_STREAM_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_FIELD_CHARS = 64
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}

WORKER_STATES = {
    EngineState.STARTING: worker_pb2.WORKER_STATE_STARTING,
    EngineState.READY: worker_pb2.WORKER_STATE_READY,
    EngineState.RESTARTING: worker_pb2.WORKER_STATE_RESTARTING,
    EngineState.FAILED: worker_pb2.WORKER_STATE_FAILED,
}

_PHASES = {
    Phase.WAITING: worker_pb2.STREAM_PHASE_WAITING,
    Phase.RUNNING: worker_pb2.STREAM_PHASE_RUNNING,
}

_GRAMMAR_KINDS = {
    inference_pb2.GRAMMAR_KIND_JSON_OBJECT: GrammarKind.JSON_OBJECT,
    inference_pb2.GRAMMAR_KIND_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    inference_pb2.GRAMMAR_KIND_REGEX: GrammarKind.REGEX,
    inference_pb2.GRAMMAR_KIND_LARK: GrammarKind.LARK,
}

_RANK_STATES = {
    "starting": worker_pb2.RANK_STATE_STARTING,
    "ready": worker_pb2.RANK_STATE_READY,
    "dead": worker_pb2.RANK_STATE_DEAD,
}


def check_attempt(submit: worker_pb2.Submit) -> None:
    """Raise INVALID_REQUEST for a stream id or an attempt number that is out of range."""
    if not 1 <= len(submit.stream_id) <= MAX_STREAM_ID_CHARS:
        raise invalid("stream_id", f"must have 1 to {MAX_STREAM_ID_CHARS} characters")
    if submit.attempt < 1:
        raise invalid("attempt", "must be at least 1")


def client_request_id(submit: worker_pb2.Submit) -> str:
    """The client's request of a Submit; empty without one, or if it is not harmless: it is for log lines only."""
    return submit.request_id if _SANE_ID.fullmatch(submit.request_id) else ""


def engine_request(submit: worker_pb2.Submit, request_id: str, model: ModelLike, greeted_at: float) -> Request:
    """The engine's request for a Submit that `check_attempt` has accepted.

    Args:
        submit: the router's message.
        request_id: the request's id in the engine.
        model: the model that the request must fit.
        greeted_at: when the router's Hello arrived, on the clock of `time.monotonic`.

    Raises:
        LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, naming the field.
    """
    if not (math.isfinite(submit.deadline_s) and submit.deadline_s >= 0):
        raise invalid("deadline_s", "must be a number of seconds, or 0 for none")
    if not math.isfinite(submit.arrived_s):
        raise invalid("arrived_s", "must be a number of seconds")
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
    if submit.embed:
        _check_embedding(submit, model)
    return Request(
        id=request_id,
        prompt_ids=tuple(submit.prompt_ids),
        sampling=SamplingParams() if submit.embed else sampling_params(submit.sampling, model.vocab_size),
        emitted_ids=tuple(submit.emitted_ids),
        priority=submit.priority,
        tenant=submit.tenant,
        arrived_at=greeted_at + submit.arrived_s,
        embeds=submit.embed,
    )


def _check_embedding(submit: worker_pb2.Submit, model: ModelLike) -> None:
    if model.embedding is None:
        raise invalid("embed", f"is not supported: {model.name!r} gives no embeddings")
    if submit.emitted_ids:
        raise invalid("emitted_ids", "must be empty: an embedding is not continued")


def sampling_params(message: inference_pb2.Sampling, vocab_size: int) -> SamplingParams:
    """The engine's sampling, with the protocol's defaults for fields that are not set.

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
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )
    sampling.validate(vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    return sampling


def model_card(model: ModelLike, status: EngineStatus, tp: int, tokenizer_digest: str) -> worker_pb2.ModelCard:
    """The description of the model for routers."""
    embedding = model.embedding
    return worker_pb2.ModelCard(
        name=model.name,
        digest=model.digest,
        architecture=model.architecture,
        dtype=status.dtype or model.dtype,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        tp=tp,
        tokenizer_digest=tokenizer_digest,
        deterministic=status.deterministic,
        created=model.created,
        fingerprint=status.fingerprint,
        embedding=None
        if embedding is None
        else worker_pb2.Embedding(
            size=embedding.size, dimensions=embedding.dimensions, any_dimension=embedding.any_dimension
        ),
        grammar_engine=status.grammar_engine,
    )


def status_message(
    status: EngineStatus, state: worker_pb2.WorkerState, reason: str, pid: int, pace: Mapping[int, Pace] = NO_PACE
) -> worker_pb2.Status:
    """The heartbeat message; `pid` is the worker's process, `pace` what a step of each rank took lately."""
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
                compute_s=pace.get(rank.rank, NO_STEPS).compute_s,
                collective_s=pace.get(rank.rank, NO_STEPS).collective_s,
            )
            for rank in status.ranks
        ],
        pid=pid,
        step_deadline_s=status.step_deadline_s,
        free_seqs=status.free_seqs,
        queue_wait_s=status.queue_wait_s,
        queue_wait_per_request_s=status.queue_wait_per_request_s,
        queue_waits_s=status.queue_waits_s,
    )


def lost_batch(suspicions: Iterable[worker_pb2.Suspicion]) -> worker_pb2.LostBatch:
    """What the ranks ran when they were lost, from the suspicion against each stream."""
    counts = Counter(suspicions)
    on_trial = counts[worker_pb2.SUSPICION_ON_TRIAL]
    suspected = on_trial + counts[worker_pb2.SUSPICION_SUSPECTED]
    return worker_pb2.LostBatch(streams=counts.total(), suspected=suspected, on_trial=on_trial)


def add_tokens(tokens: worker_pb2.Tokens, stream_id: str, attempt: int, handle: int, output: Output) -> None:
    """Add one stream's tokens of one step to the step's message: as columns, if its handle and its tokens allow it."""
    says_more = output.logprobs or output.finish or output.cached_tokens or output.embedding is not None
    if handle and len(output.ids) == 1 and not says_more:
        tokens.handles.append(handle)
        tokens.positions.append(output.position)
        tokens.ids.append(output.ids[0])
    else:
        tokens.streams.append(_stream_tokens(stream_id, attempt, output))


def _stream_tokens(stream_id: str, attempt: int, output: Output) -> worker_pb2.StreamTokens:
    """The message with one stream's tokens of one step."""
    return worker_pb2.StreamTokens(
        stream_id=stream_id,
        attempt=attempt,
        position=output.position,
        ids=output.ids,
        logprobs=[_logprobs(entry) for entry in output.logprobs],
        finish=_FINISH[output.finish] if output.finish else inference_pb2.FINISH_REASON_UNSPECIFIED,
        cached_tokens=output.cached_tokens,
        embedding=b"" if output.embedding is None else output.embedding.astype("<f4").tobytes(),
    )


def phase_change(stream_id: str, attempt: int, phase: Phase) -> worker_pb2.StreamPhaseChange:
    """The message that a stream began to run, or waits again."""
    return worker_pb2.StreamPhaseChange(stream_id=stream_id, attempt=attempt, phase=_PHASES[phase])


def rejected(stream_id: str, attempt: int, error: LockstepError) -> worker_pb2.Rejected:
    """The message that an attempt was refused or has failed. A stream id that is too long is cut."""
    return worker_pb2.Rejected(
        stream_id=stream_id[:MAX_STREAM_ID_CHARS],
        attempt=attempt,
        code=error.code,
        message=error.message,
        field=error.field or "",
        retry_after_s=error.retry_after_s or 0.0,
        retryable=error.meaning.retryable,
    )


def _grammar(message: inference_pb2.Grammar) -> Grammar:
    field = message.field or "grammar"
    if len(field) > MAX_FIELD_CHARS:
        raise invalid("grammar.field", f"must have at most {MAX_FIELD_CHARS} characters")
    kind = _GRAMMAR_KINDS.get(message.kind)
    if kind is None:
        raise invalid(field, "has a kind that this worker does not know")
    return Grammar(kind, message.text, field)


def _logprobs(entry: Logprobs) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        chosen=inference_pb2.TokenLogprob(id=entry.chosen.id, logprob=entry.chosen.logprob),
        top=[inference_pb2.TokenLogprob(id=token.id, logprob=token.logprob) for token in entry.top],
    )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise invalid(field, f"has the id {largest}, outside the vocabulary of {vocab_size}")
