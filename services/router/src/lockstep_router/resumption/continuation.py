"""Makes streams ready to run that another router has begun: from what the store knows of them, without the request."""

import asyncio
import time

from lockstep_api.v1 import worker_pb2

from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.prompts import Prompt
from lockstep_router.journals import ChoiceLog, RequestRecord, StoredStream
from lockstep_router.resumption.position import Position
from lockstep_router.resumption.run import Host
from lockstep_router.streams.journal import Journal
from lockstep_router.text.tokenizer import Tokenizer

_MIN_TIMEOUT_S = 0.001


def continued(stored: StoredStream, tokenizer: Tokenizer, priority: int) -> Prepared:
    """The streams of a request, each after the tokens that it has.

    Args:
        stored: the request and its tokens.
        tokenizer: of its model.
        priority: class of the request's tenant.
    """
    record = stored.record
    prompts = [Prompt(list(ids), text) for ids, text in zip(record.prompts, record.prefixes, strict=True)]
    each = record.choices_per_prompt
    return Prepared(
        worker_pb2.ModelCard(name=record.model, digest=record.digest, tokenizer_digest=record.tokenizer_digest),
        tokenizer,
        prompts,
        [_journal(record, index, prompts[index // each], log, priority) for index, log in enumerate(stored.logs)],
        each,
        record.stops,
        record.parsing,
        continues_prompts=record.continues_prompts,
        begun=[_begun(log) for log in stored.logs],
    )


def _journal(record: RequestRecord, index: int, prompt: Prompt, log: ChoiceLog, priority: int) -> Journal:
    left_s = None if record.deadline_at is None else max(_MIN_TIMEOUT_S, record.deadline_at - time.time())
    return Journal(
        stream_id=record.choices[index].stream_id,
        model=record.model,
        digest=record.digest,
        prompt_ids=prompt.ids,
        sampling=record.choices[index].sampling,
        session=record.session,
        tenant=record.tenant,
        traceparent=record.traceparent,
        arrived_at=asyncio.get_running_loop().time(),
        age_s=max(0.0, time.time() - record.created),
        timeout_s=left_s,
        priority=priority,
        emitted_ids=list(log.ids),
        attempt=_attempts_before(),
        run_id=record.request_id,
        fingerprint=log.numerics if log.ids else None,
        is_inexact=log.is_inexact,
        request_id=record.request_id,
    )


def _attempts_before() -> int:
    """The number of the attempts that came before, on other routers or earlier on this one.

    It is above 0, as a stream that was accepted once is not refused because it would wait. And it grows: late tokens of
    an attempt that this router made before it lost the stream must not count as those of the next one.
    """
    return 1 + int(1000 * asyncio.get_running_loop().time()) % (1 << 30)


def _begun(log: ChoiceLog) -> worker_pb2.StreamTokens:
    return worker_pb2.StreamTokens(
        ids=log.ids,
        logprobs=log.logprobs,
        finish=log.finish,  # type: ignore[arg-type]
        cached_tokens=log.cached_tokens,
    )


def unproven(stored: StoredStream, host: Host) -> frozenset[int]:
    """The choices without a token, of a stream that another router has begun. The numerics of tokens that its client
    may have are not known, unless all workers have the same. Those that began again so before are among them.
    """
    record, before = stored.record, begun_again(stored)
    if host.has_one_numerics(record.model, record.digest):
        return before
    return before | {index for index, log in enumerate(stored.logs) if not log.ids}


def begun_again(stored: StoredStream) -> frozenset[int]:
    """The choices that were unproven when a router went on with them: clients may have tokens from before that."""
    return frozenset(index for index, log in enumerate(stored.logs) if log.is_unproven)


def is_exact(choices: frozenset[int], position: Position) -> bool:
    """Whether a client at a position has no token of these choices."""
    return not any(position.tokens[index] > 0 for index in choices)
