"""The attention kernel against its twin in plain torch. Whatever no query may read is NaN."""

import math
import random

import pytest
import torch
import twins
from fast_cases import fast_if
from lockstep_engine import layer_cache
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import triton_attention
from lockstep_engine.kernels.triton_attention import Paged, Shape, Tiles
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring
from triton_device import DEVICE, NEEDS_GPU

LAZY = HotWindow(sink=1, size=2)
SMALL = Shape(keys=32, warps=4, stages=1)


class Step:
    """Sequences of random keys and values in a cache, and the queries of one step of them.

    Args:
        contexts: tokens of each sequence, the step's included.
        queries: tokens of each that the step computes.
        hot_window: which blocks are seen cold.
        compressed: cold blocks are fp8; otherwise of the hot ones' type.
    """

    def __init__(
        self,
        contexts,
        queries,
        *,
        heads=4,
        kv_heads=2,
        dim=32,
        dtype=torch.float32,
        hot_window=None,
        compressed=True,
        scale=1.0,
        seed=0,
    ):
        self.contexts, self.counts, self.hot_window, self.kv_heads = contexts, queries, hot_window, kv_heads
        generator = torch.Generator().manual_seed(seed)
        needs = [-(-each // BLOCK_SIZE) for each in contexts]
        blocks = sum(needs) + 2
        self.cache = KvCache(
            layers=1,
            kv_heads=kv_heads,
            head_dim=dim,
            blocks=blocks,
            dtype=dtype,
            device=DEVICE,
            cold_blocks=blocks if hot_window else 0,
            hot_window=hot_window,
            compressed_layers=(0,) if compressed else (),
        )
        self.layer = self.cache.layer(0)
        for tensor in (self.layer.keys, self.layer.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        self._poison_cold()
        order = torch.randperm(blocks, generator=generator).tolist()
        self.tables = torch.full((len(contexts), max(needs) + 1), -1, dtype=torch.int32)
        self.hot_tables = self.tables.clone()
        moves, kept = [], set()
        for sequence, (context, count, need) in enumerate(zip(contexts, queries, needs, strict=True)):
            for block in range(need):
                hot = order.pop()
                seen_cold = self._cold((context - 1) // BLOCK_SIZE, block)
                seen_hot = not self._cold((context - count) // BLOCK_SIZE, block)
                self.tables[sequence, block] = hot + self.cache.first_cold if seen_cold else hot
                if seen_cold:
                    moves.append([hot, hot])
                if seen_hot:
                    self.hot_tables[sequence, block] = hot
                    kept.add(hot)
            self._poison(hot, context % BLOCK_SIZE or BLOCK_SIZE)
        if moves:
            layer_cache.compress(self.layer, torch.tensor(moves, device=DEVICE))
        for gone in set(range(blocks)) - kept:
            self._poison(gone, 0)
        rows = torch.tensor([0, *queries]).cumsum(0)[:-1]
        starts = torch.tensor(contexts) - torch.tensor(queries)
        self.paged = Paged(
            *(
                each.to(DEVICE, torch.int32).contiguous()
                for each in (self.tables, self.hot_tables, starts, torch.tensor(queries), rows)
            ),
            hot_window,
        )
        self.queries = (torch.randn(sum(queries), heads, dim, generator=generator) * scale).to(DEVICE, dtype)
        self.queries = self.queries.transpose(0, 1)
        self.scoring = {"scale": dim**-0.5}

    def _cold(self, query_block, block):
        hot_window = self.hot_window
        return hot_window is not None and block >= hot_window.sink and query_block - block > hot_window.size

    def _poison(self, block, used):
        self.layer.keys[:, block, :, used:] = math.nan
        self.layer.values[:, block, used:] = math.inf

    def _poison_cold(self):
        cold = self.layer.cold
        for tensor in () if cold is None else (cold.keys, cold.values, cold.key_scales, cold.value_scales):
            if tensor is not None:
                tensor[:, :-1] = 0x7F if tensor.dtype is torch.uint8 else math.nan  # the last block stays zero

    def tiles(self, queries=1, splits=1):
        pairs = [(row, first) for row, count in enumerate(self.counts) for first in range(0, count, queries)]
        sequences, firsts = torch.tensor(pairs, dtype=torch.int32, device=DEVICE).T.contiguous()
        return Tiles(sequences, firsts, queries, splits)

    def run(self, *, queries=1, splits=1, shape=SMALL, **scoring):
        heads, tokens, dim = self.queries.shape
        out = torch.full((tokens, heads, dim), math.nan, dtype=self.queries.dtype, device=DEVICE)
        scoring = Scoring(**self.scoring | scoring)
        tiles = self.tiles(queries, splits)
        triton_attention.attend(self.queries, self.layer, self.paged, scoring, tiles, out, shape)
        return out

    def twin(self, **scoring):
        return twins.attend(self.queries, self.layer, self.paged, Scoring(**self.scoring | scoring))

    def check(self, *, queries=1, splits=1, shape=SMALL, atol=None, **scoring):
        expected = self.twin(**scoring)
        assert expected.isfinite().all()
        ours = self.run(queries=queries, splits=splits, shape=shape, **scoring)
        atol = atol or {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[ours.dtype]
        torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-2 if ours.dtype.itemsize == 2 else 1e-5)


def decode(contexts, **options):
    return Step(contexts, [1] * len(contexts), **options)


@pytest.mark.parametrize("ratio", [fast_if(ratio in (3, 8), ratio) for ratio in range(1, 9)])
def test_any_number_of_query_heads_shares_a_key_head(ratio):
    decode([37], heads=2 * ratio, hot_window=LAZY, seed=ratio).check()


@pytest.mark.parametrize("dim", [fast_if(dim in (64, 80), dim) for dim in (16, 64, 80, 96, 112, 128, 192, 256)])
def test_heads_of_any_width(dim):
    Step([70, 20], [3, 1], heads=2, kv_heads=1, dim=dim, hot_window=LAZY, seed=dim).check(queries=3)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65])
def test_contexts_that_end_at_the_boundary_of_a_block_or_tile(context):
    decode([context], kv_heads=1, hot_window=HotWindow(sink=1, size=1), seed=context).check()


@pytest.mark.parametrize("hot_window", [None, LAZY, HotWindow(1, 1), HotWindow(0, 0), HotWindow(2, 0)], ids=str)
@pytest.mark.parametrize("splits", [fast_if(False, 1), 3])
def test_decoding_of_ragged_contexts_with_keys_split_over_programs(hot_window, splits):
    decode([130, 1, 33, 16], kv_heads=1, hot_window=hot_window, seed=5).check(splits=splits)


@pytest.mark.parametrize("hot_window", [None, LAZY, HotWindow(0, 0), HotWindow(2, 1)], ids=str)
def test_chunks_of_prompts_between_decoding_sequences(hot_window):
    Step([40, 100, 17, 64], [40, 37, 1, 16], kv_heads=1, hot_window=hot_window, seed=6).check(queries=8)


def test_a_tile_that_sees_a_block_in_both_versions():
    for hot_window in (HotWindow(0, 0), HotWindow(1, 1)):
        Step([90], [60], heads=2, kv_heads=1, hot_window=hot_window).check(queries=32)


@pytest.mark.parametrize("hot_window", [None, HotWindow(1, 1)], ids=str)
@pytest.mark.parametrize("window", [fast_if(window in (16, 37), window) for window in (1, 15, 16, 17, 37, 1000)])
def test_windows(window, hot_window):
    Step([70, 33], [5, 1], kv_heads=1, hot_window=hot_window, seed=window).check(queries=4, window=window, splits=2)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(soft_cap):
    Step([70, 33], [5, 1], kv_heads=1, hot_window=HotWindow(1, 1), scale=2.0).check(queries=4, soft_cap=soft_cap)


def test_layers_whose_cold_blocks_are_not_compressed():
    Step([100, 33], [20, 1], kv_heads=1, hot_window=HotWindow(1, 1), compressed=False).check(queries=8)


def test_biases_by_position_and_sinks():
    step = Step([70, 33], [5, 1], kv_heads=2, hot_window=HotWindow(1, 1))
    bias = torch.randn(4, 80, device=DEVICE)
    sinks = torch.randn(4, device=DEVICE)
    step.check(queries=4, bias=bias)
    step.check(queries=4, splits=4, sinks=sinks)
    step.check(queries=4, bias=bias, sinks=sinks, window=9)


@pytest.mark.parametrize("hot_window", [None, HotWindow(1, 1)], ids=str)
def test_half_precision(hot_window):
    Step([70, 33], [9, 1], kv_heads=1, dim=64, dtype=torch.float16, hot_window=hot_window).check(queries=4, splits=2)


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_half_precision_loses_neither_small_nor_large_values(scale):
    step = decode([100], kv_heads=1, dim=64, dtype=torch.float16, hot_window=HotWindow(0, 0), scale=scale)
    ours, expected = step.run(), step.twin()
    torch.testing.assert_close(ours, expected, atol=2e-3 * scale, rtol=5e-2)


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e6])
def test_large_scores_give_finite_means_of_values(scale):
    """Rounding may decide between two keys, but what comes out lies between the least and the greatest value."""
    step = decode([60], heads=2, kv_heads=1, hot_window=None, scale=scale)
    out = step.run(splits=2)
    values = step.layer.values.nan_to_num(0, 0, 0)
    assert out.isfinite().all()
    assert out.abs().max() <= values.abs().max() * (1 + 1e-5)


def test_rows_that_only_fill_a_step_up_see_nothing_and_are_zero():
    step = decode([40, 20, 33], kv_heads=1, hot_window=LAZY)
    expected = step.twin()
    step.paged.starts[1] = -1
    step.paged.tables[1] = step.paged.hot_tables[1] = -1
    expected[1] = 0
    for splits in (1, 2):
        torch.testing.assert_close(step.run(splits=splits), expected, atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_part_of_merged_projections():
    step = Step([40], [7], kv_heads=1)
    expected = step.run(queries=4)
    merged = torch.full((7, 6, 32), math.nan, device=DEVICE)
    merged[:, :4] = step.queries.transpose(0, 1)
    step.queries = merged[:, :4].transpose(0, 1)
    assert torch.equal(step.run(queries=4), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda step: setattr(step, "queries", step.queries.half()), "types differ"),
        (lambda step: setattr(step, "queries", step.queries[:3]), "3 heads do not share 2"),
        (lambda step: setattr(step, "queries", step.queries[..., ::2]), "contiguous in their last"),
        (lambda step: object.__setattr__(step.paged, "starts", step.paged.starts.long()), "int32"),
        (lambda step: object.__setattr__(step.paged, "tables", step.paged.tables[:, :1]), "int32|width"),
        (lambda step: object.__setattr__(step.layer.cold, "keys", step.layer.cold.keys.float()), "cold blocks"),
    ],
)
def test_what_does_not_fit_is_refused(change, sentence):
    step = decode([40], hot_window=LAZY)
    change(step)
    with pytest.raises(ValueError, match=sentence):
        step.run()


def random_step(seed, dtypes):
    chooser = random.Random(seed)
    contexts = [chooser.choice([1, 5, 15, 16, 17, 31, 33, 48, 64, 100, 130]) for _ in range(chooser.randint(1, 3))]
    queries = [chooser.choice([1, 1, each, chooser.randint(1, each)]) for each in contexts]
    kv_heads = chooser.randint(1, 2)
    step = Step(
        contexts,
        queries,
        heads=kv_heads * chooser.randint(1, 8),
        kv_heads=kv_heads,
        dim=chooser.choice([16, 32, 64, 80, 128]),
        dtype=chooser.choice(dtypes),
        hot_window=chooser.choice([None, LAZY, HotWindow(chooser.randint(0, 2), chooser.randint(0, 3))]),
        compressed=chooser.random() < 0.8,
        seed=seed,
    )
    scoring = {"window": chooser.choice([None, None, 7, 40]), "soft_cap": chooser.choice([None, None, 15.0])}
    return step, {"queries": chooser.choice([4, 16]), "splits": chooser.choice([1, 2, 7])} | scoring


@pytest.mark.parametrize("seed", [fast_if(seed == 0, seed) for seed in range(4)])
def test_random_steps(seed):
    step, options = random_step(seed, [torch.float32])
    step.check(**options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_steps(seed):
    step, options = random_step(seed, [torch.float32, torch.float16])
    shape = Shape(keys=random.Random(seed).choice([16, 32, 64, 128]), warps=4, stages=1)
    step.check(**options, shape=shape)


class TestOnAGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("hot_window", [None, HotWindow(1, 4)], ids=str)
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 32, 128), (28, 4, 128), (8, 1, 256), (32, 8, 80)]
    )
    def test_decoding(self, dtype, hot_window, heads, kv_heads, dim):
        step = decode(
            [4000, 17, 1025, 64, 1, 2048], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, hot_window=hot_window
        )
        for splits in (1, 7, 64):
            step.check(splits=splits, shape=None)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("hot_window", [None, HotWindow(1, 4)], ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 16, 64), (28, 4, 128), (8, 2, 256)])
    def test_prefill(self, dtype, hot_window, heads, kv_heads, dim):
        step = Step(
            [2000, 700, 33], [512, 700, 1], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, hot_window=hot_window
        )
        size = triton_attention.queries_a_tile(heads // kv_heads, dim, dtype)
        step.check(queries=size, shape=None)
        step.check(queries=size, shape=None, window=100)
        step.check(queries=size, shape=None, soft_cap=20.0)

    @pytest.mark.parametrize("seed", range(60))
    def test_random_steps(self, seed):
        step, options = random_step(seed, [torch.bfloat16, torch.float16, torch.float32])
        step.check(**options, shape=None)
