"""Decides what runs in a step.

There is one rule: a sequence has tokens, and a count of how many of them have KV; a step spends a budget of tokens on
raising that count. Chunked prefill, prefix hits, preemption and resumed streams all follow from it.

A plan may be made before the results of earlier plans are known. Ranks execute plans in order, so everything in a plan
counts as done once it is made, except for the tokens that it samples. A sequence whose last token is still in flight is
planned with the placeholder LAST_SAMPLED; the ranks replace it by the token that they sampled last for its row. A
sequence with a grammar is not: which tokens it may choose next depends on that token.

This module owns the sequences, their blocks and the sampling rows. It knows nothing of processes, tensors or time.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from numpy.typing import NDArray

from lockstep_engine.block_tables import BlockTables
from lockstep_engine.blocks import BlockKey, Needs, PoolSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.constraint import Constraint
from lockstep_engine.draws import uniform
from lockstep_engine.matches import Hits, Match
from lockstep_engine.plan import LAST_SAMPLED, NO_TOKEN, Plan, Result, RowSampling, StepLogprobs, nothing
from lockstep_engine.prefix_log import PrefixChanges, PrefixLog
from lockstep_engine.request import (
    FinishReason,
    Logprobs,
    Output,
    Phase,
    PhaseChange,
    PromptLogprobs,
    PromptScores,
    Request,
    TokenLogprob,
)
from lockstep_engine.sequence import Sequence
from lockstep_engine.shared_slots import SharedSlots


@dataclass(frozen=True)
class Limits:
    """Limits of what the scheduler runs and queues."""

    max_seqs: int
    max_batch_tokens: int
    max_queue: int
    context_length: int
    prefix_cache: bool
    hot_window: HotWindow | None = None
    tenant_share: float = 1.0
    mean_pooling: bool = False
    """Embeddings are made of all hidden states of a text, those of cached prefixes included."""


class _Chunk(NamedTuple):
    """The tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool
    sampling_row: int
    scored: range
    """Prompt positions whose log probabilities this step computes."""
    completes: bool
    """It is the last part of a text whose embedding is wanted."""


class Scheduler:
    """Waiting and running sequences, and the blocks of the KV cache."""

    def __init__(self, limits: Limits, eos_ids: Iterable[int], sizes: PoolSizes, *, shares_slots: bool = False) -> None:
        self._limits = limits
        self.slots = SharedSlots() if shares_slots else None
        """Slots of host memory that the driver itself uses, in this epoch."""
        self.on_end: Callable[[Sequence], None] = lambda _: None
        """Called when a request that holds blocks ends, before they are released. Not if it is cancelled before its
        first output: only that tells whether what it computed are numbers, and nobody else is to get damaged blocks."""
        self._eos_ids = frozenset(eos_ids)
        self._prefix_logs = (PrefixLog(), PrefixLog())
        self.blocks = self._new_blocks(sizes)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[str] = []
        self._free_rows = list(range(limits.max_seqs - 1, -1, -1))
        self._added: list[Sequence] = []
        self._in_flight: deque[list[_Chunk]] = deque()
        self._updated = 0
        """Plans whose results `update` has processed."""
        self._current: Sequence | None = None
        """The request being scheduled: `shed` ends it if memory runs out."""
        self._arrivals = 0
        self.preemptions = 0
        """Running requests that had to wait again, since the start."""
        self.prompt_tokens = 0
        """Tokens of the prompts of all requests that have begun to run."""
        self.cached_tokens = 0
        """Those of them that were in the prefix cache."""
        self._phases: dict[str, Phase] = {}
        """Changes that `take_phases` has not returned yet."""

    @property
    def queued(self) -> int:
        """Number of waiting requests: no sampling row is free for them, or too few blocks are."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._running)

    @property
    def free_seqs(self) -> int:
        """Number of requests that have a sampling row free; 0 if others wait already."""
        if any(not sequence.is_held for sequence in self._waiting):
            return 0
        return max(0, len(self._free_rows) - len(self._waiting))

    @property
    def request_ids(self) -> list[str]:
        """All requests that are not finished."""
        return list(self._by_id)

    @property
    def unended_ids(self) -> list[str]:
        """All requests whose last output has not been `delivered`."""
        return [*self.request_ids, *self._ended]

    @property
    def constrained(self) -> bool:
        """Whether a running sequence has a grammar."""
        return any(sequence.constraint is not None for sequence in self._running)

    @property
    def unconstrained(self) -> bool:
        """Whether any request has no grammar."""
        return any(sequence.constraint is None for sequence in self._by_id.values())

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
        if request.id in self._by_id:
            raise invalid("id", f"{request.id} is in use")
        sequence = Sequence(request, self._arrivals, arrived_at, constraint)
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length) if request.emitted_ids else None
        if reason is not None:
            return Output(request.id, sequence.emitted, (), finish=reason)
        self._check_capacity(request)
        if len(self._waiting) >= self._limits.max_queue:
            raise LockstepError(
                ErrorCode.OVERLOADED, f"the queue of {self._limits.max_queue} requests is full", retry_after_s=1.0
            )
        self._arrivals += 1
        try:
            self._by_id[request.id] = sequence
            self._enqueue(sequence)
        except MemoryError:
            self._by_id.pop(request.id, None)
            self._waiting = [each for each in self._waiting if each is not sequence]
            raise
        return None

    def cancel(self, request_id: str) -> bool:
        """Remove a request and free its blocks. False if the id is unknown."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> Plan | None:
        """The next step. None if nothing can run before a result of a step in flight has come.

        Raises:
            MemoryError: the scheduler's state is inconsistent; call `shed`.
        """
        chunks = self._choose()
        # While nothing waits but for loads from host memory, they delay nobody else. A sequence whose loads are done
        # may still lack room, which one that is loading has: each round ends the loads of at least one more.
        while not chunks and not self._in_flight and self.blocks.hurry(self._running):
            chunks = self._choose()
        if not chunks:
            return self._copies()
        self._current = chunks[-1].sequence
        plan = self._plan(chunks)
        self._in_flight.append(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.tokens
            sequence.in_flight += chunk.samples
            if sequence.computed // BLOCK_SIZE > chunk.start // BLOCK_SIZE:
                self.blocks.commit(sequence, chunk.start, self._keys(sequence))
        return plan

    def _choose(self) -> list[_Chunk]:
        """What the next step computes; each of its sequences has the blocks for it."""
        self._current = None
        chunks: list[_Chunk] = []
        budget = self._limits.max_batch_tokens
        preempted = False
        # A prompt, also that of an important sequence, leaves room in the step for those that decode.
        decoding = sum(sequence.remaining == 1 for sequence in self._running)
        for sequence in sorted(self._running, key=lambda each: each.precedence):
            if budget == 0:
                break
            decodes = sequence.remaining == 1
            decoding -= decodes
            if sequence.sampling_row < 0:  # preempted in this loop, for a more important one
                continue
            if self.blocks.is_loading(sequence):
                continue
            self._current = sequence
            count = self._count(sequence, budget if decodes else max(1, budget - decoding), chunks)
            if count == 0:
                continue
            count, has_preempted = self._make_room(sequence, count)
            preempted |= has_preempted
            if count:
                chunks.append(self._chunk(sequence, count))
                budget -= count
        if not preempted:
            self._admit(chunks, budget)
        return chunks

    def update(self, result: Result) -> list[Output]:
        """Process the result of the oldest plan in flight."""
        outputs: list[Output] = []
        sampled = scored = embedded = 0
        chunks = self._in_flight.popleft()
        self._updated += 1
        if self.slots is not None:
            self.slots.executed()
        for chunk in chunks:
            index, first_score, embedding = sampled, scored, embedded
            sampled += chunk.samples
            scored += len(chunk.scored)
            embedded += chunk.completes
            sequence = chunk.sequence
            if self._by_id.get(sequence.request.id) is not sequence:  # cancelled, or ended by the step before this one
                continue
            if chunk.sampling_row in result.unserved:
                outputs.append(Output(sequence.request.id, sequence.emitted, (), error=no_memory()))
                self._ended.append(sequence.request.id)
                self._remove(sequence)
                continue
            scores = _prompt_logprobs(chunk, result, first_score)
            if (chunk.samples and result.token_ids[index] == NO_TOKEN) or (scores is not None and scores.has_nan):
                self._ended.append(sequence.request.id)
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
                self._phases[sequence.request.id] = Phase.RUNNING
            if scores is not None:
                outputs.append(Output(sequence.request.id, sequence.emitted, (), prompt_logprobs=scores))
        return outputs

    def take_phases(self) -> list[PhaseChange]:
        """Changes since the last call: requests that began to run or were preempted, and those of whose prompts a step
        has computed a part.
        """
        phases, self._phases = self._phases, {}
        return [PhaseChange(request_id, phase) for request_id, phase in phases.items() if request_id in self._by_id]

    def note_prefixes(self, *, wanted: bool) -> None:
        """Begin or stop to note what the prefix cache gains and loses."""
        for log in self._prefix_logs:
            log.turn(on=wanted)

    def take_prefix_changes(self) -> PrefixChanges:
        """What the prefix cache has gained and lost since the last call, while that is noted."""
        return self.blocks.take_changes()

    def newest_prefixes(self, limit: int) -> list[int]:
        """Keys of blocks that the prefix cache has, those that are kept longest first."""
        return self.blocks.newest(self._running, limit)

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
        live = self._by_id.values()
        ended = next(
            (each for each in live if each is self._current), max(live, key=lambda each: each.arrival, default=None)
        )
        if ended is not None:
            del self._by_id[ended.request.id]
        if self.slots is not None:
            self.slots.forget(seen)
        self._start_over(self.blocks.sizes)
        return [] if ended is None else [Output(ended.request.id, ended.emitted, (), error=no_memory())]

    def end_broken(self) -> list[Output]:
        """End the requests whose constraint has failed; their last outputs."""
        broken = [each for each in self._by_id.values() if each.constraint is not None and each.constraint.error]
        for sequence in broken:
            self._remove(sequence)
        return [
            Output(each.request.id, each.emitted, (), error=each.constraint.error)
            for each in broken
            if each.constraint is not None
        ]

    def delivered(self) -> None:
        """The outputs of the last `update` have reached the caller."""
        self._ended = []

    def clear(self) -> None:
        """Remove all requests and the pools. Works in any state, consistent or not."""
        self._by_id, self._ended, self._phases = {}, [], {}
        self._in_flight.clear()
        self._forget_slots()
        self._start_over(PoolSizes(0))

    def reset(self, sizes: PoolSizes) -> None:
        """Start with empty pools, for new ranks. There must be no requests."""
        assert not self._by_id
        self._in_flight.clear()
        self._updated = 0
        self._forget_slots()
        self._start_over(sizes)

    def prefix_keys(self, request_id: str) -> list[BlockKey]:
        """Keys of the blocks of a waiting request that it need not compute if the prefix cache has them."""
        sequence = self._by_id.get(request_id)
        return [] if sequence is None or sequence.sampling_row >= 0 else self._cacheable_keys(sequence)

    def hold(self, request_id: str, *, held: bool) -> None:
        """Keep a request waiting while others go on, or admit it again. Unknown ids are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            sequence.is_held = held

    def running_sequences(self) -> list[Sequence]:
        """Those that hold blocks."""
        return list(self._running)

    @property
    def backlog(self) -> int:
        """Tokens of prompts that are to be computed for requests that came first."""
        sequences = (*self._running, *(each for each in self._waiting if not each.is_held))
        return sum(each.remaining for each in sequences if each.remaining > 1)

    def _forget_slots(self) -> None:
        """The ranks that have the slots are gone."""
        if self.slots is not None:
            self.slots = SharedSlots()

    def _start_over(self, sizes: PoolSizes) -> None:
        """Empty the pools and let all requests wait, in the state that they have once the plans in flight are done."""
        self.blocks = self._new_blocks(PoolSizes(0))  # frees the old pools before the new ones are allocated
        self.blocks = self._new_blocks(sizes)
        for sequence in self._by_id.values():
            if sequence.sampling_row >= 0:
                self._phases[sequence.request.id] = Phase.WAITING
            sequence.sampling_row, sequence.computed, sequence.in_flight = -1, 0, 0
            sequence.hot, sequence.cold = [], []
            sequence.score_from = sequence.scores_delivered
        self._waiting = sorted(self._by_id.values(), key=lambda each: each.precedence)
        self._running, self._added = [], []
        self._free_rows = list(range(self._limits.max_seqs - 1, -1, -1))
        for chunk in chain.from_iterable(self._in_flight):
            chunk.sequence.in_flight += chunk.samples
            chunk.sequence.score_from = max(chunk.sequence.score_from, chunk.scored.stop)

    def _new_blocks(self, sizes: PoolSizes) -> BlockTables:
        limits = self._limits
        for log in self._prefix_logs:
            log.lose()
        return BlockTables(
            sizes,
            limits.hot_window,
            limits.max_seqs,
            limits.context_length,
            limits.tenant_share,
            self._prefix_logs,
            self.slots,
        )

    def _check_capacity(self, request: Request) -> None:
        answer = 0 if request.embeds else request.sampling.max_tokens
        tokens = min(len(request.prompt_ids) + answer, self._limits.context_length)
        needs, blocks = self.blocks.needs(tokens), self.blocks
        total = Needs(blocks.hot.total, blocks.cold.total)
        for room, whose in ((total, "this engine has"), (blocks.budget, "one tenant may have")):
            if not needs.fit(room):
                raise LockstepError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"prompt and max_tokens need {needs} of KV cache, {whose} {room}",
                    field="max_tokens",
                )

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda each: each.precedence)

    def _admit(self, chunks: list[_Chunk], budget: int) -> None:
        """Start waiting sequences, in order, until budget, sampling rows or blocks are used up."""
        for sequence in list(self._waiting):
            if budget == 0 or not self._free_rows:
                return
            if sequence.in_flight:  # preempted while its last token was in flight; that comes with the next result
                return
            # Blocks are on their way to it; or it was preempted, and its grammar is not ready for its next token.
            if sequence.is_held or not sequence.may_sample:
                continue
            self._current = sequence
            if self._count(sequence, budget, chunks) == 0:
                return
            match = self.find_match(sequence)
            if self._is_being_computed(match):
                self.blocks.matches.remember(sequence.request.id, match)
                continue  # wait and share its blocks
            if not match.takes.fit(self.blocks.room(sequence.request.tenant)):
                self.blocks.matches.remember(sequence.request.id, match)
                if match.takes.fit(self.blocks.room_of_all):
                    continue  # its tenant is at its limit, which must not hold up other tenants
                return  # smaller requests do not overtake: a large one would never start
            self._start(sequence, match.keys, match.hits)
            if not self.blocks.is_loading(sequence):
                count = self.blocks.fitting(sequence, self._count(sequence, budget, chunks))
                self.blocks.grow(sequence, count)
                chunks.append(self._chunk(sequence, count))
                budget -= count

    def _cacheable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the blocks that it takes from the prefix cache if that has them."""
        if not self._limits.prefix_cache or self._needs_every_token(sequence):
            return []
        # The last token is always computed: its logits choose the next one.
        return self._keys(sequence)[: (len(sequence.tokens) - 1) // BLOCK_SIZE]

    def _needs_every_token(self, sequence: Sequence) -> bool:
        """Whether all tokens are computed, even if the prefix cache has their KV."""
        return sequence.scores_prompt or (sequence.request.embeds and self._limits.mean_pooling)

    def find_match(self, sequence: Sequence) -> Match:
        """What the prefix cache has for a waiting sequence."""
        known = self.blocks.matches.get(sequence.request.id, len(sequence.tokens))
        return self.blocks.look_up(sequence, self._cacheable_keys(sequence)) if known is None else known

    def _is_being_computed(self, match: Match) -> bool:
        """Whether a running sequence computes the first block that a match lacks."""
        index = match.hits.usable
        if index >= len(match.keys):
            return False
        digest = match.keys[index].digest  # of all tokens up to there, so no other block of a sequence has it
        return any(
            each.remaining > 1
            and each.computed // BLOCK_SIZE <= index < len(each.keys)
            and each.keys[index].digest == digest
            for each in self._running
        )

    def _start(self, sequence: Sequence, keys: list[BlockKey], hits: Hits) -> None:
        self._waiting.remove(sequence)
        self.blocks.matches.forget(sequence.request.id)
        self._running.append(sequence)
        self._added.append(sequence)
        sequence.sampling_row = self._free_rows.pop()
        self._phases[sequence.request.id] = Phase.RUNNING
        self.blocks.start(sequence, keys, hits)
        sequence.computed = hits.usable * BLOCK_SIZE
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt_ids))
            self.prompt_tokens += len(sequence.request.prompt_ids)
            self.cached_tokens += sequence.cached_tokens

    def _count(self, sequence: Sequence, budget: int, chunks: list[_Chunk]) -> int:
        """How many of a sequence's tokens this step computes: those without KV, within the budget; 0 if it only waits
        for its last token or for its grammar. A step scores at most `max_seqs` prompt tokens, because a result has room
        for no more.
        """
        if sequence.is_full(self._limits.context_length):
            return 0
        # Without a mask all its tokens are computed but the last one, whose logits choose the next token.
        count = min(sequence.remaining - (not sequence.may_sample), budget)
        if not sequence.scores_prompt:
            return count
        return min(count, self._limits.max_seqs - sum(len(chunk.scored) for chunk in chunks))

    def _chunk(self, sequence: Sequence, count: int) -> _Chunk:
        return _Chunk(
            sequence,
            sequence.computed,
            count,
            samples=count == sequence.remaining and not sequence.request.embeds,
            sampling_row=sequence.sampling_row,
            scored=sequence.take_unscored(sequence.computed + count),
            completes=count == sequence.remaining and sequence.request.embeds,
        )

    def _make_room(self, sequence: Sequence, count: int) -> tuple[int, bool]:
        """Get blocks for the next `count` tokens, or for fewer. Preempts the least important sequences if necessary.

        Returns:
            For how many tokens there are blocks now, and whether any sequence was preempted.
        """
        if self.blocks.has_all(sequence, count):
            return count, False
        tenant, wanted, preempted = sequence.request.tenant, count, False
        while True:
            count = self.blocks.fitting(sequence, wanted)
            takes = self.blocks.missing(sequence, count)
            if takes.fit(self.blocks.room(tenant)):
                self.blocks.grow(sequence, count)
                return count, preempted
            # A tenant at its limit preempts its own requests only.
            at_limit = takes.fit(self.blocks.room_of_all)
            candidates = [each for each in self._running if not at_limit or each.request.tenant == tenant]
            victim = max(candidates, key=lambda each: each.precedence)
            preempted = True
            self._preempt(victim)
            if victim is sequence:
                return 0, True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's blocks and let it wait; its tokens are computed again when it runs the next time. It is
        never part of the current step already: more important sequences are scheduled first, and the victim is the
        least important one.
        """
        self.preemptions += 1
        self._release_row(sequence)
        self._phases[sequence.request.id] = Phase.WAITING
        sequence.computed = 0
        self._enqueue(sequence)

    def _release_row(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self._free_rows.append(sequence.sampling_row)
        sequence.sampling_row = -1
        self._running.remove(sequence)
        self._added = [each for each in self._added if each is not sequence]

    def _remove(self, sequence: Sequence) -> None:
        if sequence.sampling_row >= 0:
            if sequence.has_output:
                self.on_end(sequence)
            self._release_row(sequence)
        else:
            self._waiting.remove(sequence)
            self.blocks.matches.forget(sequence.request.id)
        del self._by_id[sequence.request.id]

    def _keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of all its full blocks; none without a prefix cache."""
        return sequence.known_keys(sequence.request.tenant) if self._limits.prefix_cache else []

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
            self._ended.append(sequence.request.id)
            self._remove(sequence)
        else:
            if sequence.constraint is not None:
                sequence.constraint.advance(token)
            if sequence.computed >= len(sequence.tokens) and len(sequence.tokens) % BLOCK_SIZE == 0:
                self.blocks.remember(sequence, self._keys(sequence))
        return Output(
            sequence.request.id,
            position,
            (token,),
            logprobs=() if logprobs is None else (_logprobs(token, logprobs),),
            finish=reason,
            cached_tokens=cached,
            prompt_logprobs=scores,
        )

    def _finish_embedding(self, sequence: Sequence, embedding: NDArray[np.float32]) -> Output:
        request_id = sequence.request.id
        self._ended.append(request_id)
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
        """A step that computes nothing, if blocks are to be copied to where the driver reads them and no other step
        would do it.
        """
        if self.slots is None or self._in_flight or not self.blocks.host.has_spills:
            return None
        spills, loads = self.blocks.host.take()
        plan = nothing(self._updated + 1, spills, loads)
        self._in_flight.append([])
        return plan

    def _plan(self, chunks: list[_Chunk]) -> Plan:
        sequences = [chunk.sequence for chunk in chunks]
        rows = [sequence.sampling_row for sequence in sequences]
        emitted = [sequence.emitted + sequence.in_flight for sequence in sequences]
        tables = self.blocks.tables(rows, max(len(sequence.hot) for sequence in sequences))
        hot_tables = self.blocks.take_hot_tables(rows, tables)
        moves, late_moves = self.blocks.take_moves()
        spills, loads = self.blocks.host.take()
        embeds = any(sequence.request.embeds for sequence in sequences)
        token_ids = array("i")
        uniforms = []
        for chunk, position in zip(chunks, emitted, strict=True):
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.tokens]
            token_ids.extend(known)
            if len(known) < chunk.tokens:
                token_ids.append(LAST_SAMPLED)
            if chunk.samples:
                sampling = chunk.sequence.request.sampling
                uniforms.append(uniform(sampling.seed, position) if sampling.temperature else 0.0)
        added, self._added = self._added, []
        masked, masks = _masks(chunks)
        return Plan(
            step=self._updated + len(self._in_flight) + 1,
            token_ids=np.frombuffer(token_ids, dtype=np.int32),
            starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
            lengths=np.array([chunk.tokens for chunk in chunks], dtype=np.int32),
            sampling_rows=np.array(rows, dtype=np.int32),
            samples=np.array([chunk.samples for chunk in chunks], dtype=np.bool_),
            emitted=np.array(emitted, dtype=np.int32),
            uniforms=np.array(uniforms, dtype=np.float64),
            tables=tables,
            moves=moves,
            late_moves=late_moves,
            added=[self._row_sampling(sequence) for sequence in added],
            targets=_targets(chunks),
            vocabulary_logprobs=any(
                chunk.scored and chunk.sequence.request.sampling.prompt_scores is PromptScores.VOCABULARY
                for chunk in chunks
            ),
            hot_tables=hot_tables,
            pools=np.array([sequence.request.embeds for sequence in sequences], dtype=np.bool_) if embeds else None,
            completes=np.array([chunk.completes for chunk in chunks], dtype=np.bool_) if embeds else None,
            masked=masked,
            masks=masks,
            spills=spills,
            loads=loads,
        )

    def _row_sampling(self, sequence: Sequence) -> RowSampling:
        sampling = sequence.request.sampling
        penalized = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0, 0)
        past = list(sequence.tokens[len(sequence.request.prompt_ids) :])
        forbidden = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)]
        return RowSampling(
            sampling_row=sequence.sampling_row,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            prompt_ids=list(sequence.request.prompt_ids) if penalized else [],
            emitted_ids=past if penalized else [],
            # With a grammar its masks have regard to min_tokens, so that something is always left to choose.
            forbidden_ids=forbidden if sampling.min_tokens and sampling.grammar is None else [],
            min_tokens=sampling.min_tokens,
        )


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


def _masks(chunks: list[_Chunk]) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
    """`masked` and `masks` of a plan."""
    sampling = [chunk.sequence.constraint for chunk in chunks if chunk.samples]
    masks = {index: each.mask for index, each in enumerate(sampling) if each is not None and each.mask is not None}
    if not masks:
        return None, None
    return np.array(list(masks), dtype=np.int32), np.stack(list(masks.values()))


def _targets(chunks: list[_Chunk]) -> NDArray[np.int32] | None:
    """For each token of the step the id that follows it if that id is to be scored, else -1. None: no id is."""
    if not any(chunk.scored for chunk in chunks):
        return None
    targets = np.full(sum(chunk.tokens for chunk in chunks), -1, dtype=np.int32)
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk.tokens
        for position in chunk.scored:
            targets[begin + position - 1 - chunk.start] = chunk.sequence.tokens[position]
    return targets


def _prompt_logprobs(chunk: _Chunk, result: Result, first: int) -> PromptLogprobs | None:
    """A chunk's part of the result's scores, which begins with score `first`."""
    if not chunk.scored:
        return None
    assert result.target_logprobs is not None
    assert result.target_ranks is not None
    part = slice(first, first + len(chunk.scored))
    vocabulary = result.vocabulary_logprobs
    if chunk.sequence.request.sampling.prompt_scores is not PromptScores.VOCABULARY:
        vocabulary = None
    return PromptLogprobs(
        chunk.scored.start,
        result.target_logprobs[part],
        result.target_ranks[part],
        None if vocabulary is None else vocabulary[part],
    )


def _logprobs(token: int, entry: StepLogprobs) -> Logprobs:
    top = tuple(TokenLogprob(id_, value) for id_, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
    return Logprobs(TokenLogprob(token, entry.chosen), top)
