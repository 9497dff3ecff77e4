"""Attention over hot and cold blocks: the kernel, its twin and dense arithmetic agree, and a row's bits depend on
positions alone.
"""

import math

import numpy as np
import pytest
import torch
from fast_cases import fast_if
from lockstep_engine import layer_cache
from lockstep_engine.attention import layout_of_one
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring
from texts import (
    CPU,
    LAYER,
    Texts,
    assert_all_close,
    assert_same_bits,
    by_kernel,
    by_torch,
    by_torchs_products,
    compressed,
    dense,
    spoil,
)

KINDS = [
    pytest.param(by_kernel, marks=pytest.mark.skipif(not cpu.build, reason="the kernels were not built")),
    by_torch,
]
LAZY = HotWindow(sink=1, size=4)
HOT_WINDOWS = [LAZY, HotWindow(sink=1, size=1), HotWindow(sink=0, size=0), HotWindow(sink=2, size=3)]
BUILDS = [*(() if cpu.build is None else cpu.BUILDS[cpu.BUILDS.index(cpu.build) :]), "off"]
"""Those that this machine can run."""
RAGGED = [1, 16, 17, 95, 96, 97, 200, 130, 33]


@pytest.fixture(autouse=True)
def threads():
    """One thread, unless a test sets another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=BUILDS)
def build(request):
    """Each build of the kernels in turn, and none."""
    before = cpu.build or "off"
    cpu.use(request.param)
    yield request.param
    cpu.use(before)


class TestAgreement:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("hot_window", HOT_WINDOWS, ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 64), (3, 3, 80), (4, 1, 256)])
    def test_with_dense_attention(self, kind, hot_window, heads, kv_heads, dim):
        texts = Texts([1, 97, 150, 33], heads=heads, kv_heads=kv_heads, dim=dim, seed=dim)
        steps = texts.in_random_chunks(dim)
        assert_all_close(texts.attend(kind, steps, hot_window=hot_window), dense(texts, hot_window=hot_window))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("options", [{"window": 20}, {"window": 100}, {"soft_cap": 3.0}], ids=str)
    def test_windows_and_soft_caps(self, kind, options):
        texts = Texts([20, 170, 133], seed=3, scale=1.5)
        steps = texts.in_random_chunks(3)
        assert_all_close(
            texts.attend(kind, steps, hot_window=LAZY, **options), dense(texts, hot_window=LAZY, **options)
        )

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("hot_window", [None, *HOT_WINDOWS], ids=str)
    def test_what_lies_before_the_window_is_not_read(self, kind, hot_window):
        texts = Texts([20, 170, 133], seed=4, scale=1.5)
        for seed, window in ((1, 66), (2, 75), (3, 100)):
            options = {"hot_window": hot_window, "window": window}
            steps = texts.in_random_chunks(seed)
            kept, dropped = (texts.attend(kind, steps, drops=each, **options) for each in (False, True))
            assert_same_bits(kept, dropped)

    @pytest.mark.parametrize("seed", range(12))
    def test_random_shapes_and_steps(self, seed):
        chooser = np.random.default_rng(seed)
        kv_heads, ratio = int(chooser.integers(1, 4)), int(chooser.choice([1, 2, 4, 7, 8]))
        texts = Texts(
            chooser.integers(1, 220, size=chooser.integers(1, 6)).tolist(),
            heads=kv_heads * ratio,
            kv_heads=kv_heads,
            dim=16 * int(chooser.integers(1, 9)),
            seed=seed,
        )
        hot_window = HotWindow(sink=int(chooser.integers(0, 3)), size=int(chooser.integers(0, 6)))
        options = {"window": [None, 7, 60][seed % 3], "soft_cap": [None, 20.0][seed % 2], "hot_window": hot_window}
        expected, steps = dense(texts, **options), texts.in_random_chunks(seed)
        for kind in (by_kernel, by_torch) if cpu.build else (by_torch,):
            assert_all_close(texts.attend(kind, steps, **options), expected)

    @pytest.mark.parametrize("kind", [*KINDS, by_torchs_products])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("compressed", [(0, LAYER), (0,)], ids=["compressed", "kept"])
    def test_types_of_16_bits_are_rounded_once(self, kind, dtype, compressed):
        texts = Texts([20, 170, 133], seed=3)
        texts.round_to(dtype)
        options = {"window": 100, "soft_cap": 3.0}
        ours = texts.attend(
            kind,
            texts.in_random_chunks(3),
            hot_window=LAZY,
            compressed=compressed,
            dtype=dtype,
            poison=False,
            **options,
        )
        expected = dense(texts, hot_window=LAZY if LAYER in compressed else None, **options)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0.51 * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("size", [1e-25, 1e-3, 1e3])
    def test_components_of_any_size(self, kind, size):
        texts = Texts([150], seed=5)
        texts.keys[0] *= size
        texts.queries[0] /= size
        texts.values[0] *= size
        (out,) = texts.attend(kind, texts.in_random_chunks(5), hot_window=LAZY, poison=False)
        (expected,) = dense(texts, hot_window=LAZY)
        torch.testing.assert_close(out / size, expected / size, atol=2e-5, rtol=1e-4)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_layer_that_is_not_compressed_gives_what_it_gives_without_a_rule(self, kind):
        """Its blocks move to the cold pool all the same."""
        texts = Texts(RAGGED, seed=7)
        steps = texts.in_random_chunks(7)
        plain = texts.attend(kind, steps)
        ours = texts.attend(kind, steps, hot_window=LAZY, compressed=(0,))
        (assert_same_bits if kind is by_kernel else assert_all_close)(ours, plain)


@pytest.mark.bits
class TestBits:
    """A stream that goes on elsewhere is computed in other steps; it must not see other blocks cold."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("hot_window", HOT_WINDOWS[:3], ids=str)
    @pytest.mark.parametrize(
        "options", [fast_if(False, {}), {"window": 90}, fast_if(False, {"soft_cap": 30.0})], ids=str
    )
    def test_chunks_and_neighbours_do_not_matter(self, kind, hot_window, options):
        texts = Texts(RAGGED, heads=4, kv_heads=2, dim=32, seed=2)
        options = {"hot_window": hot_window, **options}
        expected = texts.attend(kind, texts.at_once(), **options)
        assert_same_bits(texts.attend(kind, texts.one_by_one(), **options), expected)
        for seed in range(2):
            assert_same_bits(texts.attend(kind, texts.in_random_chunks(seed), **options), expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("hot_window", [LAZY, HotWindow(sink=1, size=1)], ids=str)
    def test_a_text_that_never_leaves_the_window_has_the_bits_of_no_compression(self, kind, hot_window):
        texts = Texts([BLOCK_SIZE * hot_window.blocks, BLOCK_SIZE * hot_window.blocks + 1], seed=9)
        steps = texts.in_random_chunks(1)
        ours, plain = texts.attend(kind, steps, hot_window=hot_window), texts.attend(kind, steps)
        assert torch.equal(ours[0], plain[0])
        assert not torch.equal(ours[1], plain[1])

    @pytest.mark.skipif(not cpu.build, reason="the kernels were not built")
    def test_the_number_of_threads_does_not_matter(self, threads):
        texts = Texts(RAGGED, heads=6, kv_heads=3, dim=48)
        outs = []
        for count in (1, 3):
            threads(count)
            outs.append(texts.attend(by_kernel, texts.at_once(), hot_window=LAZY))
        assert_same_bits(*outs)

    def test_a_step_of_one_sequence_with_both_versions_of_all_blocks(self):
        """What a rank's check of itself is made of."""
        texts = Texts([170], seed=4)
        cache = KvCache(
            layers=2,
            kv_heads=2,
            head_dim=32,
            blocks=11,
            dtype=torch.float32,
            device=CPU,
            cold_blocks=11,
            hot_window=LAZY,
        )
        spoil(cache)
        hot, cold = np.arange(11, dtype=np.int32), np.arange(11, dtype=np.int32)[::-1]
        outs = []
        for start, count in ((0, 90), (90, 70), (160, 1), (161, 9)):
            parts = [each[0][:, start : start + count] for each in (texts.queries, texts.keys, texts.values)]
            attention = step_attention(cache, layout_of_one(cache, start, count, hot, cold), deterministic=True)
            outs.append(attention.attend(LAYER, *parts, Scoring(32**-0.5)))
        assert_all_close([torch.cat(outs)], dense(texts, hot_window=LAZY))


class TestQuantize:
    def test_codes_are_the_nearest_and_the_peak_is_exact(self):
        x = torch.randn(200, 64) * torch.logspace(-8, 8, 200)[:, None]
        back = compressed(x)
        peak = x.abs().amax(1, keepdim=True)
        assert ((back - x).abs() <= torch.maximum(x.abs() / 16, peak / 448 / 2**9) * 1.001).all()
        where = x.abs() == peak
        torch.testing.assert_close(back[where], x[where], rtol=1e-6, atol=0)

    def test_zeros_stay_zeros(self):
        assert (compressed(torch.zeros(3, 16)) == 0).all()

    @pytest.mark.parametrize("magnitude", [1e-38, 1e-31, 3.4e38])
    def test_extremes_are_finite(self, magnitude):
        x = torch.randn(5, 16).clamp(-1, 1) * magnitude
        assert compressed(x).isfinite().all()

    @pytest.mark.skipif(not cpu.build, reason="the kernels were not built")
    @pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
    def test_the_kernel_gives_the_twins_bytes(self, dim):
        def make():
            return KvCache(
                layers=2,
                kv_heads=3,
                head_dim=dim,
                blocks=7,
                dtype=torch.float32,
                device=CPU,
                cold_blocks=9,
                hot_window=LAZY,
                compressed_layers=[1],
            )

        torch.manual_seed(dim)
        ours, twin = make(), make()
        for tensor, other in ((ours.keys, twin.keys), (ours.values, twin.values)):
            tensor.copy_(torch.randn_like(tensor) * torch.randn_like(tensor).mul(4).exp())
            tensor[:, 0, 2] = 0
            tensor[:, 0, 3] *= 1e-35
            tensor[:, 0, 4] = torch.arange(tensor[0, 0, 4].numel()).view(tensor[0, 0, 4].shape) % 31.0
            other.copy_(tensor)
        moves = np.array([[4, 1], [0, 8], [2, 0], [3, 5], [6, 2]], np.int32)
        ours.compress(moves)
        for layer in range(2):
            layer_cache.compress(twin.layer(layer), torch.from_numpy(moves).long())
            for one, other in zip(
                vars(ours.layer(layer).cold).values(), vars(twin.layer(layer).cold).values(), strict=True
            ):
                assert (one is None and other is None) or torch.equal(one, other)

    @pytest.mark.usefixtures("build")
    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_vector_with_what_is_no_number_gets_the_scale_nan(self, bad, dtype):
        """A single component, wherever it is, or all of them; no other vector's scale changes."""
        dim = 40  # no whole number of the widest vectors
        cache = KvCache(
            layers=1,
            kv_heads=2,
            head_dim=dim,
            blocks=2,
            dtype=dtype,
            device=CPU,
            cold_blocks=2,
            hot_window=LAZY,
        )
        torch.manual_seed(0)
        for tensor in (cache.keys, cache.values):
            tensor.copy_(torch.randn(tensor.shape))
        cold = cache.layer(0).cold
        moves = np.array([[0, 1], [1, 0]], np.int32)
        cache.compress(moves)
        expected = [scales.clone() for scales in (cold.key_scales, cold.value_scales)]
        marked = [torch.zeros_like(scales, dtype=torch.bool) for scales in expected]
        for token, component in ((0, 0), (3, dim - 1), (7, 17), (15, slice(None))):
            cache.keys[0, 0, 0, component, token] = bad
            cache.values[0, 1, 1, token, component] = bad
            marked[0][0, 1, token] = marked[1][1, 0, token] = True
        cache.compress(moves)
        for scales, before, is_bad in zip((cold.key_scales, cold.value_scales), expected, marked, strict=True):
            assert torch.equal(scales.isnan(), is_bad)
            assert torch.equal(scales[~is_bad], before[~is_bad])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", ["keys", "values"])
    def test_all_that_sees_such_a_vector_cold_is_nan(self, kind, bad, which):
        """Even where an infinite key's score would be -inf, and its weight 0."""
        texts = Texts([150, 150], seed=8)
        getattr(texts, which)[1][0, 20, 5] = bad
        outs = texts.attend(kind, texts.in_random_chunks(2), hot_window=LAZY, poison=False)
        assert outs[0].isfinite().all()
        first_cold = (20 // BLOCK_SIZE + LAZY.size + 1) * BLOCK_SIZE
        assert outs[1][first_cold:, :2].isnan().all()
        assert outs[1][:, 2:].isfinite().all()  # of the other head
        assert outs[1][:20].isfinite().all()

    @pytest.mark.skipif(not cpu.build, reason="the kernels were not built")
    def test_every_code_is_read_as_it_is_meant(self):
        """One key or value is a code, everything else zero: what the kernel gives is that code's value."""
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 127) != 127]  # not a number
        for code, value in zip(codes, codes.view(torch.float8_e4m3fn).float().tolist(), strict=True):
            cache = KvCache(
                layers=1,
                kv_heads=1,
                head_dim=16,
                blocks=2,
                dtype=torch.float32,
                device=CPU,
                cold_blocks=1,
                hot_window=HotWindow(0, 0),
            )
            cold = cache.layer(0).cold
            cold.key_scales[:, 0] = cold.value_scales[:, 0] = 1
            cold.values[0, 0, 3, 5] = code
            query, key, zero = torch.zeros(3, 1, 1, 16)
            layout = layout_of_one(cache, 16, 1, np.array([0, 1], np.int32), np.array([0, 0], np.int32))
            attention = by_kernel(cache, layout._replace(moves=None))
            out = attention.attend(0, query, key, zero, Scoring(1.0))
            torch.testing.assert_close(out[0, 0], torch.zeros(16).index_fill(0, torch.tensor(5), value / 17))
            cold.values[0, 0] = torch.ones(16, 16).to(torch.float8_e4m3fn).view(torch.uint8)
            cold.keys[0, 0, 7, 3] = code
            query[0, 0, 7] = 1 / 64
            out = attention.attend(0, query, key, zero, Scoring(1.0))
            weight = math.exp(value / 64)
            torch.testing.assert_close(out[0, 0], torch.full((16,), (15 + weight) / (16 + weight)))


@pytest.mark.parametrize("latent", [0, 32])
def test_a_cold_blocks_memory_is_what_is_said(latent):
    for dtype, compressed_layers in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, (1, 4))):
        shape = {"layers": 5, "kv_heads": 2, "head_dim": 48, "dtype": dtype, "latent": latent}
        cache = KvCache(
            **shape,
            blocks=1,
            cold_blocks=6,
            hot_window=LAZY,
            compressed_layers=compressed_layers,
            device=torch.device("cpu"),
        )
        said = KvCache.cold_block_bytes(**shape, compressed_layers=compressed_layers)
        colds = [cache.layer(layer).cold for layer in range(5)]
        tensors = [(each.keys, each.key_scales) if latent else vars(each).values() for each in colds]
        kept = [each for found in tensors for each in found if each is not None]
        assert sum(tensor.nbytes for tensor in kept) == said * 7
        if latent:
            assert all(each.values.data_ptr() == each.keys.data_ptr() for each in colds)
            scales = [(each.key_scales, each.value_scales) for each in colds if each.key_scales is not None]
            assert all(one.data_ptr() == other.data_ptr() for one, other in scales)
