"""Decides what runs in a step. One rule: every sequence has `computed` tokens and a step spends one token budget
letting sequences catch up with their tokens. Chunked prefill, prefix hits, preemption and resumed streams are this
one rule.

It owns the sequences, the block pool and the slots; it knows nothing of processes, tensors or time.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.blocks import BlockPool
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.draws import uniform
from lockstep_engine.plan import Plan, Result, SlotSampling, StepLogprobs
from lockstep_engine.request import Logprobs, Output, Request, TokenLogprob
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


class _Share(NamedTuple):
    """A sequence's part of a step."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool


class Scheduler:
    """Waiting and running sequences, and the pool of blocks they live in."""

    def __init__(self, limits: Limits, eos_ids: Iterable[int], total_blocks: int) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self.pool = BlockPool(total_blocks)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self._tables = np.full((limits.max_seqs, -(-limits.context_length // BLOCK_SIZE)), -1, dtype=np.int32)
        self._added: list[Sequence] = []
        self._in_step: list[_Share] = []
        self._arrivals = 0
        self._step = 0

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
        needed = -(
            -min(len(request.prompt_ids) + request.sampling.max_tokens, self._limits.context_length) // BLOCK_SIZE
        )
        if needed > self.pool.total:
            raise LockstepError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"prompt and max_tokens need {needed} blocks of KV cache, this engine has {self.pool.total}",
                field="max_tokens",
            )
        if len(self._waiting) >= self._limits.max_queue:
            raise LockstepError(
                ErrorCode.OVERLOADED, f"the queue of {self._limits.max_queue} requests is full", retry_after_s=1.0
            )
        self._arrivals += 1
        self._by_id[request.id] = sequence
        self._enqueue(sequence)
        return None

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its blocks. False if it is not (or no longer) known."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to do. The step before it must have been `update`d."""
        shares: list[_Share] = []
        budget = self._limits.max_batch_tokens
        preempted = False
        for sequence in sorted(self._running, key=lambda each: each.rank_order):
            if budget == 0:
                break
            if sequence.slot < 0:  # preempted below, on behalf of a more important one
                continue
            count = min(sequence.remaining, budget)
            kept, gave_way = self._make_room(sequence, sequence.computed + count)
            preempted |= gave_way
            if kept:
                shares.append(self._share(sequence, count))
                budget -= count
        if not preempted:
            self._admit(shares, budget)
        if not shares:
            return None
        self._step += 1
        self._in_step = shares
        return self._plan(shares)

    def update(self, result: Result) -> list[Output]:
        """Take in what the ranks answered to the last plan."""
        outputs: list[Output] = []
        sampled = 0
        for share in self._in_step:
            index = sampled
            sampled += share.samples
            sequence = share.sequence
            if sequence.slot < 0:  # cancelled while the step ran
                continue
            sequence.computed += share.tokens
            self._remember_blocks(sequence, share.start // BLOCK_SIZE)
            if share.samples:
                outputs.append(self._emit(sequence, result.token_ids[index], result.logprobs[index]))
        self._in_step = []
        return outputs

    def reset(self, total_blocks: int) -> None:
        """The ranks and their KV are gone: start with an empty pool. All requests must have been cancelled."""
        assert not self._by_id
        self.pool = BlockPool(total_blocks)
        self._in_step = []
        self._added = []

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda each: each.rank_order)

    def _admit(self, shares: list[_Share], budget: int) -> None:
        """Start waiting sequences while budget, slots and blocks last."""
        in_flight = self._digests_in_flight()
        for sequence in list(self._waiting):
            if budget == 0 or not self._free_slots:
                return
            keys = sequence.known_keys(sequence.request.tenant) if self._limits.prefix_cache else []
            # The last token is always computed: its logits choose the next one.
            keys = keys[: (len(sequence.tokens) - 1) // BLOCK_SIZE]
            hits = self.pool.match(keys)
            if len(hits) < len(keys) and keys[len(hits)].digest in in_flight:
                continue  # another sequence computes this prefix right now; its blocks will be shared
            needed = sequence.blocks_for(len(sequence.tokens) + 1) - len(hits)
            if needed + sum(self.pool.is_idle(block) for block in hits) > self.pool.free:
                return  # no overtaking: a large request would wait for ever
            self._start(sequence, hits)
            in_flight.update(key.digest for key in keys[len(hits) :])
            count = min(sequence.remaining, budget)
            self._grow(sequence, sequence.computed + count)
            shares.append(self._share(sequence, count))
            budget -= count

    def _digests_in_flight(self) -> set[bytes]:
        return {
            key.digest
            for sequence in self._running
            if sequence.remaining > 1
            for key in sequence.keys[sequence.computed // BLOCK_SIZE :]
        }

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        for block in hits:
            self.pool.share(block)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._added.append(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.computed = len(hits) * BLOCK_SIZE
        sequence.blocks = list(hits)
        self._tables[sequence.slot, : len(hits)] = hits
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt_ids))

    def _share(self, sequence: Sequence, count: int) -> _Share:
        return _Share(sequence, sequence.computed, count, samples=count == sequence.remaining)

    def _make_room(self, sequence: Sequence, tokens: int) -> tuple[bool, bool]:
        """Get blocks for the first `tokens` tokens, preempting the least important sequences if it must be.

        Returns:
            Whether the sequence can run, and whether any sequence was preempted.
        """
        preempted = False
        while sequence.blocks_for(tokens) > self.pool.free:
            victim = max(self._running, key=lambda each: each.rank_order)
            preempted = True
            self._preempt(victim)
            if victim is sequence:
                return False, True
        self._grow(sequence, tokens)
        return True, preempted

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        for _ in range(sequence.blocks_for(tokens)):
            block = self.pool.allocate()
            self._tables[sequence.slot, len(sequence.blocks)] = block
            sequence.blocks.append(block)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks away; the sequence waits and is recomputed from its tokens. It is never in the step already:
        the more important sequences come first, and the victim is the least important.
        """
        self._leave_slot(sequence)
        sequence.computed = 0
        self._enqueue(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._tables[sequence.slot] = -1
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

    def _remember_blocks(self, sequence: Sequence, first: int) -> None:
        """Make the blocks from `first` on that are full now known to the prefix cache."""
        full = sequence.computed // BLOCK_SIZE
        if self._limits.prefix_cache and full > first:
            keys = sequence.known_keys(sequence.request.tenant)
            for index in range(first, full):
                self.pool.remember(sequence.blocks[index], keys[index])

    def _emit(self, sequence: Sequence, token: int, logprobs: StepLogprobs | None) -> Output:
        position = sequence.emitted
        sequence.tokens.append(token)
        reason = sequence.finish_reason(self._eos_ids, self._limits.context_length)
        cached = 0 if sequence.reported else sequence.cached_tokens or 0
        sequence.reported = True
        if reason is not None:
            self._remove(sequence)
        return Output(
            sequence.request.id,
            position,
            (token,),
            logprobs=() if logprobs is None else (_logprobs(token, logprobs),),
            finish=reason,
            cached_tokens=cached,
        )

    def _plan(self, shares: list[_Share]) -> Plan:
        # Plain arrays: for a few dozen numbers each numpy call costs more than the numbers.
        sequences = [share.sequence for share in shares]
        slots = [sequence.slot for sequence in sequences]
        emitted = [sequence.emitted for sequence in sequences]
        width = max(len(sequence.blocks) for sequence in sequences)
        tokens = _INT32()
        uniforms = array("d")
        for share, position in zip(shares, emitted, strict=True):
            tokens.extend(share.sequence.tokens[share.start : share.start + share.tokens])
            if share.samples:
                sampling = share.sequence.request.sampling
                uniforms.append(uniform(sampling.seed, position) if sampling.temperature else 0.0)
        added, self._added = self._added, []
        return Plan(
            step=self._step,
            token_ids=tokens.tobytes(),
            starts=_INT32([share.start for share in shares]).tobytes(),
            lengths=_INT32([share.tokens for share in shares]).tobytes(),
            slots=_INT32(slots).tobytes(),
            samples=_INT32([share.samples for share in shares]).tobytes(),
            emitted=_INT32(emitted).tobytes(),
            uniforms=uniforms.tobytes(),
            tables=self._tables[slots, :width].tobytes(),
            table_width=width,
            added=[self._slot_sampling(sequence) for sequence in added],
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


def _logprobs(token: int, entry: StepLogprobs) -> Logprobs:
    top = tuple(TokenLogprob(id_, value) for id_, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
    return Logprobs(TokenLogprob(token, entry.chosen), top)
