"""Ranks without a model: their KV cache holds the tokens, and the next token is a function of what they read there.

What a request gets is known beforehand, from its prompt and seed alone. If a plan leads a sequence to a wrong block, to
one that another has overwritten, or leaves a token out, what it reads is not its text and its tokens differ.
"""

import random
import struct
import zlib
from collections import deque

import numpy as np
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.draws import uniform
from lockstep_engine.plan import LAST_SAMPLED, PoolSizes, Result, StepLogprobs, decode_plan, encode_plan
from lockstep_engine.request import Request, SamplingParams
from lockstep_engine.scheduler import Limits, Scheduler

VOCAB = 1000
EOS = 999
_NEVER = -7  # in the cache where nothing was written


def next_token(context, number):
    """A token below EOS - 10, from all tokens before it and the uniform number of its position."""
    data = np.asarray(context, dtype=np.int32).tobytes() + struct.pack("<d", number)
    return zlib.crc32(data) % (EOS - 10)


def prompt_score(tokens):
    """Stands for the log probability of the last token after those before it."""
    return -float(next_token(tokens, 0.5))


def expected_ids(prompt, count, *, seed=0, emitted=()):
    """What a request gets that nothing ends before `count` tokens."""
    context = [*prompt, *emitted]
    for position in range(len(emitted), count):
        context.append(next_token(context, uniform(seed, position)))
    return context[len(prompt) :]


class ScriptedRanks:
    """Executes plans, and checks what every plan must fulfil."""

    def __init__(self, sizes, rule, max_batch_tokens, max_scores):
        # Ids of cold blocks follow those of hot ones, with one between them.
        self._cache = np.full((sizes.hot + 1 + sizes.cold, BLOCK_SIZE), _NEVER, dtype=np.int64)
        self._first_cold = sizes.hot + 1
        self._rule = rule
        self.compressed = []
        """The texts of the blocks that were made cold."""
        self._budget = max_batch_tokens
        self._max_scores = max_scores
        self._names = {}  # slot -> number of its request
        self._step = 0
        self._last = {}  # slot -> the token that its occupant got last
        self.ahead = 0
        """Tokens that were computed before the driver knew them."""
        self.started = 0
        """How often a slot got a new occupant."""
        self.scripts = {}
        """Number of a request -> its output, instead of `next_token`'s."""
        self.trace = []
        """One a step: number of a request -> (start, count) of what was computed."""

    def execute(self, plan):
        plan = decode_plan(encode_plan(plan))
        assert plan.step == self._step + 1
        self._step = plan.step
        starts, lengths, slots, samples, emitted = (
            np.frombuffer(data, dtype=np.int32)
            for data in (plan.starts, plan.lengths, plan.slots, plan.samples, plan.emitted)
        )
        tokens = np.frombuffer(plan.token_ids, dtype=np.int32).copy()
        tables = np.frombuffer(plan.tables, dtype=np.int32).reshape(len(slots), plan.table_width)
        uniforms = iter(np.frombuffer(plan.uniforms))
        assert 0 < len(tokens) == lengths.sum() <= self._budget
        assert lengths.min() > 0
        assert len(set(slots.tolist())) == len(slots)
        hot_tables = np.frombuffer(plan.hot_tables or plan.tables, dtype=np.int32).reshape(tables.shape)
        used = -(-(starts + lengths) // BLOCK_SIZE)
        assert ((tables >= 0) == (np.arange(plan.table_width) < used[:, None])).all()
        self.started += len(plan.added)
        for entry in plan.added:
            (self._names[entry.slot],) = entry.logit_bias
            self._last.pop(entry.slot, None)
        self._put_last(tokens, lengths, slots)
        self._write(tokens, starts, lengths, hot_tables)
        self._compress(plan.moves)
        self._check_versions(starts, lengths, tables, hot_tables, both=bool(plan.hot_tables))
        ids = []
        for row, slot in enumerate(slots.tolist()):
            if samples[row]:
                context = self._read(tables[row], int(starts[row] + lengths[row]))
                script = self.scripts.get(self._names[slot])
                token = next_token(context, next(uniforms))
                ids.append(token if script is None else script[emitted[row]])
                self._last[slot] = ids[-1]
        assert next(uniforms, None) is None
        scores = self._score(plan, starts, lengths, tables)
        self._compress(plan.late_moves)
        names = [self._names[slot] for slot in slots.tolist()]
        self.trace.append(dict(zip(names, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True)))
        return Result(
            plan.step, ids, [StepLogprobs(-float(id_), [id_], [-float(id_)]) for id_ in ids], 10, 0, [], *scores
        )

    def _put_last(self, tokens, lengths, slots):
        """In place of what the driver did not know, and nowhere else than at a sequence's end."""
        ends = np.cumsum(lengths) - 1
        assert set(np.flatnonzero(tokens == LAST_SAMPLED)) <= set(ends.tolist())
        for end, slot in zip(ends.tolist(), slots.tolist(), strict=True):
            if tokens[end] == LAST_SAMPLED:
                tokens[end] = self._last[slot]
                self.ahead += 1

    def _score(self, plan, starts, lengths, tables):
        targets = np.frombuffer(plan.targets, dtype=np.int32)
        if not len(targets):
            return ()
        places = [
            (table, position)
            for start, length, table in zip(starts.tolist(), lengths.tolist(), tables, strict=True)
            for position in range(start, start + length)
        ]
        assert len(targets) == len(places)
        scores = np.array(
            [
                prompt_score([*self._read(table, position + 1), target])
                for (table, position), target in zip(places, targets.tolist(), strict=True)
                if target >= 0
            ],
            dtype=np.float32,
        )
        assert 0 < len(scores) <= self._max_scores
        ranks = (-scores).astype(np.int32)
        return scores.tobytes(), ranks.tobytes(), np.repeat(scores, 3).tobytes() if plan.whole else b""

    def _compress(self, moves):
        for hot, cold in np.frombuffer(moves, dtype=np.int32).reshape(-1, 2).tolist():
            assert 0 <= hot < self._first_cold - 1
            assert (self._cache[hot] != _NEVER).all(), "compresses what is not full"
            self._cache[self._first_cold + cold] = self._cache[hot]
            self.compressed.append(tuple(self._cache[hot].tolist()))

    def _check_versions(self, starts, lengths, tables, hot_tables, *, both):
        """Every query finds each block in the version that its position says, and the same text in it."""
        seen_both = False
        for start, length, table, hot_table in zip(starts.tolist(), lengths.tolist(), tables, hot_tables, strict=True):
            last = (start + length - 1) // BLOCK_SIZE
            for query_block in range(start // BLOCK_SIZE, last + 1):
                seen = np.arange(query_block + 1)
                cold = np.zeros(len(seen), dtype=bool)
                if self._rule is not None:
                    cold[self._rule.sink : self._rule.first_hot(query_block)] = True
                ids, last_ids = np.where(cold, table[seen], hot_table[seen]), table[seen]
                assert ((ids >= self._first_cold) == cold).all(), "a block in the wrong version"
                assert (self._cache[ids] == self._cache[last_ids]).all(), "two versions, two texts"
                seen_both |= bool((ids != last_ids).any())
        assert seen_both == both, "two tables exactly when they are needed"

    def _write(self, tokens, starts, lengths, tables):
        written = set()
        offset = 0
        for start, length, table in zip(starts.tolist(), lengths.tolist(), tables, strict=True):
            for position in range(start, start + length):
                block, at = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert 0 <= block < self._first_cold - 1
                assert (block, at) not in written, "two sequences write to one place"
                written.add((block, at))
                if at == 0:
                    self._cache[block] = _NEVER
                self._cache[block, at] = tokens[offset]
                offset += 1

    def _read(self, table, length):
        blocks = table[: -(-length // BLOCK_SIZE)]
        assert blocks.min() >= 0
        context = self._cache[blocks].reshape(-1)[:length]
        assert (context != _NEVER).all(), "reads a place that was never written"
        return context


class Server:
    """A scheduler and its ranks. Requests are known by numbers, counted from 0. `depth`: plans in flight at most."""

    def __init__(self, *, blocks=64, cold_blocks=0, depth=1, **limits):
        defaults = {
            "max_seqs": 4,
            "max_batch_tokens": 64,
            "max_queue": 100,
            "context_length": 512,
            "prefix_cache": True,
        }
        self.limits = Limits(**{**defaults, **limits})
        sizes = PoolSizes(blocks, cold_blocks)
        self.scheduler = Scheduler(self.limits, [EOS], sizes)
        self.ranks = ScriptedRanks(sizes, self.limits.hot_window, self.limits.max_batch_tokens, self.limits.max_seqs)
        self._depth = depth
        self._results = deque()
        self.outputs = []
        """One list a request."""
        self._requests = []

    @property
    def pool(self):
        return self.scheduler.blocks

    def submit(self, prompt, *, emitted=(), priority=0, tenant="", script=None, max_tokens=8, **sampling):
        """Queue a request; returns its number."""
        number = len(self._requests)
        params = SamplingParams(max_tokens=max_tokens, logit_bias={number: 0.0}, **sampling)
        request = Request(str(number), tuple(prompt), params, tuple(emitted), priority, tenant)
        if script is not None:
            self.ranks.scripts[number] = script
        only = self.scheduler.submit(request)
        self._requests.append(request)
        self.outputs.append([] if only is None else [only])
        return number

    def cancel(self, number):
        return self.scheduler.cancel(str(number))

    def step(self):
        """One step, planned when those after which it may be are; False when there is nothing to do."""
        self.plan()
        if not self._results:
            return False
        self.finish(self._results.popleft())
        return True

    def plan(self):
        """Have as many steps in flight as may be."""
        while len(self._results) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._results.append(self.ranks.execute(plan))
            self.pool.check()

    def finish(self, result):
        """Second half of a step whose plan was executed by the caller."""
        for output in self.scheduler.update(result):
            self.outputs[int(output.request_id)].append(output)
        self.pool.check()

    def run(self, most=10_000):
        """Steps until there is nothing to do; returns how many."""
        for count in range(most):
            if not self.step():
                return count
        raise AssertionError(f"not done after {most} steps")

    def ids(self, number):
        """All ids given to a request; every position came exactly once and in order, and nothing after the end."""
        request = self._requests[number]
        given = []
        for output in self.outputs[number]:
            assert output.error is None
            assert output.position == len(request.emitted_ids) + len(given)
            given.extend(output.ids)
        assert all(output.finish is None for output in self.outputs[number][:-1])
        return given

    def expected(self, number):
        """What an unscripted request gets if nothing ends it early."""
        request = self._requests[number]
        ids = expected_ids(
            request.prompt_ids, request.sampling.max_tokens, seed=request.sampling.seed, emitted=request.emitted_ids
        )
        return ids[len(request.emitted_ids) :]

    def finish_reason(self, number):
        return self.outputs[number][-1].finish if self.outputs[number] else None

    def computed(self, number):
        """(start, count) of a request, one a step in which it ran."""
        return [step[number] for step in self.ranks.trace if number in step]

    def restarts(self):
        """How often a preempted sequence was started again."""
        return self.ranks.started - len({number for step in self.ranks.trace for number in step})

    def assert_idle(self):
        assert not self._results
        self.pool.check()
        assert self.pool.free == self.pool.total
        assert self.scheduler.queued == self.scheduler.running == 0
        assert self.scheduler.request_ids == []
        assert self.scheduler.schedule() is None


def words(count, seed):
    """A prompt of random ids."""
    return random.Random(seed).choices(range(EOS - 10), k=count)
