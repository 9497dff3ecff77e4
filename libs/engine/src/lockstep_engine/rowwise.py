"""Products, sums and element-wise functions on the CPU in which a row's bits depend on that row alone: not on the
number of rows beside it, on its place among them, or on a library's mode.

The compiled kernels compute them. Where they were not built, torch does, in shapes in which it treats every row alike:
products in tiles of a fixed number of rows that a test at first use has shown to be stable on this machine,
element-wise functions on whole vectors. Tensors of 16 bits are computed in float32 and rounded once; only products
without the kernels are left to torch.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.cpu import Function

KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
"""The dispatch key under which `interception` replaces torch's operations. No device here uses it."""
_KEYS = torch._C.DispatchKeySet(KEY)

_TORCH_GRAIN = 16384
"""Up to this number of elements torch uses one thread."""
_TORCH_VECTORS = 32
"""Elements that torch's loops process together: two of the widest vectors."""
_HEIGHTS = (16, 32, 8, 64)
"""Tile heights, in the order tried. Tiles of 16 begin at cache lines."""

_TORCH: dict[Function, Callable[[torch.Tensor], torch.Tensor]] = {
    Function.SIGMOID: torch.sigmoid,
    Function.SILU: functional.silu,
    Function.TANH: torch.tanh,
    Function.GELU: functional.gelu,
    Function.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Function.COSINE: torch.cos,
    Function.SINE: torch.sin,
}


def torchs_own() -> AbstractContextManager[None]:
    """A context in which torch computes the operations that `interception` replaces elsewhere."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_KEYS)
    return guard


def serves(x: torch.Tensor) -> bool:
    """Whether these operations compute on this tensor: on the CPU."""
    return x.is_cpu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [..., in] by weight [out, in], transposed, and add bias [out] → [..., out]."""
    flat = x.reshape(1, -1, x.shape[-1])
    out = product(flat, weight.t().unsqueeze(0)).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [batch, rows, in] by weight [batch, in, out] → [batch, rows, out], in the dtype of `x`."""
    if 0 in x.shape or 0 in weight.shape:
        return x.new_zeros(*x.shape[:2], weight.shape[2])
    if cpu.available(x) and cpu.available(weight):
        if 1 not in weight.stride()[1:]:
            weight = weight.contiguous()
        return cpu.product(x.float().contiguous(), weight).to(x.dtype)
    with torchs_own():
        weight = weight.to(x.dtype)
        return torch.stack([_tiled(each, matrix) for each, matrix in zip(x, weight, strict=True)])


def apply(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Apply a function to each element, in the dtype of `x`."""
    if cpu.available(x):
        return cpu.apply(function, x.float().contiguous()).to(x.dtype)
    with torchs_own():
        count, flat = x.numel(), x.float().reshape(-1)
        padded = functional.pad(flat, (0, _whole_vectors(count, torch.get_num_threads()) - count))
        return _TORCH[function](padded)[:count].view(x.shape).to(x.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in the dtype of `x`."""
    if cpu.available(x):
        return cpu.softmax(x.float().contiguous()).to(x.dtype)
    with torchs_own():
        return torch.softmax(x.contiguous(), dim=-1)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Logarithm of softmax over the last dimension, in float32. Infinite values stay infinite."""
    wide = x.float()
    # The largest probability is 1 / sum(exp(x - max(x))).
    logarithm = softmax(wide).amax(-1, keepdim=True).double().log().float()
    return wide - wide.amax(-1, keepdim=True) + logarithm


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, in the dtype of `x`."""
    if cpu.available(x):
        return cpu.sum_rows(x.float().contiguous()).to(x.dtype)
    with torchs_own():
        flat = x.float().reshape(-1, x.shape[-1])
        rows = flat.expand(2, -1) if len(flat) == 1 else flat  # the sum of a single row is split over threads
        return rows.contiguous().sum(-1)[: len(flat)].view(x.shape[:-1]).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Divide x by the root mean square of its last dimension and multiply by weight, in the dtype of `x`."""
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    if cpu.available(x):
        return cpu.add_rms_norm(x.float().contiguous(), None, weight.float(), eps).to(x.dtype)
    wide = x.float()
    mean = sum_rows(wide * wide).unsqueeze(-1) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation * weight + bias over the last dimension, in the dtype of `x`."""
    if cpu.available(x):
        weight, bias = (None if each is None else each.float().contiguous() for each in (weight, bias))
        return cpu.layer_norm(x.float().contiguous(), weight, bias, eps).to(x.dtype)
    with torchs_own():
        return functional.layer_norm(x.contiguous(), x.shape[-1:], weight, bias, eps)


@cache
def _whole_vectors(count: int, threads: int) -> int:
    """Rounds `count` up so that every thread gets whole vectors, both with all threads and with as many as torch uses
    for this number of elements. torch rounds a partial vector differently.
    """
    while True:
        threads_used = 1 if count <= _TORCH_GRAIN else math.lcm(threads, min(threads, -(-count // (2 * _TORCH_GRAIN))))
        rounded = count + -count % (_TORCH_VECTORS * threads_used)
        if rounded == count:
            return count
        count = rounded


# --- products without the kernels -------------------------------------------------------------------------------------

_heights: dict[tuple[object, ...], int] = {}
"""Stable tile height for each shape, stride, dtype and thread count; 0: no height is stable."""


def _tiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [rows, in] by weight [in, out], by calls that all have the same shape."""
    key = (*weight.shape, *weight.stride(), weight.dtype, torch.get_num_threads())
    height = _heights.get(key)
    if height is None:
        height = _heights[key] = next((each for each in _HEIGHTS if _is_stable(weight, each)), 0)
    if height == 0:  # each row in the first place of a tile of its own
        return torch.cat([torch.mm(row.expand(_HEIGHTS[0], -1).contiguous(), weight)[:1] for row in torch.split(x, 1)])
    rows = len(x)
    padded = functional.pad(x, (0, 0, 0, -rows % height)).contiguous()
    return torch.cat([torch.mm(tile, weight) for tile in torch.split(padded, height)])[:rows]


def _is_stable(weight: torch.Tensor, height: int) -> bool:
    """Whether a product of `height` rows gives a row the same bits in each place, whatever the other rows hold."""
    generator = torch.Generator().manual_seed(height)
    x = torch.randn(height, weight.shape[0], generator=generator).to(weight.dtype)
    expected = torch.mm(x, weight)
    moved = torch.mm(x.roll(1, 0).contiguous(), weight).roll(-1, 0)  # each row's place is compared to the next one
    alone = torch.mm(x[:1].repeat(height, 1), weight)
    return torch.equal(moved, expected) and torch.equal(alone, expected[:1].expand_as(alone))
