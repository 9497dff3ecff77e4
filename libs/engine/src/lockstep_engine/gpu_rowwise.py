"""The operations of `rowwise` on a GPU, by Triton kernels: a row's bits depend on that row alone.

`interception` puts them in place of torch's while a model runs in the exact mode. torch's own choose how they split a
sum by the number of rows. Element-wise functions stay torch's, because each element has an operation of its own.
"""

import torch
import triton

from lockstep_engine.kernels import triton_linear, triton_rows
from lockstep_engine.kernels.triton_norm import add_rms_norm


def serves(x: torch.Tensor) -> bool:
    """Whether the kernels compute on this tensor: on a GPU, and anywhere in Triton's interpreter."""
    return x.is_cuda or bool(triton.knobs.runtime.interpret)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [..., in] by weight [out, in], transposed, and add bias [out] → [..., out], rounded once."""
    flat = x.reshape(1, -1, x.shape[-1])
    return triton_linear.product(flat, weight.t().unsqueeze(0), bias).view(*x.shape[:-1], weight.shape[0])


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [batch, rows, in] by weight [batch, in, out] → [batch, rows, out], in the dtype of `x`."""
    return triton_linear.product(x, weight)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in the dtype of `x`."""
    return triton_rows.softmax(x)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, in the dtype of `x`."""
    return triton_rows.sum_rows(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Divide x by the root mean square of its last dimension and multiply by weight, in the dtype of `x`."""
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    return add_rms_norm(x.contiguous(), None, weight.contiguous(), eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation * weight + bias over the last dimension, in the dtype of `x`."""
    wide, width = x.float(), x.shape[-1]
    centred = wide - (sum_rows(wide) / width).unsqueeze(-1)
    out = centred * torch.rsqrt((sum_rows(centred * centred) / width).unsqueeze(-1) + eps)
    out = out if weight is None else out * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)
