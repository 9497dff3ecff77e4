"""Decides what runs in a step.

There is one rule: a sequence has tokens, and a count of how many of them have KV; a step spends a budget of tokens on
raising that count. Chunked prefill, prefix hits, preemption and resumed streams all follow from it.

A plan may be made before the results of earlier plans are known. Ranks execute plans in order, so everything in a plan
counts as done once it is made, except for the tokens that it samples. A sequence whose last token is still in flight is
planned with the placeholder LAST_SAMPLED; the ranks replace it by the token that they sampled last for its row. A
sequence with a grammar is not: which tokens it may choose next depends on that token.

The scheduler owns the requests (`sequences`), their blocks (`block_tables`) and the choice of steps (`step_chooser`).
It knows nothing of processes, tensors or time.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from numpy.typing import NDArray

from lockstep_engine.block_tables import BlockTables
from lockstep_engine.blocks import BlockKey, Needs, PoolSizes
from lockstep_engine.chunk import Chunk, prompt_logprobs, token_logprobs
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.constraint import Constraint
from lockstep_engine.limits import Limits
from lockstep_engine.plan import NO_TOKEN, Plan, Result, StepLogprobs, nothing
from lockstep_engine.prefix_log import PrefixChanges, PrefixLog
from lockstep_engine.request import FinishReason, Output, Phase, PromptLogprobs, Request
from lockstep_engine.sequence import Sequence
from lockstep_engine.sequences import Sequences
from lockstep_engine.shared_slots import SharedSlots
from lockstep_engine.step_chooser import StepChooser
from lockstep_engine.step_plan import make_plan


class _Planned(NamedTuple):
    """A plan whose result has not come."""

    chunks: list[Chunk]
    added: dict[int, Sequence]
    """By sampling rows: those that get one with it."""


class Scheduler:
    """Waiting and running sequences, and the blocks of the KV cache."""

    def __init__(self, limits: Limits, eos_ids: Iterable[int], sizes: PoolSizes, *, shares_slots: bool = False) -> None:
        self._limits = limits
        self.slots = SharedSlots() if shares_slots else None
        """Slots of host memory that the driver itself uses, in this epoch."""
        self.on_end: Callable[[Sequence], None] = lambda _: None
        """Called when a request that holds blocks ends, before they are released. Not if it is cancelled before its
        first output: that output shows whether its logits are finite, and blocks with NaN must not be shared."""
        self._eos_ids = frozenset(eos_ids)
        self._prefix_logs = (PrefixLog(), PrefixLog())
        self.sequences = Sequences(limits.max_seqs)
        self._make_pools(sizes)
        self._in_flight: deque[_Planned] = deque()
        self._updated = 0
        """Plans whose results `update` has processed."""

    def is_complete(self, request: Request) -> bool:
        """Whether the ids that a request has emitted complete it."""
        if not request.emitted_ids:
            return False
        return Sequence(request, 0).finish_reason(self._eos_ids, self._limits.context_length) is not None

    def submit(self, request: Request, arrived_at: float = 0.0, constraint: Constraint | None = None) -> Output | None:
        """Queue a request.

        Args:
            request: what to generate.
            arrived_at: orders requests, with their classes (see `seniority`); seconds on any clock, the same for all.
            constraint: its place in its grammar, after the ids that it has emitted.

        Returns:
            The only output, if the emitted ids already complete the request; else None.

        Raises:
            LockstepError: OVERLOADED when the queue is full, RESOURCE_EXHAUSTED when the request can never fit.
        """
        sequences = self.sequences
        if request.id in sequences.by_id:
            raise invalid("id", f"{request.id} is in use")
        sequence = Sequence(request, sequences.arrivals, arrived_at, constraint)
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length) if request.emitted_ids else None
        if reason is not None:
            return Output(request.id, sequence.emitted, (), finish=reason)
        self._check_capacity(request)
        if len(sequences.waiting) >= self._limits.max_queue:
            raise self._queue_is_full()
        sequences.add(sequence)
        return None

    def check_queue(self, coming: int) -> None:
        """Refuse a request that would find the queue full, because `coming` others are queued before it and as many as
        can run leave it.

        Raises:
            LockstepError: OVERLOADED.
        """
        sequences = self.sequences
        free = sequences.places - len(sequences.running)
        if len(sequences.waiting) + coming >= self._limits.max_queue + free:
            raise self._queue_is_full()

    def cancel(self, request_id: str) -> bool:
        """Remove a request and free its blocks. False if the id is unknown."""
        sequence = self.sequences.by_id.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> Plan | None:
        """The next step. None if nothing can run before a result of a step in flight has come.

        Raises:
            MemoryError: the scheduler's state is inconsistent; call `shed`.
        """
        chunks = self._chooser.choose()
        # If all sequences wait for loads from host memory, finishing these loads delays no other sequence. A sequence
        # whose loads are done may still lack room, which one that is loading has: each round ends the loads of at
        # least one more.
        while not chunks and not self._in_flight and self.blocks.hurry(self.sequences.running):
            chunks = self._chooser.choose()
        if not chunks:
            return self._copies()
        self._chooser.current = chunks[-1].sequence
        step = self._updated + len(self._in_flight) + 1
        added = self.sequences.take_added()
        plan = make_plan(step, chunks, added, self.blocks, self._eos_ids)
        self._in_flight.append(_Planned(chunks, {each.sampling_row: each for each in added}))
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.tokens
            sequence.in_flight += chunk.samples
            if sequence.computed // BLOCK_SIZE > chunk.start // BLOCK_SIZE:
                self.blocks.commit(sequence, chunk.start, self._chooser.keys(sequence))
        return plan

    def update(self, result: Result) -> list[Output]:
        """Process the result of the oldest plan in flight."""
        sampled = scored = embedded = 0
        planned, sequences = self._in_flight.popleft(), self.sequences
        live = sequences.by_id
        self._updated += 1
        if self.slots is not None:
            self.slots.executed()
        outputs = self._end_unserved(planned, result.unserved)
        for chunk in planned.chunks:
            index, first_score, embedding = sampled, scored, embedded
            sampled += chunk.samples
            scored += len(chunk.scored)
            embedded += chunk.completes
            sequence = chunk.sequence
            if live.get(sequence.request.id) is not sequence:  # cancelled, or ended by this step or the one before it
                continue
            scores = prompt_logprobs(chunk, result, first_score)
            if (chunk.samples and result.token_ids[index] == NO_TOKEN) or (scores is not None and scores.has_nan):
                sequences.ended.append(sequence.request.id)
                self.blocks.forget(sequence)
                self._remove(sequence)
                outputs.append(Output(sequence.request.id, sequence.emitted, (), error=_no_numbers("logits")))
                continue
            sequence.scores_delivered = max(sequence.scores_delivered, chunk.scored.stop)
            if chunk.samples:
                outputs.append(self._emit(sequence, result.token_ids[index], result.logprobs[index], scores))
                continue
            if chunk.completes:
                assert result.embeddings is not None
                outputs.append(self._finish_embedding(sequence, result.embeddings[embedding]))
                continue
            if sequence.sampling_row >= 0:
                sequences.phases[sequence.request.id] = Phase.RUNNING
            if scores is not None:
                outputs.append(Output(sequence.request.id, sequence.emitted, (), prompt_logprobs=scores))
        return outputs

    def note_prefixes(self, *, wanted: bool) -> None:
        """Begin or stop to note what the prefix cache gains and loses."""
        for log in self._prefix_logs:
            log.turn(on=wanted)

    def take_prefix_changes(self) -> PrefixChanges:
        """What the prefix cache has gained and lost since the last call, while that is noted."""
        return self.blocks.take_changes()

    def newest_prefixes(self, limit: int) -> list[int]:
        """Keys of blocks that the prefix cache has, those that are kept longest first."""
        return self.blocks.newest(self.sequences.running, limit)

    def shed(self, seen: int) -> list[Output]:
        """Recover from a MemoryError while a plan was made or sent: end the request being scheduled, and compute all
        others again in empty pools. The state that the failed plan left behind is inconsistent, so none of it is kept.

        Args:
            seen: number of plans in flight that have reached the ranks. Their results will come and are passed to
            `update`.

        Returns:
            The last output of the request that ends. Another worker can continue it.
        """
        while len(self._in_flight) > seen:
            self._in_flight.pop()
        live = self.sequences.by_id.values()
        ended = next(
            (each for each in live if each is self._chooser.current),
            max(live, key=lambda each: each.arrival, default=None),
        )
        if ended is not None:
            del self.sequences.by_id[ended.request.id]
        if self.slots is not None:
            self.slots.forget(seen)
        try:
            self._start_over(self.blocks.sizes)
        except Exception:
            if ended is not None:
                self.sequences.by_id[ended.request.id] = ended  # it ends with the group
            raise
        return [] if ended is None else [Output(ended.request.id, ended.emitted, (), error=no_memory())]

    def end_broken(self) -> list[Output]:
        """End the requests whose constraint has failed; their last outputs."""
        broken = [
            each for each in self.sequences.by_id.values() if each.constraint is not None and each.constraint.error
        ]
        for sequence in broken:
            self._remove(sequence)
        return [
            Output(each.request.id, each.emitted, (), error=each.constraint.error)
            for each in broken
            if each.constraint is not None
        ]

    def clear(self) -> None:
        """Remove all requests and the pools. Works in any state, consistent or not."""
        self.sequences.clear()
        self._in_flight.clear()
        self._forget_slots()
        self._start_over(PoolSizes(0))

    def reset(self, sizes: PoolSizes) -> None:
        """Start with empty pools, for new ranks. There must be no requests."""
        assert not self.sequences.by_id
        self._in_flight.clear()
        self._updated = 0
        self._forget_slots()
        self._start_over(sizes)

    def prefix_keys(self, request_id: str) -> list[BlockKey]:
        """Keys of the blocks of a waiting request that it need not compute if the prefix cache has them."""
        sequence = self.sequences.by_id.get(request_id)
        return [] if sequence is None or sequence.sampling_row >= 0 else self._chooser.cacheable_keys(sequence)

    def hold(self, request_id: str, *, held: bool) -> None:
        """Keep a request waiting while others go on, or admit it again. Unknown ids are ignored."""
        sequence = self.sequences.by_id.get(request_id)
        if sequence is not None:
            sequence.is_held = held

    def _forget_slots(self) -> None:
        """The ranks that have the slots are gone."""
        if self.slots is not None:
            self.slots = SharedSlots()

    def _start_over(self, sizes: PoolSizes) -> None:
        """Empty the pools and let all requests wait, in the state that they have once the plans in flight are done."""
        self._make_pools(PoolSizes(0))  # frees the old pools before the new ones are allocated
        self._make_pools(sizes)
        self.sequences.start_over()
        for chunk in chain.from_iterable(planned.chunks for planned in self._in_flight):
            chunk.sequence.in_flight += chunk.samples
            chunk.sequence.score_from = max(chunk.sequence.score_from, chunk.scored.stop)

    def _make_pools(self, sizes: PoolSizes) -> None:
        limits = self._limits
        for log in self._prefix_logs:
            log.lose()
        self.blocks = BlockTables(
            sizes,
            limits.hot_window,
            limits.max_seqs,
            limits.context_length,
            limits.tenant_share,
            self._prefix_logs,
            self.slots,
            limits.window,
            copies=limits.copies,
        )
        self._chooser = StepChooser(limits, self.sequences, self.blocks)

    def _check_capacity(self, request: Request) -> None:
        if request.embeds:
            answer, what, field = 0, "the prompt needs", "prompt_ids"
        else:
            answer, what, field = request.sampling.max_tokens, "prompt and max_tokens need", "max_tokens"
        tokens = min(len(request.prompt_ids) + answer, self._limits.context_length)
        needs, blocks = self.blocks.needs(tokens), self.blocks
        total = Needs(blocks.hot.total, blocks.cold.total)
        for room, whose in ((total, "this engine has"), (blocks.budget, "one tenant may have")):
            if not needs.fit(room):
                raise LockstepError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"{what} {needs} of KV cache, {whose} {room}",
                    field=field,
                )

    def _queue_is_full(self) -> LockstepError:
        return LockstepError(
            ErrorCode.OVERLOADED, f"the queue of {self._limits.max_queue} requests is full", retry_after_s=1.0
        )

    def _remove(self, sequence: Sequence) -> None:
        if sequence.sampling_row >= 0:
            if sequence.has_output:
                self.on_end(sequence)
            self.blocks.release(sequence)
        else:
            self.blocks.matches.forget(sequence.request.id)
        self.sequences.remove(sequence)

    def _end_unserved(self, planned: _Planned, rows: list[int]) -> list[Output]:
        """End the requests for whose sampling rows rank 0 had no memory; their last outputs. Also those of which the
        plan computes nothing yet: later steps would sample for them without their settings.
        """
        sequences = self.sequences
        ended = [
            each for row, each in planned.added.items() if row in rows and sequences.by_id.get(each.request.id) is each
        ]
        for sequence in ended:
            sequences.ended.append(sequence.request.id)
            self._remove(sequence)
        return [Output(each.request.id, each.emitted, (), error=no_memory()) for each in ended]

    def _emit(
        self, sequence: Sequence, token: int, logprobs: StepLogprobs | None, scores: PromptLogprobs | None
    ) -> Output:
        position = sequence.emitted
        sequence.tokens.append(token)
        sequence.in_flight -= 1
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length)
        cached = 0 if sequence.has_output else sequence.cached_tokens or 0
        sequence.has_output = True
        if reason is not None:
            self.sequences.ended.append(sequence.request.id)
            self._remove(sequence)
        else:
            if sequence.constraint is not None:
                sequence.constraint.advance(token)
            if sequence.computed >= len(sequence.tokens) and len(sequence.tokens) % BLOCK_SIZE == 0:
                self.blocks.remember(sequence, self._chooser.keys(sequence))
        return Output(
            sequence.request.id,
            position,
            (token,),
            logprobs=() if logprobs is None else (token_logprobs(token, logprobs),),
            finish=reason,
            cached_tokens=cached,
            prompt_logprobs=scores,
        )

    def _finish_embedding(self, sequence: Sequence, embedding: NDArray[np.float32]) -> Output:
        request_id = sequence.request.id
        self.sequences.ended.append(request_id)
        has_numbers = np.isfinite(embedding).all()
        if has_numbers:
            sequence.has_output = True
        else:
            self.blocks.forget(sequence)
        self._remove(sequence)
        if not has_numbers:
            return Output(request_id, 0, (), error=_no_numbers("hidden states"))
        cached = sequence.cached_tokens or 0
        return Output(request_id, 0, (), finish=FinishReason.STOP, cached_tokens=cached, embedding=embedding)

    def _copies(self) -> Plan | None:
        """A step that only copies blocks to memory that the driver reads; None if there are none or if another step
        copies them.
        """
        if self.slots is None or self._in_flight or not self.blocks.host.has_spills:
            return None
        spills, loads = self.blocks.host.take()
        plan = nothing(self._updated + 1, spills, loads)
        self._in_flight.append(_Planned([], {}))
        return plan


def no_memory() -> LockstepError:
    """The error of a request that ends because memory ran out here; another worker may continue it."""
    return LockstepError(
        ErrorCode.OVERLOADED, "the worker has no memory for this request at the moment", retry_after_s=1.0
    )


def _no_numbers(what: str) -> LockstepError:
    """The error of a request for which the model has computed NaN or infinity: no token can be chosen from these. The
    request's own tokens can be the cause, so it is not tried on another worker.
    """
    return LockstepError(ErrorCode.NUMERICAL_ERROR, f"the model's {what} are no numbers (NaN or infinity)")
