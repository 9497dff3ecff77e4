"""Twins of the Triton kernels: what each computes, in plain torch, one function each. The tests compare with them.

They are written to be read, not to be fast, and work on any device and float type. The twins of storing and compressing
are `KvCache.store` and `layer_cache.compress`, which also run where there are no kernels.
"""

import torch
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kernels.codes import Codes
from lockstep_engine.kernels.triton_attention import Paged
from lockstep_engine.layer_cache import ColdLayer, LayerCache
from lockstep_engine.quantized.coded import unpack
from lockstep_engine.scoring import Scoring
from torch.nn import functional


def attend(queries: torch.Tensor, layer: LayerCache, paged: Paged, scoring: Scoring) -> torch.Tensor:
    """Attention of [heads, tokens, dim] over the cache: [tokens, heads, width of values]. Rows of no sequence are 0."""
    heads, tokens, dim = queries.shape
    kv_heads, hot_blocks = layer.keys.shape[:2]
    out = queries.new_zeros(tokens, heads, layer.latent or dim)
    numbers = torch.stack([paged.starts, paged.lengths, paged.rows], dim=1).tolist()
    for table, hot_table, (start, length, row) in zip(paged.tables, paged.hot_tables, numbers, strict=True):
        end = start + length
        if end <= 0:
            continue
        every = torch.arange(end, device=queries.device)
        blocks, offsets = every // BLOCK_SIZE, every % BLOCK_SIZE
        position = every[start:, None]
        distance = position // BLOCK_SIZE - blocks
        cold = (blocks >= paged.sink) & (distance > paged.hot_blocks_before)
        seen = every <= position
        if scoring.window is not None:
            seen = seen & (every > position - scoring.window)
        k, v = _tokens(layer, hot_table[blocks], offsets, (seen & ~cold).any(0))
        q = queries[:, row : row + length].float().reshape(kv_heads, -1, length, dim)
        scores = torch.einsum("khqd,knd->khqn", q, k)
        if cold.any():
            cold_k, cold_v = _cold_tokens(layer, table[blocks] - hot_blocks, offsets, (seen & cold).any(0))
            scores = torch.where(cold, torch.einsum("khqd,knd->khqn", q, cold_k), scores)
        scores = _finish(scores.flatten(0, 1) * scoring.scale, scoring, every).masked_fill(~seen, -torch.inf)
        weights = _softmax(scores, scoring.sinks).view(kv_heads, -1, length, end)
        result = torch.einsum("khqn,knd->khqd", weights.masked_fill(cold, 0), v)
        if cold.any():
            result += torch.einsum("khqn,knd->khqd", weights.masked_fill(~cold, 0), cold_v)
        out[row : row + length] = result.flatten(0, 1).transpose(0, 1).to(out.dtype)
    return out


def _tokens(
    layer: LayerCache | ColdLayer, blocks: torch.Tensor, offsets: torch.Tensor, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv heads, n, dim] in float32 as they are stored; 0 where not used, whatever is there."""
    blocks = blocks.long().masked_fill(~used, 0)
    keys, values = (_numbers(each) for each in (layer.keys, layer.values))
    hidden = ~used[None, :, None]
    return keys[:, blocks, :, offsets].transpose(0, 1).masked_fill(hidden, 0), values[:, blocks, offsets].masked_fill(
        hidden, 0
    )


def _cold_tokens(
    layer: LayerCache, blocks: torch.Tensor, offsets: torch.Tensor, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cold = layer.cold
    assert cold is not None
    keys, values = _tokens(cold, blocks, offsets, used)
    if cold.key_scales is None or cold.value_scales is None:
        return keys, values
    blocks = blocks.long().masked_fill(~used, 0)
    scales = (each[:, blocks, offsets].masked_fill(~used, 0) for each in (cold.key_scales, cold.value_scales))
    key_scales, value_scales = scales
    return keys * key_scales[..., None], values * value_scales[..., None]


def _numbers(stored: torch.Tensor) -> torch.Tensor:
    return (stored.view(torch.float8_e4m3fn) if stored.dtype is torch.uint8 else stored).float()


def _finish(scores: torch.Tensor, scoring: Scoring, positions: torch.Tensor) -> torch.Tensor:
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    if scoring.bias is not None:
        scores = scores + scoring.bias[:, None, positions]
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    extra = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add delta to x [..., width] in place; then x over its root mean square, times weight [width]."""
    if delta is not None:
        x += delta
    return functional.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * inner] → silu(first half) * second half, [rows, inner]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """Rotary positions (Su et al. 2021), by halves: x [heads, tokens, dim]; cosine and sine [tokens, rotated], the
    first `rotated` components change. With a norm [dim], x is first divided by its root mean square and multiplied by
    it.
    """
    wide = x.float()
    if norm is not None:
        wide = functional.rms_norm(wide, norm.shape, norm.float(), eps).to(x.dtype).float()
    part, rest = wide[..., : cosine.shape[-1]], wide[..., cosine.shape[-1] :]
    first, second = part.chunk(2, dim=-1)
    rotated = part * cosine.float() + torch.cat([-second, first], dim=-1) * sine.float()
    return torch.cat([rotated, rest], dim=-1).to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, rows, in] x [batch, in, out], summed in float64 and rounded once."""
    out = torch.bmm(x.double(), weight.double())
    return (out if bias is None else out + bias.double()).to(x.dtype)


def grouped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    """Rows [tokens * choices, in] with the weights [experts, out, in] of their experts; none: zeros."""
    experts, out, _ = weight.shape
    flat = chosen.flatten()
    results = torch.zeros(len(flat), out, dtype=x.dtype, device=x.device)
    for expert in range(experts):
        rows = (flat == expert).nonzero()[:, 0]
        own = None if bias is None else bias[expert]
        results[rows] = product(x[rows].unsqueeze(0), weight[expert].t().unsqueeze(0), own)[0]
    return results


def widened(weight: Codes) -> torch.Tensor:
    """The values [out, in] of a weight of codes, float32."""
    numbers = unpack(weight.codes, 4, 1) if weight.packed else weight.codes
    wide = numbers.float() if weight.table is None else weight.table[numbers.long()]
    groups = torch.arange(weight.ins, device=wide.device) // weight.group
    if weight.zeros is not None:
        wide = wide - weight.zeros[groups].t()
    values = (wide - weight.shift) * weight.scales[groups].t()
    if weight.offsets is not None:
        values = values + weight.offsets[groups].t()
    return values * (1 / 127) if weight.per_127 else values


def coded(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, in] x a weight of codes [out, in], transposed: the values are rounded to the type of `x`."""
    return product(x.unsqueeze(0), widened(weight).to(x.dtype).t().unsqueeze(0), bias)[0]
