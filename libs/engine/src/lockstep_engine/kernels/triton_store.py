"""Stores keys and values in the hot blocks of the paged cache, in Triton. One kernel takes them from a layer's merged
projections and rotates queries and keys first.
"""

import torch
import triton
import triton.language as tl

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.layer_cache import LayerCache

_BLOCK = tl.constexpr(BLOCK_SIZE)
_HEADS = 8
"""Heads that one program rotates."""


@triton.jit(do_not_specialize=["hot_blocks"])
def _store(
    keys, values, hot_blocks, k, k_head_stride, k_token_stride, v, v_head_stride, v_token_stride, cells,
    kv_heads: tl.constexpr, heads_pad: tl.constexpr, dim: tl.constexpr, dim_pad: tl.constexpr, has_values: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + token)
    if cell >= 0:
        head = tl.arange(0, heads_pad)[:, None]
        d = tl.arange(0, dim_pad)[None, :]
        inside = (head < kv_heads) & (d < dim)
        piece = (head.to(tl.int64) * hot_blocks + cell // _BLOCK) * (_BLOCK * dim)
        key = tl.load(k + head * k_head_stride + token * k_token_stride + d, mask=inside)
        tl.store(keys + piece + d * _BLOCK + cell % _BLOCK, key, mask=inside)
        if has_values:
            value = tl.load(v + head * v_head_stride + token * v_token_stride + d, mask=inside)
            tl.store(values + piece + cell % _BLOCK * dim + d, value, mask=inside)


@triton.jit
def _put(
    x, d, qkv, qkv_at, keys, values, piece, offset, is_query, is_key, is_value, dim: tl.constexpr, inside
):  # fmt: skip
    """Store components d of rows of heads: queries in place, keys and values in the cache."""
    tl.store(qkv + qkv_at + d, x, mask=inside & is_query)
    tl.store(keys + piece + d * _BLOCK + offset, x, mask=inside & is_key)
    tl.store(values + piece + offset * dim + d, x, mask=inside & is_value)


@triton.jit(do_not_specialize=["hot_blocks"])
def _rotate_store(
    qkv, cosine, sine, q_norm, k_norm, eps, keys, values, hot_blocks, cells,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, rotated: tl.constexpr,
    half_pad: tl.constexpr, rest_pad: tl.constexpr, block_h: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # Rows of heads: first all queries', then all keys', then all values'.
    head = (tl.program_id(1) * block_h + tl.arange(0, block_h))[:, None]
    known = head < heads + 2 * kv_heads
    is_query = head < heads
    is_rotated = head < heads + kv_heads
    qkv_at = token * ((heads + 2 * kv_heads) * dim) + head * dim
    half: tl.constexpr = rotated // 2
    d = tl.arange(0, half_pad)[None, :]
    inside = known & (d < half)
    first = tl.load(qkv + qkv_at + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + qkv_at + half + d, mask=inside, other=0.0).to(tl.float32)
    rest_d = rotated + tl.arange(0, rest_pad)[None, :]
    rest_inside = known & (rest_d < dim)
    rest = tl.load(qkv + qkv_at + rest_d, mask=rest_inside, other=0.0).to(tl.float32)
    if normed:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.where(is_rotated, tl.rsqrt(squares / dim + eps)[:, None], 1.0)
        first = _normed(first, factor, q_norm, k_norm, d, is_query, is_rotated & (d < half), qkv.dtype.element_ty)
        second = _normed(
            second, factor, q_norm, k_norm, half + d, is_query, is_rotated & (d < half), qkv.dtype.element_ty
        )
        rest = _normed(
            rest, factor, q_norm, k_norm, rest_d, is_query, is_rotated & (rest_d < dim), qkv.dtype.element_ty
        )
    angles = token * rotated + d
    # Values are not rotated.
    cos_first = tl.load(cosine + angles, mask=(d < half) & is_rotated, other=1.0).to(tl.float32)
    cos_second = tl.load(cosine + angles + half, mask=(d < half) & is_rotated, other=1.0).to(tl.float32)
    sin_first = tl.load(sine + angles, mask=(d < half) & is_rotated, other=0.0).to(tl.float32)
    sin_second = tl.load(sine + angles + half, mask=(d < half) & is_rotated, other=0.0).to(tl.float32)
    cell = tl.load(cells + token)
    kept = cell >= 0
    cell = tl.maximum(cell, 0)
    kv_head = tl.where(is_rotated, head - heads, head - heads - kv_heads)
    piece = (kv_head.to(tl.int64) * hot_blocks + cell // _BLOCK) * (_BLOCK * dim)
    offset = cell % _BLOCK
    is_key = is_rotated & (head >= heads) & kept
    is_value = known & (head >= heads + kv_heads) & kept
    dtype = qkv.dtype.element_ty
    rotated_first = (first * cos_first - second * sin_first).to(dtype)
    rotated_second = (second * cos_second + first * sin_second).to(dtype)
    _put(rotated_first, d, qkv, qkv_at, keys, values, piece, offset, is_query, is_key, is_value, dim, inside)
    _put(rotated_second, half + d, qkv, qkv_at, keys, values, piece, offset, is_query, is_key, is_value, dim,
         inside)  # fmt: skip
    if rotated < dim:
        _put(rest.to(dtype), rest_d, qkv, qkv_at, keys, values, piece, offset, is_query, is_key, is_value, dim,
             rest_inside)  # fmt: skip


@triton.jit
def _normed(x, factor, q_norm, k_norm, d, is_query, inside, dtype: tl.constexpr):
    weight = tl.load(q_norm + d, mask=inside & is_query, other=0.0).to(tl.float32)
    weight += tl.load(k_norm + d, mask=inside & (is_query == 0), other=0.0).to(tl.float32)
    return tl.where(inside, (x * factor * weight).to(dtype).to(tl.float32), x)


def store(layer: LayerCache, keys: torch.Tensor, values: torch.Tensor, cells: torch.Tensor) -> None:
    """Put the step's keys and values into hot blocks. Its twin is `KvCache.store`.

    Args:
        layer: keys [kv heads, blocks, dim, 16], values [kv heads, blocks, 16, dim], contiguous; with a latent the
            keys alone.
        keys, values: [kv heads, tokens, dim], last stride 1, of the cache's type. With a latent values are not looked
            at.
        cells: [tokens], int64, as in `KvCache`: block * 16 + offset; negative: the token is not stored.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    kv_heads, hot_blocks, dim, _ = layer.keys.shape
    tokens = len(cells)
    if layer.latent:
        values = keys
    if not (keys.shape == values.shape == (kv_heads, tokens, dim) and keys.stride(2) == values.stride(2) == 1):
        raise ValueError(f"store: keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit {tokens} cells")
    _check_cache("store", layer, keys.dtype, cells)
    if tokens:
        # A single head's stride means nothing, and may depend on the number of tokens.
        key_stride, value_stride = (each.stride(0) if kv_heads > 1 else dim for each in (keys, values))
        _store[tokens,](
            layer.keys, layer.values, hot_blocks,
            keys, key_stride, keys.stride(1), values, value_stride, values.stride(1), cells,
            kv_heads=kv_heads, heads_pad=triton.next_power_of_2(kv_heads),
            dim=dim, dim_pad=triton.next_power_of_2(dim), has_values=not layer.latent,
            num_warps=1 if kv_heads * dim <= 1024 else 4,
        )  # fmt: skip


def rotate_store(
    layer: LayerCache,
    qkv: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cells: torch.Tensor,
    *,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries in place, and store rotated keys and values in hot blocks. Its twins are `rotate` in
    `tests/twins.py` and `KvCache.store`.

    Args:
        layer: as for `store`.
        qkv: [tokens, (heads + 2 * kv heads) * dim], contiguous: queries, keys, values. Its keys do not change.
        cosine, sine: [tokens, rotated], contiguous; the first `rotated` (even) components are rotated, by halves.
        cells: as for `store`.
        heads: number of query heads.
        norms: weights [dim] of the norms of queries and keys before they are rotated, or None.
        eps: added to the mean of squares in these norms.

    Raises:
        ValueError: a shape, type or layout is not as above.
    """
    if layer.latent:
        raise ValueError("rotate_store: values are a part of keys")
    kv_heads, hot_blocks, dim, _ = layer.keys.shape
    tokens, rotated = cosine.shape
    total = heads + 2 * kv_heads
    if qkv.shape != (tokens, total * dim) or not qkv.is_contiguous() or len(cells) != tokens:
        raise ValueError(f"rotate_store: qkv {tuple(qkv.shape)} is not {tokens} tokens of {total} heads of {dim}")
    if (
        sine.shape != cosine.shape
        or rotated % 2
        or rotated > dim
        or not (cosine.is_contiguous() and sine.is_contiguous())
    ):
        raise ValueError(
            f"rotate_store: angles {tuple(cosine.shape)} and {tuple(sine.shape)} do not fit heads of {dim}"
        )
    if norms is not None and any(each.shape != (dim,) or not each.is_contiguous() for each in norms):
        raise ValueError(f"rotate_store: norms are not of width {dim}")
    _check_cache("rotate_store", layer, qkv.dtype, cells)
    if tokens:
        q_norm, k_norm = norms or (qkv, qkv)
        _rotate_store[tokens, triton.cdiv(total, _HEADS)](
            qkv, cosine, sine, q_norm, k_norm, eps, layer.keys, layer.values, hot_blocks, cells,
            heads=heads, kv_heads=kv_heads, dim=dim, rotated=rotated,
            half_pad=triton.next_power_of_2(rotated // 2), rest_pad=triton.next_power_of_2(max(1, dim - rotated)),
            block_h=_HEADS, normed=norms is not None, num_warps=2,
        )  # fmt: skip


def _check_cache(caller: str, layer: LayerCache, dtype: torch.dtype, cells: torch.Tensor) -> None:
    kv_heads, blocks, dim, size = layer.keys.shape
    if size != BLOCK_SIZE or layer.values.shape != (kv_heads, blocks, BLOCK_SIZE, layer.latent or dim):
        raise ValueError(
            f"{caller}: keys {tuple(layer.keys.shape)} and values {tuple(layer.values.shape)} do not match"
        )
    if not (layer.keys.is_contiguous() and (layer.latent or layer.values.is_contiguous())):
        raise ValueError(f"{caller}: the cache is not contiguous")
    if not (dtype == layer.keys.dtype == layer.values.dtype):
        raise ValueError(f"{caller}: {dtype} does not go into a cache of {layer.keys.dtype}")
    if cells.dtype is not torch.int64 or not cells.is_contiguous():
        raise ValueError(f"{caller}: cells are not contiguous int64")
