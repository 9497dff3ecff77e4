"""Attention over latents by its Triton kernel: against its twin, against torch's, and the bits of the exact mode."""

import math
from functools import partial

import pytest
import torch
import twins
from fast_cases import fast_if, further
from lockstep_engine import layer_cache
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import triton_exact_attention, triton_latent
from lockstep_engine.kernels.tiles import LIMITS, Shape
from lockstep_engine.kernels.triton_attention import Paged, Tiles
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring
from texts import Texts, assert_all_close, assert_same_bits, by_torch, by_torchs_products, dense
from torch.utils._python_dispatch import TorchDispatchMode
from triton_device import DEVICE, GPU, NEEDS_GPU

LAZY = HotWindow(sink=1, size=2)
exact = partial(TritonAttention, exact=True)


class Step:
    """Sequences of random latents in a cache, and the queries of one step of them. What no query may read is NaN.

    Args:
        contexts: tokens of each sequence, the step's included.
        counts: tokens of each that the step computes.
    """

    def __init__(
        self,
        contexts,
        counts,
        *,
        heads=4,
        latent=32,
        rest=16,
        dtype=torch.float32,
        hot_window=None,
        compressed=True,
        scale=1.0,
        seed=0,
    ):
        self.counts = counts
        generator = torch.Generator().manual_seed(seed)
        needs = [-(-each // BLOCK_SIZE) for each in contexts]
        blocks = sum(needs) + 2
        self.cache = KvCache(
            layers=1,
            kv_heads=1,
            head_dim=latent + rest,
            blocks=blocks,
            dtype=dtype,
            device=DEVICE,
            cold_blocks=blocks if hot_window else 0,
            hot_window=hot_window,
            compressed_layers=(0,) if compressed else (),
            latent=latent,
        )
        self.layer = self.cache.layer(0)
        keys, cold = self.layer.keys, self.layer.cold
        keys.copy_(torch.randn(keys.shape, generator=generator) * scale)
        if cold is not None:
            cold.keys[:, :-1] = 0x7F if compressed else math.nan  # the last block stays zero
            if cold.key_scales is not None:
                cold.key_scales[:, :-1] = math.nan
        order = torch.randperm(blocks, generator=generator).tolist()
        tables = torch.full((len(contexts), max(needs) + 1), -1, dtype=torch.int32)
        hot_tables, moves, kept = tables.clone(), [], set()

        def is_cold(query, block):
            return hot_window is not None and block >= hot_window.sink and query - block > hot_window.size

        for sequence, (context, count, need) in enumerate(zip(contexts, counts, needs, strict=True)):
            for block in range(need):
                hot = order.pop()
                seen_cold = is_cold((context - 1) // BLOCK_SIZE, block)
                tables[sequence, block] = hot + self.cache.first_cold if seen_cold else hot
                moves += [[hot, hot]] if seen_cold else []
                if not is_cold((context - count) // BLOCK_SIZE, block):
                    hot_tables[sequence, block] = hot
                    kept.add(hot)
            keys[:, hot, :, context % BLOCK_SIZE or BLOCK_SIZE :] = math.nan
        if moves:
            layer_cache.compress(self.layer, torch.tensor(moves, device=DEVICE))
        keys[:, sorted(set(range(blocks)) - kept)] = math.nan
        starts, rows = torch.tensor(contexts) - torch.tensor(counts), torch.tensor([0, *counts]).cumsum(0)[:-1]
        numbers = (tables, hot_tables, starts, torch.tensor(counts), rows)
        self.paged = Paged(*(each.to(DEVICE, torch.int32).contiguous() for each in numbers), hot_window)
        queries = torch.randn(sum(counts), heads, latent + rest, generator=generator) * scale
        self.queries = queries.to(DEVICE, dtype).transpose(0, 1)
        self.scoring = Scoring((latent + rest) ** -0.5)

    def run(self, *, queries=1, splits=1, shape=None, exact=False, scoring=None):
        pairs = [(row, first) for row, count in enumerate(self.counts) for first in range(0, count, queries)]
        sequences, firsts = torch.tensor(pairs, dtype=torch.int32, device=DEVICE).T.contiguous()
        heads, tokens, _ = self.queries.shape
        out = torch.full((tokens, heads, self.layer.latent), math.nan, dtype=self.queries.dtype, device=DEVICE)
        tiles = Tiles(sequences, firsts, queries, splits)
        scoring = scoring or self.scoring
        triton_latent.attend(self.queries, self.layer, self.paged, scoring, tiles, out, shape, exact=exact)
        return out

    def twin(self):
        return twins.attend(self.queries, self.layer, self.paged, self.scoring)

    def check(self, **options):
        expected = self.twin()
        assert expected.isfinite().all()
        ours = self.run(**options)
        atol = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[ours.dtype]
        torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-2 if ours.dtype.itemsize == 2 else 1e-5)


def decode(contexts, **options):
    return Step(contexts, [1] * len(contexts), **options)


@pytest.mark.parametrize("mode", [False, True], ids=["usual", "exact"])
@pytest.mark.parametrize(
    ("hot_window", "compressed"),
    [(None, True), (LAZY, True), fast_if(False, HotWindow(0, 0), True), fast_if(False, HotWindow(2, 0), False)],
    ids=str,
)
def test_decoding_of_ragged_contexts_with_keys_split_over_programs(hot_window, compressed, mode):
    step = decode([130, 1, 33, 16], hot_window=hot_window, compressed=compressed, seed=5)
    step.check(exact=mode)
    step.check(splits=3, exact=mode)


@pytest.mark.parametrize("hot_window", [None, fast_if(True, LAZY), fast_if(False, HotWindow(0, 0))], ids=str)
def test_chunks_of_prompts_between_decoding_sequences(hot_window):
    Step([40, 100, 17, 64], [40, 37, 1, 16], hot_window=hot_window, seed=6).check(queries=4)


@pytest.mark.parametrize(("heads", "latent", "rest"), [(3, 20, 4), (18, 64, 16), (16, 128, 64), (40, 16, 8)])
def test_any_numbers_of_heads_and_widths(heads, latent, rest):
    step = Step([70, 20], [2, 1], heads=heads, latent=latent, rest=rest, hot_window=LAZY, seed=heads)
    step.check(queries=1 if heads > 8 else 2)
    decode([70, 20], heads=heads, latent=latent, rest=rest, seed=heads).check(splits=2)


@pytest.mark.parametrize(
    "context", [fast_if(each in (1, 16, 33), each) for each in (1, 15, 16, 17, 31, 32, 33, 48, 64, 65)]
)
def test_contexts_that_end_at_the_boundary_of_a_block_or_tile(context):
    step = decode([context], hot_window=HotWindow(sink=1, size=1), seed=context)
    step.check(shape=Shape(keys=32, warps=4, stages=1))


@pytest.mark.parametrize("hot_window", [None, HotWindow(1, 1)], ids=str)
def test_half_precision(hot_window):
    Step([70, 33], [9, 1], dtype=torch.float16, hot_window=hot_window).check(queries=4)
    decode([70, 33], dtype=torch.float16, hot_window=hot_window).check(splits=2)


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_half_precision_loses_neither_small_nor_large_values(scale):
    step = decode([100], dtype=torch.float16, hot_window=HotWindow(0, 0), scale=scale)
    torch.testing.assert_close(step.run(), step.twin(), atol=2e-3 * scale, rtol=5e-2)


def test_the_rotary_part_of_a_query_may_be_much_larger_than_the_rest():
    """By more than half precision can hold, in which both meet compressed keys."""
    step = decode([100], dtype=torch.float16, hot_window=HotWindow(0, 0))
    step.queries[..., :32] *= 1e-4
    step.queries[..., 32:] *= 500
    for mode in (False, True):
        torch.testing.assert_close(step.run(exact=mode), step.twin(), atol=2e-3, rtol=5e-2)


def test_rows_that_only_fill_a_step_up_see_nothing_and_are_zero():
    step = decode([40, 20, 33], hot_window=LAZY)
    expected = step.twin()
    step.paged.starts[1] = -1
    step.paged.tables[1] = step.paged.hot_tables[1] = -1
    expected[1] = 0
    for splits in (1, 2):
        for mode in (False, True):
            torch.testing.assert_close(step.run(splits=splits, exact=mode), expected, atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the most bytes of a new tensor in float32."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format and made.dtype is torch.float32:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def test_partial_results_of_many_segments_are_made_in_turns(monkeypatch):
    monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
    step = decode([130, 1, 33, 16, 70, 20], hot_window=LAZY)
    step.paged.starts[4] = -1  # a padding row in the second turn
    at_once = step.run(splits=2, exact=True)
    segments = -(-step.paged.tables.shape[1] * BLOCK_SIZE // 32)
    of_a_tile = 4 * segments * 32 * 4
    monkeypatch.setattr(triton_latent, "PARTIAL_BYTES", 5 * of_a_tile)
    with Largest() as largest:
        in_turns = step.run(splits=2, exact=True)
    assert_same_bits([in_turns], [at_once])
    assert largest.bytes == 4 * of_a_tile


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda step: setattr(step, "queries", step.queries.half()), {}, "types differ"),
        (lambda step: object.__setattr__(step.layer, "latent", 48), {}, "no part of keys"),
        (lambda step: object.__setattr__(step.paged, "starts", step.paged.starts.long()), {}, "int32"),
        (lambda step: object.__setattr__(step.layer.cold, "keys", step.layer.cold.keys.float()), {}, "cold blocks"),
        (lambda step: None, {"scoring": Scoring(1.0, window=3)}, "windows"),
        (lambda step: None, {"queries": 4, "splits": 2}, "in decoding only"),
        (lambda step: None, {"queries": 5}, "more than 16 rows"),
    ],
)
def test_what_does_not_fit_is_refused(change, options, sentence):
    step = decode([40], hot_window=LAZY)
    change(step)
    with pytest.raises(ValueError, match=sentence):
        step.run(**options)


def test_programs_have_the_rows_that_the_gpu_has_room_for():
    form = {"exact": False, "scaled": False}

    def rows(arch, heads, **options):
        return triton_latent.latent_rows(heads, torch.bfloat16, LIMITS[arch].shared_bytes, **form | options)

    assert [rows(arch, 128) for arch in LIMITS] == [16, 16, 16, 64, 64]
    assert [rows(90, heads) for heads in (8, 16, 17, 32)] == [16, 16, 64, 64]
    assert rows(90, 128, exact=True) == rows(90, 128, scaled=True) == 16


def texts_of(lengths, **options):
    return Texts(lengths, heads=4, kv_heads=1, dim=48, latent=32, **options)


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
class TestTexts:
    @pytest.mark.parametrize("hot_window", [None, HotWindow(1, 1), fast_if(False, HotWindow(0, 0))], ids=str)
    def test_any_steps_agree_with_dense_attention_and_with_torchs(self, hot_window):
        texts = texts_of([20, 70, 17], seed=4)
        steps = texts.in_random_chunks(4)
        ours = texts.attend(TritonAttention, steps, hot_window=hot_window)
        assert_all_close(ours, dense(texts, hot_window=hot_window))
        for kind in (by_torch, by_torchs_products):
            assert_all_close(ours, texts.attend(kind, steps, hot_window=hot_window))

    @pytest.mark.usefixtures("ordered_products")
    @pytest.mark.parametrize("hot_window", [fast_if(False, None), HotWindow(1, 1), further(HotWindow(0, 0))], ids=str)
    def test_exact_bits_depend_neither_on_chunks_nor_on_programs(self, hot_window, monkeypatch):
        monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
        texts = texts_of([20, 50], seed=4, scale=2.0)
        at_once = texts.attend(exact, texts.at_once(), hot_window=hot_window)
        assert_all_close(at_once, texts.attend(TritonAttention, texts.at_once(), hot_window=hot_window))
        for seed, programs in ((5, 1), (6, 3)):
            monkeypatch.setattr(triton_latent, "splits_for", lambda *_, programs=programs: programs)
            other = texts.attend(exact, texts.in_random_chunks(seed), hot_window=hot_window)
            assert_same_bits(other, at_once)

    @pytest.mark.usefixtures("ordered_products")
    @pytest.mark.parametrize("hot_window", [further(each) for each in (None, HotWindow(1, 1))], ids=str)
    def test_token_by_token_gives_the_bits_of_a_chunk(self, hot_window, monkeypatch):
        monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
        monkeypatch.setattr(triton_latent, "splits_for", lambda *_: 2)
        texts = texts_of([70, 9], seed=7)
        at_once = texts.attend(exact, texts.at_once(), hot_window=hot_window)
        assert_same_bits(texts.attend(exact, texts.one_by_one(), hot_window=hot_window), at_once)


class TestOnAGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("hot_window", [None, HotWindow(1, 4)], ids=str)
    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize("mode", [False, True], ids=["usual", "exact"])
    def test_deepseek_v3(self, dtype, hot_window, heads, mode):
        widths = {"heads": heads, "latent": 512, "rest": 64, "dtype": dtype, "hot_window": hot_window}
        step = decode([4000, 17, 1025, 64, 1, 2048], **widths)
        for splits in (1, 7, 64):
            step.check(splits=splits, exact=mode)
        step = Step([2000, 700, 33], [512, 700, 1], **widths)
        step.check(queries=triton_latent.queries_a_tile(heads, step.layer, exact=mode), exact=mode)
