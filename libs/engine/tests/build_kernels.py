"""Builds the kernels for a GPU on paper, as steps would, and says what came of it: run by `test_triton_builds.py` in a
process of its own.

    python build_kernels.py 90 common|all
"""

import dataclasses
import json
import sys
from dataclasses import replace

import numpy as np
import torch
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import DecodeAttention, Rotation, TritonAttention
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import (
    triton_attention,
    triton_compress,
    triton_gate,
    triton_norm,
    triton_sampling,
    triton_store,
)
from lockstep_engine.kernels.triton_attention import Paged, Tiles
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.sampling_table import Kinds, RowChoices
from lockstep_engine.scoring import Scoring
from paper_gpu import PaperGpu

_VOCABULARY = 128256


class Kernels:
    """Calls each kernel with tensors of a shape; what they hold is not looked at."""

    def __init__(self, heads, kv_heads, dim, *, dtype=torch.bfloat16, hot_window=HotWindow(1, 4), blocks=9):  # noqa: B008
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.cache = KvCache(
            layers=1,
            kv_heads=kv_heads,
            head_dim=dim,
            blocks=blocks,
            dtype=dtype,
            device=torch.device("cpu"),
            cold_blocks=blocks if hot_window else 0,
            hot_window=hot_window,
        )

    def empty(self, *shape):
        return torch.empty(shape, dtype=self.dtype)

    def attend(self, *, queries=1, splits=1, **scoring):
        numbers = torch.zeros(4, dtype=torch.int32)
        tables = torch.zeros(4, 16, dtype=torch.int32)
        paged = Paged(tables, tables, numbers, numbers, numbers, self.cache.hot_window)
        merged = self.empty(64, self.heads + 2 * self.kv_heads, self.dim)[:, : self.heads].transpose(0, 1)
        out = self.empty(64, self.heads, self.dim)
        tiles = Tiles(numbers, numbers, queries, splits)
        triton_attention.attend(merged, self.cache.layer(0), paged, Scoring(1.0, **scoring), tiles, out)

    def prefill(self, **scoring):
        size = triton_attention.queries_a_tile(self.heads // self.kv_heads, self.dim, self.dtype)
        self.attend(queries=size, **scoring)

    def small_ones(self):
        width = self.heads * self.dim
        triton_norm.add_rms_norm(self.empty(4, width), None, self.empty(width), 1e-5)
        triton_norm.add_rms_norm(self.empty(4, width), self.empty(4, width), self.empty(width), 1e-5)
        triton_gate.silu_mul(self.empty(4, 4 * width))
        layer, cells = self.cache.layer(0), torch.zeros(4, dtype=torch.int64)
        keys = self.empty(4, self.kv_heads, self.dim).transpose(0, 1)
        triton_store.store(layer, keys, keys, cells)
        for norms in (None, (self.empty(self.dim), self.empty(self.dim))):
            qkv, angles = self.empty(4, (self.heads + 2 * self.kv_heads) * self.dim), self.empty(4, self.dim)
            triton_store.rotate_store(layer, qkv, angles, angles, cells, heads=self.heads, norms=norms)
        triton_compress.compress(self.cache.cold_layers(0), torch.zeros(4, 2, dtype=torch.int32))
        self.launch_sampling()

    def launch_sampling(self):
        """As a rank launches it at its start."""
        for drawn in {self.dtype, torch.float32}:
            triton_sampling.launch_all(_VOCABULARY, _VOCABULARY, self.dtype, drawn, torch.device("cpu"))

    def sample(self, count, kinds, *, changed=False):
        """As a step chooses the tokens of so many rows; `changed`: their logits."""
        given = self.empty(count, _VOCABULARY)
        logits = given.float() if changed else given
        numbers = torch.zeros(count, dtype=torch.float64) if kinds.draws else None
        choices = RowChoices(torch.zeros(count, 5, dtype=torch.float64), kinds)
        triton_sampling.choose(logits, given, choices, numbers, torch.zeros(count, dtype=torch.int64))

    def step(self, lengths, width):
        """A step as a rank runs it."""
        tables = np.zeros((len(lengths), width), np.int32)
        moves = np.zeros((len(lengths), 2), np.int32) if max(lengths) > 1 else None
        layout = StepLayout(np.zeros(len(lengths), np.int32), np.array(lengths, np.int32), tables, tables, moves)
        attention = TritonAttention(self.cache, layout)
        tokens = sum(lengths)
        parts = [self.empty(tokens, count, self.dim).transpose(0, 1) for count in (self.heads, *[self.kv_heads] * 2)]
        attention.attend(0, *parts, Scoring(1.0))

    def decode(self, size, width):
        """A step that is to be recorded."""
        positions, tables = torch.zeros(size, dtype=torch.int64), torch.zeros(size, width, dtype=torch.int32)
        qkv = self.empty(size, (self.heads + 2 * self.kv_heads) * self.dim)
        angles = self.empty(size, self.dim)
        rotation = Rotation(angles, angles, None, 0.0, self.heads)
        DecodeAttention(self.cache, positions, tables).attend_merged(0, qkv, rotation, scale=1.0, window=None)


def build_for_steps(gpu):
    """What a start builds, and how many more builds steps of all kinds need after it."""
    triton_attention.processors = lambda device: 132
    kernels = Kernels(32, 8, 128, blocks=77)
    for size in (1, 64):
        kernels.decode(size, 40)
    kernels.step([40, 1, 30], 5)
    kernels.step([1] * 200, 5)
    kernels.launch_sampling()
    ready = gpu.compiled
    for size in (2, 3, 8, 16, 33, 200, 512):
        kernels.decode(size, 40)
    for lengths, width in (([1], 1), ([2], 2), ([1] * 9, 16), ([17, 1, 1], 3), ([511], 64), ([100, 3, 1, 48], 17)):
        kernels.step(lengths, width)
    drawn = Kinds(draws=True)
    for kinds in (Kinds(), drawn, replace(drawn, top_k=True), replace(drawn, top_p=True), replace(drawn, min_p=True)):
        for count in (1, 16, 17):
            kernels.sample(count, kinds)
            kernels.sample(count, kinds, changed=True)
    other = Kernels(32, 8, 128, blocks=16)
    other.step([40, 1], 3)
    return {"ready": ready, "later": gpu.compiled - ready}


def main():
    gpu = PaperGpu(int(sys.argv[1])).install()
    report = {"steps": build_for_steps(gpu)}
    llama = Kernels(32, 8, 128)
    llama.small_ones()
    if sys.argv[2] == "all":
        for shape in ((32, 32, 128), (28, 4, 128), (8, 1, 256), (8, 2, 256), (32, 8, 80), (14, 2, 64), (16, 16, 192)):
            for hot_window in (None, HotWindow(1, 4)):
                kernels = Kernels(*shape, hot_window=hot_window)
                kernels.attend(splits=16)
                kernels.prefill()
        options = {"window": 100, "soft_cap": 3.0}
        llama.attend(splits=16, **options)
        llama.prefill(**options)
        llama.attend(bias=torch.empty(32, 100), sinks=torch.empty(32))
        for dtype in (torch.float16, torch.float32):
            kernels = Kernels(8, 2, 64, dtype=dtype)
            kernels.attend(splits=16)
            kernels.prefill()
            kernels.small_ones()
    report["used"] = [dataclasses.asdict(each) for each in gpu.used]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
