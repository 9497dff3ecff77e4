"""The tensors of one layer of the KV cache, as kernels take them, and their compression in plain torch.

`kv_cache` owns the tensors and decides what is in them. The last block of each pool stays zero.
"""

import math
from dataclasses import dataclass

import torch

_E4M3_MAX = 448.0
_MIN_PEAK = 1e-30
"""Lower bound of a vector's largest magnitude, so that its scale and the inverse are finite."""


@dataclass(frozen=True)
class ColdLayer:
    """A layer's cold blocks."""

    keys: torch.Tensor
    """[kv heads, cold blocks + 1, head dim, 16]: bytes in e4m3, or the model's dtype where the layer is not
    compressed."""
    values: torch.Tensor
    """[kv heads, cold blocks + 1, 16, head dim]"""
    key_scales: torch.Tensor | None
    """[kv heads, cold blocks + 1, 16], float32: a component is its code times its token's scale. None: the layer is not
    compressed."""
    value_scales: torch.Tensor | None
    """As `key_scales`; the same tensor where values are a part of keys."""

    def at(self, place: int | slice) -> "ColdLayer":
        """A part of layers that have their number in front of each shape."""
        key_scales, value_scales = (
            None if each is None else each[place] for each in (self.key_scales, self.value_scales)
        )
        return ColdLayer(self.keys[place], self.values[place], key_scales, value_scales)


@dataclass(frozen=True)
class LayerCache:
    """A layer's keys and values."""

    keys: torch.Tensor
    """[kv heads, blocks + 1, head dim, 16]"""
    values: torch.Tensor
    """[kv heads, blocks + 1, 16, head dim]; of a latent: a view of the keys [kv heads, blocks + 1, 16, latent]."""
    cold: ColdLayer | None
    latent: int = 0
    """As in `KvCache`."""


@dataclass(frozen=True)
class ColdLayers:
    """Layers whose cold blocks have one form, as one launch makes them of the hot ones."""

    numbers: torch.Tensor
    """[n], int32: the layers, on the device."""
    keys: torch.Tensor
    """[all layers, kv heads, blocks + 1, head dim, 16]"""
    values: torch.Tensor
    """[all layers, kv heads, blocks + 1, 16, head dim]"""
    cold: ColdLayer
    """With [n] in front of each shape."""
    latent: int = 0
    """As in `KvCache`."""

    def at(self, place: int) -> "ColdLayers":
        """One of the layers."""
        numbers, cold = self.numbers[place : place + 1], self.cold.at(slice(place, place + 1))
        return ColdLayers(numbers, self.keys, self.values, cold, self.latent)


def compress(layer: LayerCache, moves: torch.Tensor) -> None:
    """Compress full hot blocks to cold ones, in plain torch, with the same bits as the kernels.

    Args:
        layer: a layer that has cold blocks.
        moves: [n, 2], int64: hot blocks and cold ones.
    """
    cold = layer.cold
    assert cold is not None
    keys = layer.keys, cold.keys, cold.key_scales, 2
    values = layer.values, cold.values, cold.value_scales, 3
    for hot, target, scales, axis in (keys,) if layer.latent else (keys, values):
        block = hot.index_select(1, moves[:, 0])
        if scales is None:
            target[:, moves[:, 1]] = block
        else:
            target[:, moves[:, 1]], scales[:, moves[:, 1]] = quantize(block, axis)


def quantize(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize vectors along `axis` to e4m3: codes as bytes, and scales in float32 without that axis. The largest
    magnitude becomes 448; the others are rounded to the nearest code, ties to even. A vector with NaN or infinity has
    the scale NaN, and codes without meaning: what is computed with it is NaN, and ends its request.
    """
    x = x.float()
    peaks = x.abs().amax(axis).clamp_min(_MIN_PEAK)
    peaks = peaks.masked_fill_(peaks.isinf(), math.nan)
    # Not number / tensor: torch computes that as a product with the reciprocal, which rounds differently.
    factors = peaks.new_tensor(_E4M3_MAX) / peaks
    scaled = (x * factors.unsqueeze(axis)).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), peaks * (1 / _E4M3_MAX)
