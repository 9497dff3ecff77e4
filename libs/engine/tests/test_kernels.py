"""The compiled CPU kernels against plain torch, and their promise: a row's bits depend on that row alone."""

import ctypes
import math

import numpy as np
import pytest
import torch
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.attention_cpu import CompiledAttention, DecodingAttention
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.cpu_structs import PlainLayerCall, PlainStepCall, RopeCall
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring
from texts import CPU, Texts, assert_all_close, assert_same_bits, by_kernel, by_torch, by_torchs_products, dense
from torch.nn import functional

pytestmark = pytest.mark.skipif(not cpu.build, reason="the kernels were not built")


@pytest.fixture(autouse=True)
def threads():
    """One thread, unless a test sets another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def build():
    """Choose a build of the kernels for this test."""
    before = cpu.build
    yield cpu.use
    cpu.use(before)


RAGGED = [1, 5, 15, 16, 17, 31, 32, 33, 130, 70]


class TestAttention:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"),
        [
            (3, 3, 16), (4, 2, 32), (8, 2, 48), (7, 1, 64), (16, 2, 80), (4, 2, 96), (14, 2, 112), (2, 2, 128),
            (8, 1, 144), (2, 1, 192), (4, 2, 240), (4, 1, 256),
        ],
    )  # fmt: skip
    def test_kernel_and_torch_agree_with_dense_attention(self, heads, kv_heads, dim):
        texts = Texts([1, 16, 17, 50, 33], heads=heads, kv_heads=kv_heads, dim=dim, seed=dim)
        steps, expected = texts.in_random_chunks(dim), dense(texts)
        assert_all_close(texts.attend(by_kernel, steps), expected)
        assert_all_close(texts.attend(by_torch, steps), expected)

    @pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 37, 1000])
    def test_windows(self, window):
        texts = Texts([20, 70, 33], seed=window)
        steps, expected = texts.in_random_chunks(window), dense(texts, window=window)
        assert_all_close(texts.attend(by_kernel, steps, window=window), expected)
        assert_all_close(texts.attend(by_torch, steps, window=window), expected)

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    @pytest.mark.parametrize("window", [None, 9])
    def test_soft_caps(self, soft_cap, window):
        texts = Texts([20, 70, 33], seed=4, scale=2.0)
        steps, expected = texts.in_random_chunks(4), dense(texts, soft_cap=soft_cap, window=window)
        assert_all_close(texts.attend(by_kernel, steps, soft_cap=soft_cap, window=window), expected)
        assert_all_close(texts.attend(by_torch, steps, soft_cap=soft_cap, window=window), expected)

    @pytest.mark.parametrize("kind", [by_kernel, by_torch, by_torchs_products])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("window", [None, 9])
    def test_biases(self, kind, dtype, window):
        texts = Texts([20, 70, 33], heads=6, kv_heads=3, seed=4)
        texts.round_to(dtype)
        options = {"bias": torch.randn(6, 80, generator=torch.Generator().manual_seed(4)), "window": window}
        ours = texts.attend(kind, texts.in_random_chunks(4), dtype=dtype, poison=False, **options)
        rounding = 1e-5 if dtype is torch.float32 else 0.51 * torch.finfo(dtype).eps
        for one, other in zip(ours, dense(texts, **options), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=rounding)

    @pytest.mark.parametrize("seed", range(20))
    def test_random_shapes_and_steps(self, seed):
        chooser = np.random.default_rng(seed)
        kv_heads, ratio = int(chooser.integers(1, 4)), int(chooser.choice([1, 2, 4, 7, 8]))
        texts = Texts(
            chooser.integers(1, 150, size=chooser.integers(1, 7)).tolist(),
            heads=kv_heads * ratio,
            kv_heads=kv_heads,
            dim=16 * int(chooser.integers(1, 9)),
            seed=seed,
        )
        options = {"window": [None, 7, 60][seed % 3], "soft_cap": [None, 20.0][seed % 2]}
        steps = texts.in_random_chunks(seed)
        kernel, twin = texts.attend(by_kernel, steps, **options), texts.attend(by_torch, steps, **options)
        assert_all_close(kernel, dense(texts, **options))
        assert_all_close(kernel, twin)

    @pytest.mark.parametrize("scale", [30.0, 1e3, 1e6])
    def test_large_scores_give_finite_means_of_values(self, scale):
        """Rounding may decide between two keys, but what comes out lies between the least and the greatest value."""
        texts = Texts([40, 17], scale=scale, seed=1)
        for out, values in zip(texts.attend(by_kernel, texts.in_random_chunks(1)), texts.values, strict=True):
            assert out.isfinite().all()
            seen = values.repeat_interleave(2, 0).transpose(0, 1)
            assert (out <= seen.cummax(0).values + 1e-4).all()
            assert (out >= seen.cummin(0).values - 1e-4).all()

    @pytest.mark.parametrize("kind", [by_kernel, by_torch])
    def test_what_earlier_owners_left_in_a_block_does_not_matter(self, kind):
        texts = Texts([20, 70, 33], seed=4)
        assert_all_close(texts.attend(kind, texts.in_random_chunks(4), poison=False), dense(texts))

    def test_keys_far_below_the_best_have_no_weight(self):
        texts = Texts([20], heads=1, kv_heads=1, dim=16)
        texts.keys[0][:] = -texts.queries[0][:, -1:] * 1e4
        texts.keys[0][:, 7] = texts.queries[0][:, -1] * 1e4
        (out,) = texts.attend(by_kernel, texts.at_once())
        torch.testing.assert_close(out[-1], texts.values[0][:, 7])

    def test_equal_scores_give_the_mean(self):
        texts = Texts([37], heads=2, kv_heads=1, dim=16)
        texts.queries[0].zero_()
        (out,) = texts.attend(by_kernel, texts.at_once())
        expected = texts.values[0][0].cumsum(0) / torch.arange(1, 38)[:, None]
        torch.testing.assert_close(out[:, 0], expected, atol=1e-6, rtol=1e-5)

    def test_queries_keys_and_values_may_be_views_of_a_merged_product(self):
        lengths, heads, kv_heads, dim = [40], 4, 2, 32
        texts = Texts(lengths, heads=heads, kv_heads=kv_heads, dim=dim)
        merged = torch.cat([texts.queries[0], texts.keys[0], texts.values[0]]).transpose(0, 1).contiguous()
        expected = texts.attend(by_kernel, texts.at_once())
        parts = merged.transpose(0, 1).split((heads, kv_heads, kv_heads))
        cache = KvCache(layers=1, kv_heads=kv_heads, head_dim=dim, blocks=3, dtype=torch.float32, device=CPU)
        layout = StepLayout(np.array([0], np.int32), np.array([40], np.int32), np.array([[2, 0, 1]], np.int32))
        out = CompiledAttention(cache, layout).attend(0, *parts, Scoring(dim**-0.5))
        assert torch.equal(out, expected[0])

    def test_layers_do_not_mix(self):
        texts = Texts([20], heads=2, kv_heads=1, dim=16)
        cache = KvCache(layers=3, kv_heads=1, head_dim=16, blocks=2, dtype=torch.float32, device=CPU)
        layout = StepLayout(np.array([0], np.int32), np.array([20], np.int32), np.array([[1, 0]], np.int32))
        attention = CompiledAttention(cache, layout)
        parts = texts.queries[0], texts.keys[0], texts.values[0]
        first = attention.attend(0, *parts, Scoring(0.25))
        attention.attend(1, *(each * 2 for each in parts), Scoring(0.25))
        assert torch.equal(attention.attend(2, *parts, Scoring(0.25)), first)
        assert torch.equal(cache.keys[0], cache.keys[2])
        assert torch.equal(cache.keys[1], cache.keys[0] * 2)


@pytest.mark.bits
class TestAttentionBits:
    """Without these a stream that moves to another worker, or is preempted, would change its text."""

    @pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 30.0}], ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 64), (3, 3, 80)])
    def test_chunks_and_neighbours_do_not_matter_to_the_kernel(self, heads, kv_heads, dim, options):
        texts = Texts(RAGGED, heads=heads, kv_heads=kv_heads, dim=dim, seed=dim)
        expected = texts.attend(by_kernel, texts.at_once(), **options)
        assert_same_bits(texts.attend(by_kernel, texts.one_by_one(), **options), expected)
        for seed in range(2):
            assert_same_bits(texts.attend(by_kernel, texts.in_random_chunks(seed), **options), expected)
        alone = [
            texts.attend(by_kernel, [[(sequence, length)]], **options)[sequence]
            for sequence, length in enumerate(texts.lengths)
        ]
        assert_same_bits(alone, expected)

    @pytest.mark.parametrize("hot_window", [None, HotWindow(sink=1, size=1)], ids=str)
    def test_attention_that_is_taken_over_from_an_earlier_step_is_as_a_new_one(self, threads, hot_window):
        texts = Texts([*RAGGED, 90, 90], seed=3)
        expected = texts.attend(by_kernel, texts.at_once(), hot_window=hot_window)
        for steps in (texts.one_by_one(), texts.in_random_chunks(4)):
            kept = DecodingAttention()
            assert_same_bits(texts.attend(kept.of, steps, hot_window=hot_window), expected)
            threads(2)
            assert_same_bits(texts.attend(kept.of, steps, hot_window=hot_window), expected)  # another cache
        cache = KvCache(layers=1, kv_heads=1, head_dim=16, blocks=4, dtype=torch.float32, device=CPU)
        steps = [
            StepLayout(np.array([at], np.int32), np.array([count], np.int32), np.array([[0, 1, 2]], np.int32))
            for at, count in ((0, 1), (33, 1), (3, 2))
        ]
        first, second, longer = (kept.of(cache, each) for each in steps)
        assert first is second
        assert first is not longer
        assert first.positions.tolist() == [33]

    def test_the_number_of_threads_does_not_matter(self, threads):
        texts = Texts(RAGGED, heads=6, kv_heads=3, dim=48)
        outs = []
        for count in (1, 2, 3):
            threads(count)
            outs.append(texts.attend(by_kernel, texts.at_once()) + texts.attend(by_kernel, texts.in_random_chunks(5)))
        assert_same_bits(outs[1], outs[0])
        assert_same_bits(outs[2], outs[0])

    def test_the_place_in_the_cache_does_not_matter(self):
        first, second = Texts(RAGGED, seed=6), Texts(RAGGED, seed=6)
        order = np.random.default_rng(1).permutation(np.concatenate(second.blocks))
        second.blocks = np.split(order, np.cumsum([len(each) for each in second.blocks])[:-1])
        assert_same_bits(second.attend(by_kernel, second.at_once()), first.attend(by_kernel, first.at_once()))


class TestPlaces:
    @pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 1, 40], [33]])
    def test_tokens_are_where_numpy_says(self, lengths):
        generator = np.random.default_rng(len(lengths))
        starts = generator.integers(0, 60, len(lengths), dtype=np.int32)
        tables = generator.permutation(len(lengths) * 7).astype(np.int32).reshape(-1, 7)
        cache = KvCache(
            layers=1, kv_heads=1, head_dim=16, blocks=tables.size, dtype=torch.float32, device=torch.device("cpu")
        )
        layout = StepLayout(starts, np.array(lengths, np.int32), tables)
        ours = CompiledAttention(cache, layout)._places(layout)
        theirs = TorchAttention(cache, layout, deterministic=True)._places(layout)
        assert np.array_equal(ours[0], theirs[0])
        assert all(torch.equal(*each) for each in zip(ours[1:], theirs[1:], strict=True))

    def test_a_position_beyond_the_table_is_an_error(self):
        cache = KvCache(layers=1, kv_heads=1, head_dim=16, blocks=2, dtype=torch.float32, device=torch.device("cpu"))
        layout = StepLayout(np.array([31], np.int32), np.array([2], np.int32), np.array([[0, 1]], np.int32))
        with pytest.raises(IndexError, match="no block"):
            CompiledAttention(cache, layout)


class TestChoice:
    def cache(self, head_dim, dtype):
        return KvCache(layers=1, kv_heads=1, head_dim=head_dim, blocks=2, dtype=dtype, device=CPU)

    @pytest.mark.parametrize(
        ("head_dim", "dtype", "kind"),
        [
            (64, torch.float32, CompiledAttention),
            (256, torch.float32, CompiledAttention),
            (64, torch.bfloat16, CompiledAttention),
            (10, torch.float16, CompiledAttention),
            (576, torch.float32, CompiledAttention),
            (64, torch.float64, TorchAttention),
        ],
    )
    def test_the_kernel_is_taken_where_it_can_run(self, head_dim, dtype, kind):
        layout = StepLayout(np.array([0], np.int32), np.array([1], np.int32), np.array([[0]], np.int32))
        assert type(step_attention(self.cache(head_dim, dtype), layout, deterministic=True)) is kind


class TestElementwise:
    @pytest.mark.parametrize("width", [1, 3, 16, 33, 64, 288, 1000])
    @pytest.mark.parametrize("eps", [1e-5, 1e-6])
    def test_norm_with_and_without_sum(self, width, eps):
        torch.manual_seed(width)
        x, delta, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
        torch.testing.assert_close(
            cpu.add_rms_norm(x, None, weight, eps), functional.rms_norm(x, (width,), weight, eps), atol=2e-6, rtol=1e-5
        )
        summed = x + delta
        out = cpu.add_rms_norm(x, delta, weight, eps)
        assert torch.equal(x, summed)
        torch.testing.assert_close(out, functional.rms_norm(summed, (width,), weight, eps), atol=2e-6, rtol=1e-5)

    def test_norm_of_zeros_is_zero(self):
        assert torch.equal(cpu.add_rms_norm(torch.zeros(2, 40), None, torch.ones(40), 1e-6), torch.zeros(2, 40))

    @pytest.mark.parametrize("width", [1, 15, 16, 17, 96, 770])
    def test_silu(self, width):
        torch.manual_seed(width)
        x = torch.randn(4, width) * 5
        torch.testing.assert_close(cpu.apply(cpu.Function.SILU, x), functional.silu(x), atol=1e-6, rtol=1e-5)

    def test_silu_of_extremes(self):
        gate = torch.tensor(
            [0.0, -0.0, 1e-30, -1e-30, 86.0, -86.0, 88.0, -88.0, 100.0, -100.0, 1e30, -1e30, 3e38, -3e38]
        )
        torch.testing.assert_close(cpu.apply(cpu.Function.SILU, gate), functional.silu(gate), atol=1e-34, rtol=1e-5)

    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 64), (2, 2, 10), (8, 1, 128)])
    def test_rope_is_llamas(self, heads, kv_heads, dim, has_norms):
        torch.manual_seed(dim)
        tokens = 7
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
        angles = torch.arange(tokens)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.cat([angles, angles], dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        q_norm, k_norm = torch.randn(2, dim)
        norms = (q_norm, k_norm) if has_norms else None
        normed = cpu.add_rms_norm(qkv, None, torch.ones(qkv.shape[1]), 1e-5)
        expected = rotated(normed, cosine, sine, heads, kv_heads, norms)
        actual = rope(qkv, cosine, sine, heads, kv_heads, norms)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)
        values = slice((heads + kv_heads) * dim, None)
        assert torch.equal(actual[:, values], expected[:, values])

    @pytest.mark.parametrize("name", cpu.BUILDS)
    @pytest.mark.parametrize("width", [1, 7, 1024, 1025, 5000])
    def test_the_largest_number_is_argmaxs(self, build, name, width):
        try:
            build(name)
        except ValueError:
            pytest.skip(f"this CPU has no {name}")
        generator = torch.Generator().manual_seed(width)
        x = torch.randint(-40, 40, (300, width), generator=generator).float()  # many are equal
        x[7], x[8], x[9, 0] = -math.inf, math.inf, -math.inf
        for row in range(10, 60):
            places = torch.randint(width, (2,), generator=generator)
            x[row, places] = torch.tensor([math.nan, (math.inf, math.nan, -math.inf)[row % 3]])
        ids, usable = cpu.largest(x)
        expected = x.argmax(dim=-1)
        assert ids.tolist() == expected.tolist()
        assert usable.tolist() == expected.where(x.amax(dim=-1).isfinite(), -1).tolist()

    def test_a_row_has_the_same_bits_whatever_its_neighbours(self):
        torch.manual_seed(0)
        x, delta, weight = torch.randn(9, 100), torch.randn(9, 100), torch.randn(100)
        norm, gated = cpu.add_rms_norm(x.clone(), delta, weight, 1e-5), cpu.apply(cpu.Function.SILU, x)
        qkv, cosine, sine = torch.randn(9, 4 * 32), torch.randn(9, 32), torch.randn(9, 32)
        together = rope(qkv, cosine, sine, 2, 1, None)
        for row in range(9):
            one = slice(row, row + 1)
            assert torch.equal(cpu.add_rms_norm(x[one].clone(), delta[one], weight, 1e-5), norm[one])
            assert torch.equal(cpu.apply(cpu.Function.SILU, x[one].contiguous()), gated[one])
            assert torch.equal(rope(qkv[one], cosine[one], sine[one], 2, 1, None), together[one])


def rope(x, cosine, sine, heads, kv_heads, norms):
    """Queries, keys and values as a layer rotates them that takes x's rows, divided by their root mean squares, for the
    product of its merged projections.
    """
    q_norm, k_norm = norms or (None, None)
    (tokens, dim), width = cosine.shape, x.shape[1]
    rotation = RopeCall(
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        eps=1e-5,
    )
    tables = np.arange(-(-tokens // BLOCK_SIZE), dtype=np.int32)[None]
    cache = KvCache(
        layers=1,
        kv_heads=kv_heads,
        head_dim=dim,
        blocks=tables.size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = CompiledAttention(cache, StepLayout(np.zeros(1, np.int32), np.array([tokens], np.int32), tables))
    identity = cpu.PackedLinear(torch.eye(width), None)
    out = cpu.PackedLinear(torch.zeros(width, heads * dim), None)
    ones = torch.ones(width)
    layer = PlainLayerCall(
        qkv=ctypes.addressof(identity.call),
        out=ctypes.addressof(out.call),
        rotation=ctypes.addressof(rotation),
        first_norm=ones.data_ptr(),
        first_eps=1e-5,
        scale=1.0,
    )
    rotated = torch.empty(tokens, width)
    room, own = torch.empty(4, tokens, width), torch.arange(tokens)
    step = PlainStepCall(
        x=x.data_ptr(),
        result=room[0].data_ptr(),
        normed=room[1].data_ptr(),
        wide=rotated.data_ptr(),
        inner=room[2].data_ptr(),
        tiles=room[3].data_ptr(),
        cosine=cosine.data_ptr(),
        sine=sine.data_ptr(),
        positions=own.data_ptr(),
        rows=tokens,
        hidden=width,
    )
    attention.give_to(step)
    cpu.plain((PlainLayerCall * 1)(layer), 0, 1, step, 1)
    return rotated


def rotated(qkv, cosine, sine, heads, kv_heads, norms):
    """Llama's formula: x * cos + rotate_half(x) * sin, on queries and keys; Qwen 3 normalizes each head before."""
    dim = cosine.shape[-1]
    parts = qkv.view(len(qkv), -1, dim)
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (functional.rms_norm(each, (dim,), norm, 1e-5) for each, norm in zip((q, k), norms, strict=True))

    def rotate(x):
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cosine[:, None] + half * sine[:, None]

    return torch.cat([rotate(q), rotate(k), v], dim=1).reshape(qkv.shape)
