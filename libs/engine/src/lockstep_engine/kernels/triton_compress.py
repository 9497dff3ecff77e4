"""Makes cold blocks of hot ones, in Triton: e4m3 codes and a scale for each token and head, with the same bits as
`layer_cache.quantize`.
"""

import torch
import triton
import triton.language as tl

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels import triton_fp8
from lockstep_engine.kernels.triton_fp8 import encode
from lockstep_engine.layer_cache import ColdLayers

_BLOCK = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _quantize(x, axis: tl.constexpr, native: tl.constexpr):
    # The bits of magnitudes, as integers, have the order of the numbers, above which comes infinity and then NaN: a
    # maximum of floats would lose NaN.
    sizes = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    peaks = tl.maximum(sizes.to(tl.float32, bitcast=True), 1e-30)
    peaks = tl.where(sizes < 0x7F800000, peaks, float("nan"))
    factors = tl.div_rn(tl.full(peaks.shape, 448.0, tl.float32), peaks)
    scaled = x * tl.expand_dims(factors, axis)
    codes = encode(tl.minimum(tl.maximum(scaled, -448.0), 448.0), native)
    return codes, peaks * (1.0 / 448.0)


# One build serves any number of blocks and heads, and a layer alone, whose number lies anywhere in a tensor.
@triton.jit(do_not_specialize=["hot_blocks", "cold_blocks", "kv_heads"], do_not_specialize_on_alignment=["numbers"])
def _compress(
    numbers, keys, values, hot_blocks, cold_keys, cold_values, key_scales, value_scales, cold_blocks, moves, kv_heads,
    dim: tl.constexpr, dim_pad: tl.constexpr, scaled: tl.constexpr, native: tl.constexpr, has_values: tl.constexpr,
):  # fmt: skip
    move, cold_head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # heads of all the layers are counted together
    hot_head = tl.load(numbers + cold_head // kv_heads).to(tl.int64) * kv_heads + cold_head % kv_heads
    hot_block = tl.load(moves + 2 * move)
    if hot_block >= 0:
        source = hot_head * hot_blocks + hot_block
        target = cold_head * cold_blocks + tl.load(moves + 2 * move + 1)
        d = tl.arange(0, dim_pad)
        offset = tl.arange(0, _BLOCK)
        key_at = d[:, None] * _BLOCK + offset[None, :]
        key_inside = (d < dim)[:, None] & (offset < _BLOCK)[None, :]
        k = tl.load(keys + source * (dim * _BLOCK) + key_at, mask=key_inside, other=0.0)
        value_at = offset[:, None] * dim + d[None, :]
        value_inside = (offset < _BLOCK)[:, None] & (d < dim)[None, :]
        if has_values:
            v = tl.load(values + source * (dim * _BLOCK) + value_at, mask=value_inside, other=0.0)
        if scaled:
            k, k_scales = _quantize(k.to(tl.float32), 0, native)
            tl.store(key_scales + target * _BLOCK + offset, k_scales)
        tl.store(cold_keys + target * (dim * _BLOCK) + key_at, k, mask=key_inside)
        if has_values:
            if scaled:
                v, v_scales = _quantize(v.to(tl.float32), 1, native)
                tl.store(value_scales + target * _BLOCK + offset, v_scales)
            tl.store(cold_values + target * (dim * _BLOCK) + value_at, v, mask=value_inside)


def compress(layers: ColdLayers, moves: torch.Tensor) -> None:
    """Make cold blocks of full hot ones in all these layers. Its twin is `layer_cache.compress`.

    Args:
        layers: hot keys [all layers, kv heads, blocks, dim, 16] and values [all layers, kv heads, blocks, 16, dim] in
            float16, bfloat16 or float32; cold ones [n, kv heads, cold blocks, …] in uint8 with float32 scales
            [n, kv heads, cold blocks, 16], or in the hot blocks' type without. All contiguous; with a latent the keys
            alone.
        moves: [m, 2], int32, contiguous: the hot block and the cold one; a negative hot block: nothing is done.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    cold = layers.cold
    if moves.dtype is not torch.int32 or moves.dim() != 2 or not moves.is_contiguous():
        raise ValueError(f"compress: moves {tuple(moves.shape)} of {moves.dtype}")
    _, kv_heads, hot_blocks, dim, _ = layers.keys.shape
    key_scales, value_scales = cold.key_scales, cold.value_scales
    scaled = key_scales is not None and value_scales is not None
    if cold.keys.dtype != (torch.uint8 if scaled else layers.keys.dtype):
        raise ValueError(f"compress: cold blocks of {cold.keys.dtype}, scales: {scaled}")
    if len(moves):
        _compress[len(moves), len(layers.numbers) * kv_heads](
            layers.numbers, layers.keys, layers.values, hot_blocks, cold.keys, cold.values,
            layers.keys if key_scales is None else key_scales,
            layers.keys if value_scales is None else value_scales,
            cold.keys.shape[2], moves, kv_heads,
            dim=dim, dim_pad=triton.next_power_of_2(dim), scaled=scaled, native=triton_fp8.native(),
            has_values=not layers.latent, num_warps=4,
        )  # fmt: skip
