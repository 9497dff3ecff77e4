"""One of two ranks of the exact mode, in a process of its own: the GPU kernels in Triton's interpreter, and ranks
that meet over gloo and add up as those on GPUs do.
"""

import random

import numpy as np
import ordered
import pytest
import torch
import torch.distributed as dist
from lockstep_engine import distributed
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import TorchDistributed, init_torch_distributed
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights

SIZE = 2
CONTEXT = 32
TOKENS = 19
"""Of the text; it enters a second block."""


class ExactRank:
    """A rank's part of a model, and a cache of two sequences."""

    def __init__(self, path, group):
        info = inspect_model(EngineConfig(model=path, tp=SIZE))
        self._group = group
        self._model = build_model(info, group, torch.float32)
        self._model.exact = True
        load_weights(self._model.module, info, torch.device("cpu"))
        self.fused = self._model.fuse_on_gpu(CONTEXT)
        self._cache = KvCache(
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            blocks=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def logits(self, *parts):
        """Logits of all tokens of a step; each part is of a sequence: its number, the first position, the ids."""
        numbers, starts, ids = zip(*parts, strict=True)
        tables = np.array([[2 * number, 2 * number + 1] for number in numbers], np.int32)
        layout = StepLayout(np.array(starts, np.int32), np.array([len(each) for each in ids], np.int32), tables)
        flat = torch.tensor([token for each in ids for token in each])
        attention = TritonAttention(self._cache, layout, exact=True)
        with torch.inference_mode():
            return self._group.all_gather(self._model.logits(flat, attention, torch.arange(len(flat))))


def compute(rank, store, path, seed):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ordered.install(monkeypatch)
        sums = []
        sum_in_order = distributed.sum_in_order
        monkeypatch.setattr(distributed, "sum_in_order", lambda parts: sums.append(len(parts)) or sum_in_order(parts))
        init_torch_distributed("gloo", store, rank, SIZE, 60)
        group = TorchDistributed(rank, SIZE, lambda: None, deterministic=True, on_gpu=True)
        served = ExactRank(path, group)
        assert served.fused
        compare(served, random.Random(seed))
        assert set(sums) == {SIZE}
        dist.destroy_process_group()


def compare(served, rng):
    """Both ranks have the same random numbers, so that they compute the same steps."""
    text = [rng.randrange(2, 300) for _ in range(TOKENS)]
    expected = served.logits((0, 0, text)).clone()

    cut = rng.randrange(1, TOKENS - 1)
    chunks = [served.logits((0, begin, text[begin:end])).clone() for begin, end in ((0, cut), (cut, TOKENS))]
    assert torch.equal(torch.cat(chunks), expected), cut

    # A stream that is continued: what was there is one chunk, the rest comes token by token, beside another's prompt.
    resumed = rng.randrange(TOKENS - 3, TOKENS - 1)
    assert torch.equal(served.logits((0, 0, text[:resumed])), expected[:resumed]), resumed
    for position in range(resumed, TOKENS):
        other = [rng.randrange(2, 300) for _ in range(rng.randrange(1, 5))]
        logits = served.logits((1, 0, other), (0, position, text[position : position + 1]))
        assert torch.equal(logits[-1], expected[position]), (resumed, position)
