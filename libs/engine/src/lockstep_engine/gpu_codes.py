"""On a GPU: the weight of a linear layer that stays codes of 8 or 4 bits. A Triton kernel multiplies by it in steps of
any size; torch does where kernels are compared with it, and widens weights for good where no kernel can run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from lockstep_engine.kernels.codes import Codes
from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.quantized.coded import IN_WORD, INTEGERS, Coded, CodeForm, unpack

_WIDENED = 2**24
"""Values that torch widens at once."""


class CodedWeight:
    """A weight [out, in], and the product with it.

    Args:
        weight: int8 [out, in], or int32 [out, in / 8] of packed codes (`quantized.coded.pack`); it is kept.
        scales: [out, groups], float32.
        zeros: shaped like `scales`, of packed codes.
        form: how codes become values.
        bias: [out] or None; it is kept.
        offsets: shaped like `scales`, where the form has them.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        form: CodeForm,
        bias: torch.Tensor | None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        shift, table = 0.0, None
        if zeros is not None and bool((zeros == zeros[0, 0]).all()):
            shift, zeros = float(zeros[0, 0]), None
        if form.table not in (None, INTEGERS):
            table, shift = torch.tensor(form.table, device=weight.device) - shift, 0.0
        ins = weight.shape[1] * (1 if form.table is None else IN_WORD)
        self.codes = Codes(
            weight,
            scales.t().contiguous(),
            form.group or ins,
            None if zeros is None else zeros.t().contiguous(),
            shift,
            table,
            form.per_127,
            None if offsets is None else offsets.t().contiguous(),
        )
        self.bias = bias
        self.by_torch = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] by the weight, transposed, and add the bias → [..., out], rounded once."""
        if self.by_torch:
            return self._product_by_torch(x)
        flat = x.reshape(-1, x.shape[-1])
        return _product()(flat, self.codes, self.bias).view(*x.shape[:-1], self.codes.outs)

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, zero points and offsets."""
        kept = (self.codes.codes, self.codes.scales, self.codes.zeros, self.codes.table, self.codes.offsets)
        return sum(each.nbytes for each in kept if each is not None)

    def values(self, rows: slice) -> torch.Tensor:
        """The values of some outputs [rows, in], float32, by torch."""
        own = self.codes
        zeros = None if own.zeros is None else own.zeros[:, rows].t()
        if own.shift:
            zeros = own.scales.new_full((1, 1), own.shift)
        groups = torch.arange(own.ins, device=own.codes.device) // own.group
        codes = unpack(own.codes[rows], 4, 1) if own.packed else own.codes[rows]
        offsets = None if own.offsets is None else own.offsets[:, rows].t()
        values = Coded(codes, own.scales[:, rows].t(), zeros, groups, own.table, offsets).values()
        return values.mul_(1 / 127) if own.per_127 else values

    def parts(self) -> Iterator[slice]:
        """All outputs, as many at a time as torch widens at once."""
        step = max(1, _WIDENED // self.codes.ins)
        for first in range(0, self.codes.outs, step):
            yield slice(first, min(first + step, self.codes.outs))

    def launch_all(self, dtype: torch.dtype, most_tokens: int) -> None:
        """Launch the kernel in every form that steps of up to so many tokens have."""
        for rows in (1, *(most + 1 for most in PRODUCT_ROWS)):
            if rows <= most_tokens:
                self(torch.zeros(rows, self.codes.ins, dtype=dtype, device=self.codes.codes.device))

    def _product_by_torch(self, x: torch.Tensor) -> torch.Tensor:
        outs = [
            functional.linear(x, self.values(rows).to(x.dtype), None if self.bias is None else self.bias[rows])
            for rows in self.parts()
        ]
        return torch.cat(outs, -1)


@cache
def _product() -> Callable[[torch.Tensor, Codes, torch.Tensor | None], torch.Tensor]:
    """The kernel's."""
    from lockstep_engine.kernels.triton_coded import product  # noqa: PLC0415 - it loads Triton

    return product


def coded_weights(model: nn.Module) -> list[CodedWeight]:
    """Those of a model's layers."""
    kept = (getattr(module, "packed", None) for module in model.modules())
    return [each for each in kept if isinstance(each, CodedWeight)]


def launch_all(model: nn.Module, dtype: torch.dtype, most_tokens: int) -> None:
    """Launch the products of a model's weights of codes once in every form that a step can have, so that none has to be
    built while serving.

    Args:
        model: with its weights on a GPU.
        dtype: of its activations.
        most_tokens: of a step.
    """
    seen = set()
    for weight in coded_weights(model):
        codes = weight.codes
        forms = codes.packed, codes.zeros is None, codes.table is None, codes.per_127, codes.offsets is None
        kind = codes.outs, codes.ins, codes.group, forms, weight.bias is None
        if kind not in seen:
            seen.add(kind)
            weight.launch_all(dtype, most_tokens)


@contextmanager
def codes_by_torch(model: nn.Module) -> Iterator[None]:
    """Meanwhile torch multiplies by a model's weights of codes, which it widens each time, a part after the other."""
    weights = coded_weights(model)
    for each in weights:
        each.by_torch = True
    try:
        yield
    finally:
        for each in weights:
            each.by_torch = False
