"""Ranks without a model: their KV cache holds the tokens, and the next token is a function of what they read there. The
output of a request follows from its prompt and seed. If a plan leads a sequence to a wrong block, to an overwritten
one, or leaves a token out, the sequence reads another text and its tokens differ.
"""

import random
import struct
import zlib
from collections import deque

import numpy as np
import torch
from lockstep_engine.blocks import HostSizes, PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.draws import uniform
from lockstep_engine.limits import Limits
from lockstep_engine.plan import LAST_SAMPLED, Result, StepLogprobs, decode_plan, encode_plan
from lockstep_engine.pooling import Pooler
from lockstep_engine.request import FinishReason, Request, SamplingParams
from lockstep_engine.scheduler import Scheduler

VOCAB = 1000
EOS = 999
_NEVER = -7  # in the cache where nothing was written


def next_token(context, number):
    """A token below EOS - 10, from all tokens before it and the uniform number of its position."""
    data = np.asarray(context, dtype=np.int32).tobytes() + struct.pack("<d", number)
    return zlib.crc32(data) % (EOS - 10)


def prompt_score(tokens):
    """In place of the log probability of the last token given those before it."""
    return -float(next_token(tokens, 0.5))


def expected_ids(prompt, count, *, seed=0, emitted=(), window=None):
    """The output of a request that nothing ends before `count` tokens, by a model that sees a window of tokens."""
    context = [*prompt, *emitted]
    for position in range(len(emitted), count):
        seen = context if window is None else context[-window.tokens :]
        context.append(next_token(seen, uniform(seed, position)))
    return context[len(prompt) :]


class ScriptedRanks:
    """Executes plans, and checks the rules that every plan must follow."""

    def __init__(
        self, sizes, hot_window, max_batch_tokens, max_scores, *, mean_pooling=False, window=None, copies=False
    ):
        # Ids of cold blocks follow those of hot ones, with one between them.
        self._cache = np.full((sizes.hot + 1 + sizes.cold, BLOCK_SIZE), _NEVER, dtype=np.int64)
        self._first_cold = sizes.hot + 1
        self.host = HostSlots(sizes.host, self._first_cold)
        self._hot_window = hot_window
        self._window = window
        self._copies = copies
        self.compressed = []
        """The texts of the blocks that were made cold."""
        self._budget = max_batch_tokens
        self._max_scores = max_scores
        self._names = {}  # sampling row -> number of its request
        self._step = 0
        self._last = {}  # sampling row -> the token that its request got last
        self.ahead = 0
        """Tokens that were computed before the driver knew them."""
        self.started = 0
        """How often a sampling row got a new request."""
        self.scripts = {}
        """Number of a request -> its output, instead of `next_token`'s."""
        self.pooler = Pooler(mean=mean_pooling, size=2)
        self.trace = []
        """One a step: number of a request -> (start, count) of what was computed."""

    def execute(self, plan):
        plan = decode_plan(encode_plan(plan))
        assert plan.step == self._step + 1
        self._step = plan.step
        if not len(plan.lengths):
            self.host.copy(self._cache, plan.spills, plan.loads)
            return Result(plan.step, [], [], 10, 0)
        starts, lengths, tables = plan.starts, plan.lengths, plan.tables
        rows, emitted = plan.sampling_rows, plan.emitted
        tokens = plan.token_ids.copy()
        uniforms = iter(plan.uniforms)
        assert 0 < len(tokens) == lengths.sum() <= self._budget
        assert lengths.min() > 0
        assert len(set(rows.tolist())) == len(rows)
        hot_tables = tables if plan.hot_tables is None else plan.hot_tables
        used = -(-(starts + lengths) // BLOCK_SIZE)
        columns = np.arange(tables.shape[1])
        seen = np.array([self._first_seen(start) for start in starts.tolist()])
        assert ((tables >= 0) <= (columns < used[:, None])).all()
        assert ((tables >= 0) >= ((columns < used[:, None]) & (columns >= seen[:, None]))).all()
        # What was dropped when a sequence entered its block.
        gone = np.array([self._first_seen(start // BLOCK_SIZE * BLOCK_SIZE) for start in starts.tolist()])
        assert (tables[columns < gone[:, None]] == -1).all()
        self.started += len(plan.added)
        for entry in plan.added:
            (self._names[entry.sampling_row],) = entry.logit_bias
            self._last.pop(entry.sampling_row, None)
        self._put_last(tokens, lengths, rows)
        self.host.copy(self._cache, plan.spills, plan.loads)
        self._write(tokens, starts, lengths, hot_tables)
        self._compress(plan.moves)
        self._check_versions(starts, lengths, tables, hot_tables, both=plan.hot_tables is not None)
        ids = []
        for index, row in enumerate(rows.tolist()):
            if plan.samples[index]:
                context = self._read(tables[index], int(starts[index] + lengths[index]))
                script = self.scripts.get(self._names[row])
                token = next_token(context, next(uniforms))
                ids.append(token if script is None else script[emitted[index]])
                self._last[row] = ids[-1]
        assert next(uniforms, None) is None
        scores = self._score(plan, starts, lengths, tables)
        self._compress(plan.late_moves)
        names = [self._names[row] for row in rows.tolist()]
        self.trace.append(dict(zip(names, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True)))
        embeddings = self._embed(plan, tokens, starts, lengths, tables)
        result = Result(
            plan.step, ids, [StepLogprobs(-float(id_), [id_], [-float(id_)]) for id_ in ids], 10, 0, [], *scores
        )
        result.embeddings = embeddings
        return result

    def _put_last(self, tokens, lengths, rows):
        """Replace LAST_SAMPLED, which may only stand at the end of a sequence."""
        ends = np.cumsum(lengths) - 1
        assert set(np.flatnonzero(tokens == LAST_SAMPLED)) <= set(ends.tolist())
        for end, row in zip(ends.tolist(), rows.tolist(), strict=True):
            if tokens[end] == LAST_SAMPLED:
                tokens[end] = self._last[row]
                self.ahead += 1

    def _embed(self, plan, tokens, starts, lengths, tables):
        """Embeddings of the texts that are complete; what they are made of is what the cache has."""
        if plan.pools is None:
            return None
        assert plan.pools.any()
        assert not (plan.completes & ~plan.pools).any()
        assert not (plan.samples & plan.pools).any()
        for start, length, table, pools in zip(starts.tolist(), lengths.tolist(), tables, plan.pools, strict=True):
            if pools:
                self._read(table, start + length)
        rows = self.pooler.rows(plan)
        states = np.stack([tokens[rows] + 1.0, np.ones(len(rows))], axis=1)
        return self.pooler.fetch(plan, torch.from_numpy(states)).read()

    def _score(self, plan, starts, lengths, tables):
        targets = plan.targets
        if targets is None:
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
        return scores, ranks, np.repeat(scores, 3).reshape(-1, 3) if plan.vocabulary_logprobs else None

    def _compress(self, moves):
        for hot, cold in moves.tolist():
            assert 0 <= hot < self._first_cold - 1
            assert (self._cache[hot] != _NEVER).all(), "compresses what is not full"
            self._cache[self._first_cold + cold] = self._cache[hot]
            self.compressed.append(tuple(self._cache[hot].tolist()))

    def _check_versions(self, starts, lengths, tables, hot_tables, *, both):
        """Every query finds each block in the version that its position demands, with the same text."""
        if self._copies:
            self._check_copies(starts, lengths, tables, both=both)
            return
        seen_both = False
        for start, length, table, hot_table in zip(starts.tolist(), lengths.tolist(), tables, hot_tables, strict=True):
            last = (start + length - 1) // BLOCK_SIZE
            for query_block in range(start // BLOCK_SIZE, last + 1):
                seen = np.arange(self._first_seen(max(start, query_block * BLOCK_SIZE)), query_block + 1)
                cold = np.zeros(len(seen), dtype=bool)
                if self._hot_window is not None:
                    cold = (seen >= self._hot_window.sink) & (seen < self._hot_window.first_hot(query_block))
                ids, last_ids = np.where(cold, table[seen], hot_table[seen]), table[seen]
                assert ((ids >= self._first_cold) == cold).all(), "a block in the wrong version"
                assert (self._cache[ids] == self._cache[last_ids]).all(), "two versions, two texts"
                seen_both |= bool((ids != last_ids).any())
        assert seen_both == both, "two tables exactly when they are needed"

    def _check_copies(self, starts, lengths, tables, *, both):
        """Every query finds the blocks of its window hot; what lies before that of the first one is a copy."""
        assert not both, "a second table, though either version will do"
        for start, length, table in zip(starts.tolist(), lengths.tolist(), tables, strict=True):
            first, last = self._hot_window.first_hot(start // BLOCK_SIZE), (start + length - 1) // BLOCK_SIZE
            assert ((table[: last + 1] >= self._first_cold) == (np.arange(last + 1) < first)).all()

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
        first = self._first_seen(length - 1)
        blocks = table[first : -(-length // BLOCK_SIZE)]
        assert blocks.min() >= 0
        context = self._cache[blocks].reshape(-1)[: length - first * BLOCK_SIZE]
        if self._window is not None:
            context = context[-self._window.tokens :]
        assert (context != _NEVER).all(), "reads a place that was never written"
        return context

    def _first_seen(self, position):
        return 0 if self._window is None else self._window.first_seen(position)


class HostSlots:
    """The tier in host memory: each slot has a part of a text and the version of the block that it came from."""

    def __init__(self, sizes, first_cold):
        self._sizes = sizes
        self._first_cold = first_cold
        self._slots = {}
        self.copied = {"in": 0, "out": 0}
        """Blocks."""
        self.most = {"in": 0, "out": 0}
        """Slots of one step."""

    def copy(self, cache, spills, loads):
        spilled = self._places(spills, "out")
        assert len({slot for _, slots in spilled for slot in slots}) == sum(len(slots) for _, slots in spilled)
        for block, slots in spilled:
            assert (cache[block] != _NEVER).all(), "copies what is not full"
            for part, slot in enumerate(slots):
                assert 0 <= slot < self._sizes.slots
                self._slots[slot] = (block >= self._first_cold, part, tuple(cache[block].tolist()))
        for block, slots in self._places(loads, "in"):
            contents = [self._slots[slot] for slot in slots]  # of slots that have been written
            text = contents[0][2]
            assert contents == [(block >= self._first_cold, part, text) for part in range(len(slots))]
            cache[block] = text

    def _places(self, copies, way):
        if copies is None:
            return []
        rows = [(block, [slot for slot in slots if slot >= 0]) for block, *slots in copies.tolist()]
        assert len({block for block, _ in rows}) == len(rows) > 0
        for block, slots in rows:
            assert len(slots) == (1 if block >= self._first_cold else self._sizes.hot_slots)
        self.copied[way] += len(rows)
        self.most[way] = max(self.most[way], sum(len(slots) for _, slots in rows))
        return rows


class Server:
    """A scheduler and its ranks. Requests have numbers from 0. `depth`: most plans in flight."""

    def __init__(self, *, blocks=64, cold_blocks=0, host=None, depth=1, shares_slots=False, **limits):
        defaults = {
            "max_seqs": 4,
            "max_batch_tokens": 64,
            "max_queue": 100,
            "context_length": 512,
            "prefix_cache": True,
        }
        self.limits = Limits(**{**defaults, **limits})
        sizes = PoolSizes(blocks, cold_blocks, host or HostSizes())
        self.scheduler = Scheduler(self.limits, [EOS], sizes, shares_slots=shares_slots)
        self.ranks = ScriptedRanks(
            sizes,
            self.limits.hot_window,
            self.limits.max_batch_tokens,
            self.limits.max_seqs,
            mean_pooling=self.limits.mean_pooling,
            window=self.limits.window,
            copies=self.limits.copies,
        )
        self._depth = depth
        self._results = deque()
        self.outputs = []
        """One list a request."""
        self.requests = []
        """All that were submitted."""

    @property
    def pool(self):
        return self.scheduler.blocks

    def submit(
        self,
        prompt,
        *,
        emitted=(),
        priority=0,
        tenant="",
        script=None,
        max_tokens=8,
        arrived_at=0.0,
        constraint=None,
        **sampling,
    ):
        """Queue a request; returns its number."""
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, logit_bias={number: 0.0}, **sampling)
        request = Request(str(number), tuple(prompt), params, tuple(emitted), priority, tenant)
        if script is not None:
            self.ranks.scripts[number] = script
        only = self.scheduler.submit(request, arrived_at, constraint)
        self.requests.append(request)
        self.outputs.append([] if only is None else [only])
        return number

    def embed(self, prompt, **fields):
        """Queue a request for an embedding; returns its number."""
        number = len(self.requests)
        request = Request(str(number), tuple(prompt), SamplingParams(logit_bias={number: 0.0}), embeds=True, **fields)
        assert self.scheduler.submit(request) is None
        self.requests.append(request)
        self.outputs.append([])
        return number

    def embedding(self, number):
        """The embedding of a request: its only output."""
        (output,) = self.outputs[number]
        assert (output.position, output.ids, output.finish) == (0, (), FinishReason.STOP)
        return output.embedding.tolist()

    def cancel(self, number):
        return self.scheduler.cancel(str(number))

    def step(self):
        """Plan as far ahead as allowed and finish one step; False if there is nothing to do."""
        self.plan()
        if not self._results:
            return False
        self.finish(self._results.popleft())
        return True

    def plan(self):
        """Plan until as many steps are in flight as allowed."""
        while len(self._results) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._results.append(self.ranks.execute(plan))
            self.pool.check()

    def finish(self, result):
        """Process the result of a plan that the caller has executed."""
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
        """All ids emitted for a request: every position once, in order, and none after the end."""
        request = self.requests[number]
        given = []
        for output in self.outputs[number]:
            assert output.error is None
            assert output.position == len(request.emitted_ids) + len(given)
            given.extend(output.ids)
        assert all(output.finish is None for output in self.outputs[number][:-1])
        return given

    def expected(self, number):
        """The expected output of an unscripted request that nothing ends early."""
        request = self.requests[number]
        ids = expected_ids(
            request.prompt_ids,
            request.sampling.max_tokens,
            seed=request.sampling.seed,
            emitted=request.emitted_ids,
            window=self.limits.window,
        )
        return ids[len(request.emitted_ids) :]

    def finish_reason(self, number):
        return self.outputs[number][-1].finish if self.outputs[number] else None

    def computed(self, number):
        """(start, count) of a request for each step in which it ran."""
        return [step[number] for step in self.ranks.trace if number in step]

    def restarts(self):
        """How often a preempted sequence was started again."""
        return self.ranks.started - len({number for step in self.ranks.trace for number in step})

    def assert_idle(self):
        assert not self._results
        self.pool.check()
        assert self.pool.free == self.pool.total
        sequences = self.scheduler.sequences
        assert sequences.waiting == sequences.running == []
        assert sequences.by_id == {}
        assert self.scheduler.schedule() is None


def words(count, seed):
    """A prompt of random ids."""
    return random.Random(seed).choices(range(EOS - 10), k=count)
