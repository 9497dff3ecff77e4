"""The small Triton kernels against their twins: norms, gates, rotary positions, the cache's blocks, fp8."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import twins
from lockstep_engine import layer_cache
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import gpu, triton_compress, triton_fp8, triton_gate, triton_norm, triton_store
from lockstep_engine.kernels.triton_fp8 import decode, encode
from lockstep_engine.kv_cache import KvCache
from triton_device import DEVICE, NEEDS_GPU

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NATIVE = triton_fp8.native()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(ours, expected):
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def cache_of(dim, dtype=torch.float32, *, layers=1, kv_heads=2, blocks=4, hot_window=None, compressed=(0,)):
    return KvCache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=dim,
        blocks=blocks,
        dtype=dtype,
        device=DEVICE,
        cold_blocks=blocks if hot_window else 0,
        hot_window=hot_window,
        compressed_layers=compressed,
    )


class TestAddRmsNorm:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [1, 64, 80, 1000])
    @pytest.mark.parametrize("added", [False, True])
    def test_agrees_with_its_twin(self, dtype, width, added):
        x, weight = random(2, 3, width, dtype=dtype), random(width, dtype=dtype)
        delta = random(2, 3, width, dtype=dtype) if added else None
        ours, theirs = x.clone(), x.clone()
        close(triton_norm.add_rms_norm(ours, delta, weight, 1e-5), twins.add_rms_norm(theirs, delta, weight, 1e-5))
        assert torch.equal(ours, theirs)

    def test_rows_of_zeros_stay_zeros(self):
        assert not triton_norm.add_rms_norm(torch.zeros(2, 64, device=DEVICE), None, random(64), 1e-6).any()

    @pytest.mark.parametrize("scale", [1e-12, 1e15])
    def test_the_size_of_a_row_does_not_matter(self, scale):
        x, weight = random(2, 64), random(64)
        close(triton_norm.add_rms_norm(x * scale, None, weight, 0.0), twins.add_rms_norm(x, None, weight, 0.0))

    def test_no_rows_are_fine(self):
        assert triton_norm.add_rms_norm(random(0, 64), None, random(64), 1e-5).shape == (0, 64)

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="contiguous rows of 64"):
            triton_norm.add_rms_norm(random(2, 65), None, random(64), 1e-5)
        with pytest.raises(ValueError, match="delta"):
            triton_norm.add_rms_norm(random(2, 64), random(1, 64), random(64), 1e-5)


class TestSiluMul:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("inner", [1, 64, 1300])
    def test_agrees_with_its_twin(self, dtype, inner):
        gate_up = random(3, 2 * inner, dtype=dtype) * 3
        close(triton_gate.silu_mul(gate_up), twins.silu_mul(gate_up))

    def test_far_from_zero_the_gate_is_open_or_shut(self):
        gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
        close(triton_gate.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 200.0, 2e4]], device=DEVICE))

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="two halves"):
            triton_gate.silu_mul(random(2, 5))


class TestRotateStore:
    CELLS = (17, 18, -1, 0, 63)
    """One token is not stored."""

    def parts(self, qkv, heads, kv_heads, dim):
        parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        return [part.unflatten(1, (-1, dim)).transpose(0, 1) for part in parts]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(4, 2, 64, 64), (7, 1, 80, 80), (3, 3, 96, 24)])
    def test_agrees_with_its_twins(self, dtype, normed, heads, kv_heads, dim, rotated):
        ours, theirs = (cache_of(dim, dtype, kv_heads=kv_heads) for _ in range(2))
        cells = torch.tensor(self.CELLS, device=DEVICE)
        qkv = random(len(cells), (heads + 2 * kv_heads) * dim, dtype=dtype)
        cosine, sine = random(len(cells), rotated), random(len(cells), rotated)
        norms = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if normed else None
        queries, keys, values = (part.clone() for part in self.parts(qkv, heads, kv_heads, dim))
        kept = cells >= 0
        rotated_parts = [
            twins.rotate(part, cosine, sine, norm, 1e-5)
            for part, norm in zip((queries, keys), norms or (None, None), strict=True)
        ]
        theirs.store(0, rotated_parts[1][:, kept], values[:, kept], cells[kept])
        triton_store.rotate_store(ours.layer(0), qkv, cosine, sine, cells, heads=heads, norms=norms, eps=1e-5)
        close(self.parts(qkv, heads, kv_heads, dim)[0], rotated_parts[0])
        close(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (3, 80)])
    def test_storing_alone(self, dtype, kv_heads, dim):
        ours, theirs = (cache_of(dim, dtype, kv_heads=kv_heads) for _ in range(2))
        cells = torch.tensor(self.CELLS, device=DEVICE)
        keys, values = (random(len(cells), kv_heads, dim, dtype=dtype).transpose(0, 1) for _ in range(2))
        kept = cells >= 0
        theirs.store(0, keys[:, kept], values[:, kept], cells[kept])
        triton_store.store(ours.layer(0), keys, values, cells)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)

    def test_what_does_not_fit_is_refused(self):
        layer, cells = cache_of(64).layer(0), torch.zeros(3, dtype=torch.int64, device=DEVICE)
        with pytest.raises(ValueError, match="3 cells"):
            triton_store.store(layer, random(2, 4, 64), random(2, 4, 64), cells)
        with pytest.raises(ValueError, match="float16 does not go"):
            triton_store.store(layer, *(random(2, 3, 64, dtype=torch.float16) for _ in range(2)), cells)
        with pytest.raises(ValueError, match="int64"):
            triton_store.store(layer, random(2, 3, 64), random(2, 3, 64), cells.int())
        with pytest.raises(ValueError, match="8 heads of 64"):
            triton_store.rotate_store(layer, random(3, 64), random(3, 64), random(3, 64), cells, heads=4)
        with pytest.raises(ValueError, match="angles"):
            triton_store.rotate_store(layer, random(3, 512), random(3, 128), random(3, 128), cells, heads=4)


class TestCompress:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [64, 80])
    @pytest.mark.parametrize("compressed", [(0,), ()], ids=["fp8", "kept"])
    def test_makes_the_bits_that_its_twin_makes(self, dtype, dim, compressed):
        """Vectors from tiny to the largest, a zero one, and exact ties between two codes."""
        ours, theirs = (cache_of(dim, dtype, hot_window=HotWindow(1, 1), compressed=compressed) for _ in range(2))
        sizes = torch.logspace(-6, 4, 16, device=DEVICE)
        keys, values = random(*ours.keys.shape) * sizes, random(*ours.values.shape) * sizes[:, None]
        keys[..., 3], values[..., 3, :] = 0, 0
        ties = torch.tensor([448.0, 17.0, 19.0, -25.0, 2**-10, 3 * 2**-10, -5 * 2**-10, 464.0], device=DEVICE)
        keys[..., :8, 5], values[..., 7, :8] = ties, ties
        for cache in (ours, theirs):
            cache.keys.copy_(keys)
            cache.values.copy_(values)
        moves = torch.tensor([[0, 3], [3, 0], [1, 1]], dtype=torch.int32, device=DEVICE)
        triton_compress.compress(ours.cold_layers(0), moves)
        layer_cache.compress(theirs.layer(0), moves.long())
        for name in ("keys", "values", "key_scales", "value_scales"):
            one, other = (getattr(cache.layer(0).cold, name) for cache in (ours, theirs))
            assert (one is None) == (other is None) == (not compressed and "scales" in name)
            assert one is None or torch.equal(one, other)

    def test_a_move_of_a_negative_block_does_nothing(self):
        ours, theirs = (cache_of(64, hot_window=HotWindow(1, 1)) for _ in range(2))
        for cache in (ours, theirs):
            cache.keys.fill_(2)
            cache.values.fill_(3)
        moves = torch.tensor([[-1, -1], [1, 2], [-1, 0]], dtype=torch.int32, device=DEVICE)
        triton_compress.compress(ours.cold_layers(0), moves)
        layer_cache.compress(theirs.layer(0), moves[1:2].long())
        assert torch.equal(ours.layer(0).cold.keys, theirs.layer(0).cold.keys)
        assert torch.equal(ours.layer(0).cold.value_scales, theirs.layer(0).cold.value_scales)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
    def test_a_vector_with_what_is_no_number_gets_the_scale_nan(self, dtype, bad):
        ours, theirs = (cache_of(80, dtype, hot_window=HotWindow(1, 1)) for _ in range(2))
        keys, values = random(*ours.keys.shape, dtype=dtype), random(*ours.values.shape, dtype=dtype)
        for component, token in ((0, 0), (79, 3), (slice(None), 15)):
            keys[0, 0, 0, component, token] = values[0, 1, 3, token, component] = bad
        for cache in (ours, theirs):
            cache.keys.copy_(keys)
            cache.values.copy_(values)
        moves = torch.tensor([[0, 1], [3, 0]], dtype=torch.int32, device=DEVICE)
        triton_compress.compress(ours.cold_layers(0), moves)
        layer_cache.compress(theirs.layer(0), moves.long())
        for name in ("key_scales", "value_scales"):
            one, other = (getattr(cache.layer(0).cold, name) for cache in (ours, theirs))
            assert one.isnan().sum() == 3
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)

    def test_what_does_not_fit_is_refused(self):
        moves = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match="int64"):
            triton_compress.compress(cache_of(64, hot_window=HotWindow(1, 1)).cold_layers(0), moves.long())

    @pytest.mark.parametrize("compressed", [None, (1,), (0, 2)])
    def test_all_layers_of_one_form_take_one_launch(self, compressed, monkeypatch):
        ours, theirs = (cache_of(64, layers=3, hot_window=HotWindow(1, 1), compressed=compressed) for _ in range(2))
        keys, values = random(*ours.keys.shape), random(*ours.values.shape)
        for cache in (ours, theirs):
            cache.keys.copy_(keys)
            cache.values.copy_(values)
        moves, launches, compress = np.array([[0, 3], [3, 0]], np.int32), [], triton_compress.compress
        monkeypatch.setattr(gpu, "usable", lambda *_: True)
        monkeypatch.setattr(triton_compress, "compress", lambda *given: (launches.append(given), compress(*given)))
        ours.compress(moves)
        assert len(launches) == (1 if compressed is None else 2)
        for number in range(3):
            layer_cache.compress(theirs.layer(number), torch.from_numpy(moves).long().to(DEVICE))
            one, other = (cache.layer(number).cold for cache in (ours, theirs))
            for name in ("keys", "values", "key_scales", "value_scales"):
                made, expected = getattr(one, name), getattr(other, name)
                assert made is expected is None or torch.equal(made, expected)


@triton.jit
def _decode_all(out, words, count: tl.constexpr, dtype: tl.constexpr, native: tl.constexpr):
    x = decode(tl.load(words + tl.arange(0, count))[None, :], dtype, native)
    tl.store(out + tl.arange(0, 4 * count)[None, :], x)


@triton.jit
def _encode_all(out, x, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, encode(tl.load(x + at), native))


class TestFp8:
    """Both ways of converting, as far as the device has them, are torch's to the bit."""

    WAYS = sorted({False, NATIVE})

    @pytest.mark.parametrize("native", WAYS)
    @pytest.mark.parametrize(("dtype", "name"), [(torch.float32, tl.float32), (torch.float16, tl.float16)], ids=str)
    def test_every_code_becomes_its_number(self, native, dtype, name):
        codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
        out = torch.empty(256, dtype=dtype, device=DEVICE)
        _decode_all[1,](out, codes.view(torch.int32), 64, name, native)
        expected = codes.view(torch.float8_e4m3fn).to(dtype)
        finite = expected.isfinite()
        assert finite.sum() == 254
        assert torch.equal(out[finite], expected[finite])

    @pytest.mark.parametrize("native", WAYS)
    def test_numbers_are_rounded_to_the_nearest_code_and_ties_to_the_even_one(self, native):
        exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = (exact[1:] + exact[:-1]) / 2
        beside = [torch.nextafter(ties, torch.tensor(math.inf * sign)) for sign in (1, -1)]
        spread = torch.randn(2000) * torch.logspace(-5, 2.5, 2000)
        x = torch.cat([exact, ties, *beside, spread, torch.tensor([1e-45, 1e-30, 448.0])]).clamp(-448, 448)
        x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 8192 - 2 * len(x))).to(DEVICE)
        out = torch.empty(8192, dtype=torch.uint8, device=DEVICE)
        _encode_all[1,](out, x, 8192, native)
        assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))


class TestOnAGpu:
    pytestmark = NEEDS_GPU

    def test_norms_and_gates_in_bfloat16(self):
        x, delta, weight = (random(*shape, dtype=torch.bfloat16) for shape in ((300, 8192), (300, 8192), (8192,)))
        ours, theirs = x.clone(), x.clone()
        close(triton_norm.add_rms_norm(ours, delta, weight, 1e-5), twins.add_rms_norm(theirs, delta, weight, 1e-5))
        assert torch.equal(ours, theirs)
        gate_up = random(300, 28672, dtype=torch.bfloat16)
        close(triton_gate.silu_mul(gate_up), twins.silu_mul(gate_up))

    @pytest.mark.parametrize("normed", [False, True])
    def test_rotating_and_storing_in_bfloat16(self, normed):
        TestRotateStore().test_agrees_with_its_twins(torch.bfloat16, normed, 32, 8, 128, 128)

    @pytest.mark.parametrize("dim", [64, 80, 128, 256])
    def test_compressing_bfloat16(self, dim):
        TestCompress().test_makes_the_bits_that_its_twin_makes(torch.bfloat16, dim, (0,))
