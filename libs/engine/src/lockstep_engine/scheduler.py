"""Decides what runs in a step. One rule: every sequence has `computed` tokens and a step spends one token budget
letting sequences catch up with their tokens. Chunked prefill, prefix hits, preemption and resumed streams are this
one rule.

Plans may be made ahead of the results of those before them: ranks execute them in order, so that all of a plan counts
as done once it is made, but for the tokens that it samples. A sequence whose last token is in flight goes on with
"the token that was sampled for its slot", and only the ranks know which that is.

It owns the sequences, their blocks and the slots; it knows nothing of processes, tensors or time.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.block_tables import BlockTables, Needs
from lockstep_engine.blocks import BlockKey
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.draws import uniform
from lockstep_engine.plan import LAST_SAMPLED, Plan, PoolSizes, Result, SlotSampling, StepLogprobs
from lockstep_engine.request import Logprobs, Output, PromptLogprobs, PromptScores, Request, TokenLogprob
from lockstep_engine.sequence import Sequence

_INT32 = partial(array, "i")


@dataclass(frozen=True)
class Limits:
    """What the scheduler may use."""

    max_seqs: int
    max_batch_tokens: int
    max_queue: int
    context_length: int
    prefix_cache: bool
    hot_window: HotWindow | None = None
    tenant_share: float = 1.0


class _Share(NamedTuple):
    """A sequence's part of a step."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool
    slot: int
    scored: range
    """Prompt positions whose log probabilities the step gives."""


class Scheduler:
    """Waiting and running sequences, and the blocks they live in."""

    def __init__(self, limits: Limits, eos_ids: Iterable[int], sizes: PoolSizes) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self.blocks = self._new_blocks(sizes)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[str] = []
        self._free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self._added: list[Sequence] = []
        self._in_flight: deque[list[_Share]] = deque()
        self._updated = 0
        """Plans whose results have been taken in."""
        self._turn: Sequence | None = None
        """The one that `schedule` was last busy with."""
        self._arrivals = 0

    @property
    def queued(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def request_ids(self) -> list[str]:
        """All requests that are not finished."""
        return list(self._by_id)

    def submit(self, request: Request) -> Output | None:
        """Queue a request.

        Returns:
            The only output of a request whose emitted ids are complete already, else None.

        Raises:
            LockstepError: OVERLOADED when the queue is full, RESOURCE_EXHAUSTED when the request can never fit.
        """
        if request.id in self._by_id:
            raise LockstepError(ErrorCode.INVALID_REQUEST, f"request id {request.id} is in use", field="id")
        sequence = Sequence(request, self._arrivals)
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length) if request.emitted_ids else None
        if reason is not None:
            return Output(request.id, sequence.emitted, (), finish=reason)
        self._refuse_the_impossible(request)
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
        """Forget a request and free its blocks. False if it is not (or no longer) known."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to do before the results of the steps in flight.

        Raises:
            MemoryError: the books are half written; `shed` is the way on.
        """
        self._turn = None
        shares: list[_Share] = []
        budget = self._limits.max_batch_tokens
        preempted = False
        for sequence in sorted(self._running, key=lambda each: each.rank_order):
            if budget == 0:
                break
            if sequence.slot < 0:  # preempted below, on behalf of a more important one
                continue
            self._turn = sequence
            count = self._count(sequence, budget, shares)
            if count == 0:
                continue
            count, gave_way = self._make_room(sequence, count)
            preempted |= gave_way
            if count:
                shares.append(self._share(sequence, count))
                budget -= count
        if not preempted:
            self._admit(shares, budget)
        if not shares:
            return None
        self._turn = shares[-1].sequence
        plan = self._plan(shares)
        self._in_flight.append(shares)
        for share in shares:
            sequence = share.sequence
            sequence.computed += share.tokens
            sequence.in_flight += share.samples
            if sequence.computed // BLOCK_SIZE > share.start // BLOCK_SIZE:
                self.blocks.commit(sequence, share.start, self._keys(sequence))
        return plan

    def update(self, result: Result) -> list[Output]:
        """Take in what the ranks answered to the first of the plans in flight."""
        outputs: list[Output] = []
        sampled = scored = 0
        shares = self._in_flight.popleft()
        self._updated += 1
        for share in shares:
            index, first_score = sampled, scored
            sampled += share.samples
            scored += len(share.scored)
            sequence = share.sequence
            if self._by_id.get(sequence.request.id) is not sequence:  # cancelled, or it ended with the step before
                continue
            if share.slot in result.unserved:
                outputs.append(Output(sequence.request.id, sequence.emitted, (), error=no_memory()))
                self._ended.append(sequence.request.id)
                self._remove(sequence)
                continue
            scores = _prompt_logprobs(share, result, first_score)
            sequence.told = max(sequence.told, share.scored.stop)
            if share.samples:
                outputs.append(self._emit(sequence, result.token_ids[index], result.logprobs[index], scores))
            elif scores is not None:
                outputs.append(Output(sequence.request.id, sequence.emitted, (), prompt_logprobs=scores))
        return outputs

    def shed(self, seen: int) -> list[Output]:
        """There was no memory to make or to send a plan: end the request whose turn it was. The others are computed
        again, in empty pools: of what the plan wrote down nothing is trusted.

        Args:
            seen: plans in flight that the ranks have seen. They go on with these; their results are still taken in.

        Returns:
            The last output of the one that ends. It can be continued elsewhere.
        """
        while len(self._in_flight) > seen:
            self._in_flight.pop()
        live = self._by_id.values()
        ends = next(
            (each for each in live if each is self._turn), max(live, key=lambda each: each.arrival, default=None)
        )
        if ends is not None:
            del self._by_id[ends.request.id]
        self._start_over(PoolSizes(self.blocks.hot.total, self.blocks.cold.total))
        return [] if ends is None else [Output(ends.request.id, ends.emitted, (), error=no_memory())]

    def delivered(self) -> None:
        """What the last `update` returned has been handed on."""
        self._ended = []

    def clear(self) -> list[str]:
        """Forget all requests, and the pools, whatever state the books are in.

        Returns:
            Their ids, and those of requests whose ends have not been `delivered`.
        """
        ids = [*self.request_ids, *self._ended]
        self._by_id, self._ended = {}, []
        self._in_flight.clear()
        self._start_over(PoolSizes(0))
        return ids

    def reset(self, sizes: PoolSizes) -> None:
        """The ranks and their KV are gone: start with empty pools. There must be no requests."""
        assert not self._by_id
        self._in_flight.clear()
        self._updated = 0
        self._start_over(sizes)

    def _start_over(self, sizes: PoolSizes) -> None:
        """Empty pools; all requests wait, as they are when the plans in flight are done."""
        self.blocks = self._new_blocks(PoolSizes(0))  # the old ones are gone before there are new ones
        self.blocks = self._new_blocks(sizes)
        for sequence in self._by_id.values():
            sequence.slot, sequence.computed, sequence.in_flight = -1, 0, 0
            sequence.hot, sequence.cold = [], []
            sequence.scored = sequence.told
        self._waiting = sorted(self._by_id.values(), key=lambda each: each.rank_order)
        self._running, self._added = [], []
        self._free_slots = list(range(self._limits.max_seqs - 1, -1, -1))
        for share in chain.from_iterable(self._in_flight):
            share.sequence.in_flight += share.samples
            share.sequence.scored = max(share.sequence.scored, share.scored.stop)

    def _new_blocks(self, sizes: PoolSizes) -> BlockTables:
        limits = self._limits
        return BlockTables(sizes, limits.hot_window, limits.max_seqs, limits.context_length, limits.tenant_share)

    def _refuse_the_impossible(self, request: Request) -> None:
        tokens = min(len(request.prompt_ids) + request.sampling.max_tokens, self._limits.context_length)
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
        self._waiting.sort(key=lambda each: each.rank_order)

    def _admit(self, shares: list[_Share], budget: int) -> None:
        """Start waiting sequences while budget, slots and blocks last."""
        computing = self._digests_being_computed()
        for sequence in list(self._waiting):
            if budget == 0 or not self._free_slots:
                return
            if sequence.in_flight:  # it has given way, and what it is to be computed from comes with the next result
                return
            self._turn = sequence
            if self._count(sequence, budget, shares) == 0:
                return
            cached = self._limits.prefix_cache and not sequence.scores_prompt
            # The last token is always computed: its logits choose the next one.
            keys = self._keys(sequence)[: (len(sequence.tokens) - 1) // BLOCK_SIZE] if cached else []
            hits = self.blocks.match(keys)
            if hits.usable < len(keys) and keys[hits.usable].digest in computing:
                continue  # another sequence computes this prefix right now; its blocks will be shared
            takes = self.blocks.admits(sequence, keys, hits)
            if not takes.fit(self.blocks.room(sequence.request.tenant)):
                if takes.fit(self.blocks.room_of_all):
                    continue  # its tenant has all that it may have; others need not wait for that
                return  # no overtaking: a large request would wait for ever
            self._start(sequence)
            self.blocks.start(sequence, keys, hits)
            sequence.computed = hits.usable * BLOCK_SIZE
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt_ids))
            computing.update(key.digest for key in keys[hits.usable :])
            count = self.blocks.fitting(sequence, self._count(sequence, budget, shares))
            self.blocks.grow(sequence, count)
            shares.append(self._share(sequence, count))
            budget -= count

    def _digests_being_computed(self) -> set[bytes]:
        return {
            key.digest
            for sequence in self._running
            if sequence.remaining > 1
            for key in sequence.keys[sequence.computed // BLOCK_SIZE :]
        }

    def _start(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._added.append(sequence)
        sequence.slot = self._free_slots.pop()

    def _count(self, sequence: Sequence, budget: int, shares: list[_Share]) -> int:
        """Tokens that a sequence gets of a step: what it lacks, as far as the budget goes, and none when it only waits
        for its last token. No more of them are scored in a step than could be sampled, because that is what there is
        memory for.
        """
        if sequence.is_full(self._limits.context_length):
            return 0
        count = min(sequence.remaining, budget)
        if not sequence.scores_prompt:
            return count
        return min(count, self._limits.max_seqs - sum(len(share.scored) for share in shares))

    def _share(self, sequence: Sequence, count: int) -> _Share:
        return _Share(
            sequence,
            sequence.computed,
            count,
            samples=count == sequence.remaining,
            slot=sequence.slot,
            scored=sequence.take_unscored(sequence.computed + count),
        )

    def _make_room(self, sequence: Sequence, count: int) -> tuple[int, bool]:
        """Get blocks for the next `count` tokens, or for fewer, preempting the least important sequences if it must be.

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
            # Who has used up its share gives way to itself.
            own = takes.fit(self.blocks.room_of_all)
            rivals = [each for each in self._running if not own or each.request.tenant == tenant]
            victim = max(rivals, key=lambda each: each.rank_order)
            preempted = True
            self._preempt(victim)
            if victim is sequence:
                return 0, True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks away; the sequence waits and is recomputed from its tokens. It is never in the step already:
        the more important sequences come first, and the victim is the least important.
        """
        self._leave_slot(sequence)
        sequence.computed = 0
        self._enqueue(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        self.blocks.leave(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self._running.remove(sequence)
        self._added = [each for each in self._added if each is not sequence]

    def _remove(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            self._waiting.remove(sequence)
        del self._by_id[sequence.request.id]

    def _keys(self, sequence: Sequence) -> list[BlockKey]:
        """Of all its full blocks; none without a prefix cache."""
        return sequence.known_keys(sequence.request.tenant) if self._limits.prefix_cache else []

    def _emit(
        self, sequence: Sequence, token: int, logprobs: StepLogprobs | None, scores: PromptLogprobs | None
    ) -> Output:
        position = sequence.emitted
        sequence.tokens.append(token)
        sequence.in_flight -= 1
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length)
        cached = 0 if sequence.reported else sequence.cached_tokens or 0
        sequence.reported = True
        if reason is not None:
            self._ended.append(sequence.request.id)
            self._remove(sequence)
        elif sequence.computed >= len(sequence.tokens) and len(sequence.tokens) % BLOCK_SIZE == 0:
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

    def _plan(self, shares: list[_Share]) -> Plan:
        # Plain arrays: for a few dozen numbers each numpy call costs more than the numbers.
        sequences = [share.sequence for share in shares]
        slots = [sequence.slot for sequence in sequences]
        emitted = [sequence.emitted + sequence.in_flight for sequence in sequences]
        width = max(len(sequence.hot) for sequence in sequences)
        tables = self.blocks.rows(slots, width)
        hot_tables = self.blocks.take_hot_rows(slots, tables)
        moves, late_moves = self.blocks.take_moves()
        tokens = _INT32()
        uniforms = array("d")
        for share, position in zip(shares, emitted, strict=True):
            known = share.sequence.tokens[share.start : share.start + share.tokens]
            tokens.extend(known)
            if len(known) < share.tokens:
                tokens.append(LAST_SAMPLED)
            if share.samples:
                sampling = share.sequence.request.sampling
                uniforms.append(uniform(sampling.seed, position) if sampling.temperature else 0.0)
        added, self._added = self._added, []
        return Plan(
            step=self._updated + len(self._in_flight) + 1,
            token_ids=tokens.tobytes(),
            starts=_INT32([share.start for share in shares]).tobytes(),
            lengths=_INT32([share.tokens for share in shares]).tobytes(),
            slots=_INT32(slots).tobytes(),
            samples=_INT32([share.samples for share in shares]).tobytes(),
            emitted=_INT32(emitted).tobytes(),
            uniforms=uniforms.tobytes(),
            tables=tables.tobytes(),
            table_width=width,
            added=[self._slot_sampling(sequence) for sequence in added],
            targets=_targets(shares),
            whole=any(
                share.scored and share.sequence.request.sampling.prompt_scores is PromptScores.VOCABULARY
                for share in shares
            ),
            hot_tables=b"" if hot_tables is None else hot_tables.tobytes(),
            moves=_INT32(moves).tobytes(),
            late_moves=_INT32(late_moves).tobytes(),
        )

    def _slot_sampling(self, sequence: Sequence) -> SlotSampling:
        sampling = sequence.request.sampling
        penalised = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0, 0)
        past = list(sequence.tokens[len(sequence.request.prompt_ids) :])
        forbidden = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)]
        return SlotSampling(
            slot=sequence.slot,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            prompt_ids=list(sequence.request.prompt_ids) if penalised else [],
            emitted_ids=past if penalised else [],
            forbidden_ids=forbidden if sampling.min_tokens else [],
            min_tokens=sampling.min_tokens,
        )


def no_memory() -> LockstepError:
    """What a request is told that there was no memory to go on with, here and now."""
    return LockstepError(ErrorCode.OVERLOADED, "the worker has no memory for this request now", retry_after_s=1.0)


def _targets(shares: list[_Share]) -> bytes:
    """For each token of the step the id that follows it if that is to be scored, else -1."""
    if not any(share.scored for share in shares):
        return b""
    targets = _INT32()
    for share in shares:
        row = _INT32([-1]) * share.tokens
        for position in share.scored:
            row[position - 1 - share.start] = share.sequence.tokens[position]
        targets.extend(row)
    return targets.tobytes()


def _prompt_logprobs(share: _Share, result: Result, first: int) -> PromptLogprobs | None:
    """A share's part of the result's scores, which begins with score `first`."""
    if not share.scored:
        return None
    part = slice(first, first + len(share.scored))
    tokens = np.frombuffer(result.target_logprobs, dtype=np.float32)
    whole = share.sequence.request.sampling.prompt_scores is PromptScores.VOCABULARY
    return PromptLogprobs(
        share.scored.start,
        tokens[part],
        np.frombuffer(result.target_ranks, dtype=np.int32)[part],
        np.frombuffer(result.distributions, dtype=np.float32).reshape(len(tokens), -1)[part] if whole else None,
    )


def _logprobs(token: int, entry: StepLogprobs) -> Logprobs:
    top = tuple(TokenLogprob(id_, value) for id_, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
    return Logprobs(TokenLogprob(token, entry.chosen), top)
