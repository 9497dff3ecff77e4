"""An engine in this process: the real scheduler, model, cache and sampler, without ranks around them."""

import itertools
from collections import deque

import numpy as np
import torch
from in_process import InProcessGroup
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.limits import Limits
from lockstep_engine.plan import LAST_SAMPLED, Result, decode_plan, encode_plan
from lockstep_engine.request import Request
from lockstep_engine.sampling import Sampler
from lockstep_engine.scheduler import Scheduler

DEFAULTS = {"max_seqs": 8, "max_batch_tokens": 128, "max_queue": 100, "context_length": 512, "prefix_cache": True}


class InProcessModel:
    """A checkpoint, loaded once for many engines."""

    def __init__(self, path):
        self.model = InProcessGroup(path, 1).models[0]


class InProcessEngine:
    """Runs requests to their end. `hot` and `cold`: blocks of the pools; `depth`: most plans in flight; `hot_layers`:
    as for `KvCache`.
    """

    def __init__(self, loaded, *, hot=128, cold=128, compressed_layers=None, depth=1, hot_layers=(), **limits):
        self._depth = depth
        self.limits = Limits(**{**DEFAULTS, **limits})
        self._model = loaded.model
        hot_window = self.limits.hot_window
        self.cache = KvCache(
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            blocks=hot,
            dtype=torch.float32,
            device=torch.device("cpu"),
            cold_blocks=cold if hot_window is not None else 0,
            hot_window=None if self.limits.copies else hot_window,
            compressed_layers=compressed_layers,
            hot_layers=hot_layers,
        )
        self.scheduler = Scheduler(self.limits, [], PoolSizes(hot, cold if hot_window is not None else 0))
        self._sampler = Sampler(self.limits.max_seqs, self._model.vocab_size, torch.device("cpu"))
        self._numbers = itertools.count()
        self.steps = 0
        self.logprobs = []
        """Of the last run."""

    def run(self, *requests):
        """Outputs of requests, each (prompt, emitted ids, sampling), that run together. One list of ids for each."""
        ids = {}
        self.logprobs = []
        for prompt, emitted, params in requests:
            name = str(next(self._numbers))
            ids[name] = []
            self.scheduler.submit(Request(name, tuple(prompt), params, tuple(emitted)))
        results = deque()
        while True:
            while len(results) < self._depth and (plan := self.scheduler.schedule()) is not None:
                self.steps += 1
                results.append(self._execute(decode_plan(encode_plan(plan))))
            if not results:
                break
            for output in self.scheduler.update(results.popleft()):
                ids[output.request_id] += output.ids
                self.logprobs += output.logprobs
        blocks = self.scheduler.blocks
        blocks.check()
        assert blocks.free == blocks.total
        return list(ids.values())

    def ids(self, prompt, params, emitted=()):
        """The ids of one request."""
        return self.run((prompt, emitted, params))[0]

    @torch.inference_mode()
    def _execute(self, plan):
        sampled = plan.samples.nonzero()[0]
        for entry in plan.added:
            self._sampler.add(entry)
        layout = StepLayout(plan.starts, plan.lengths, plan.tables, plan.hot_tables, plan.moves)
        attention = step_attention(self.cache, layout, deterministic=True)
        ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        unknown = (ids == LAST_SAMPLED).nonzero().squeeze(1)
        ids[unknown] = self._sampler.last(
            torch.from_numpy(np.repeat(plan.sampling_rows, plan.lengths)[unknown.numpy()].astype(np.int64))
        )
        logits = self._model.logits(
            ids,
            attention,
            torch.from_numpy((np.cumsum(plan.lengths) - 1)[sampled]),
        )
        chosen = self._sampler.sample(logits, plan.sampling_rows[sampled], plan.emitted[sampled], plan.uniforms)
        if len(plan.late_moves):
            self.cache.compress(plan.late_moves)
        return Result(plan.step, *chosen.read(), 0, 0)
