"""Replaces torch's operations while a model's own code runs, on the CPU by those of `rowwise`, on a GPU in its exact
mode by those of `gpu_rowwise`, so that a row's bits do not depend on the other rows.

It replaces the operations that torch or a library may round in different ways: products, sums, softmax, norms and
elementary functions. The others compute each element by operations that IEEE 754 rounds in one way, or move numbers;
the tests check for every architecture which these are. It affects only threads inside `intercepted`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any, Protocol

import torch

from lockstep_engine import rowwise
from lockstep_engine.kernels.cpu import Function


class Operations(Protocol):
    """What takes the place of torch's operations: the module `rowwise` or `gpu_rowwise`."""

    def serves(self, x: torch.Tensor) -> bool:
        """Whether they compute on tensors of this device."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `rowwise.linear`, and so on."""
        ...

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...  # noqa: D102 - see `rowwise`

    def softmax(self, x: torch.Tensor) -> torch.Tensor: ...  # noqa: D102

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor: ...  # noqa: D102

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor: ...  # noqa: D102

    def layer_norm(  # noqa: D102
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...


_here = local()


@contextmanager
def intercepted(operations: Operations = rowwise) -> Iterator[None]:
    """A context in which torch's operations are replaced by these, on this thread."""
    _install()
    _here.operations = operations
    _set(on=True)
    try:
        yield
    finally:
        _set(on=False)


def _ours() -> Operations:
    operations: Operations = _here.operations
    return operations


def _set(*, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(rowwise.KEY, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(rowwise.KEY, on)


@cache
def _install() -> tuple[Any, Any]:
    """Register the replacements, once in a process. They are called only inside `intercepted`."""
    others: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, rowwise.KEY.name)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, replacement in _REPLACEMENTS.items():
        library.impl(name, _guarded(replacement), rowwise.KEY.name)
    return library, others


def _guarded(replacement: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with rowwise.torchs_own():
            return replacement(*args, **kwargs)

    return run


def _is_ours(x: torch.Tensor) -> bool:
    """Whether results on `x` must not depend on other rows. float64 is used only for tables that are made once;
    integers are not rounded.
    """
    return _ours().serves(x) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _is_element_wise_ours(x: torch.Tensor) -> bool:
    """The same for element-wise functions: a GPU computes each element alike, so there they stay torch's."""
    return _ours() is rowwise and _is_ours(x)


def _function(function: Function, own: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def replacement(x: torch.Tensor) -> torch.Tensor:
        return rowwise.apply(function, x) if _is_element_wise_ours(x) else own(x)

    return replacement


def _function_in_place(function: Function, own: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def replacement(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(rowwise.apply(function, x)) if _is_element_wise_ours(x) else own(x)

    return replacement


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if _ours() is not rowwise:
        return torch.nn.functional.gelu(x, approximate=approximate)
    return rowwise.apply(Function.GELU_TANH if approximate == "tanh" else Function.GELU, x)


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    return _ours().softmax(x.transpose(dim, -1)).transpose(dim, -1)


def _inner_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return _softmax(x, dim, torch.float32 if half_to_float else None)


def _sum(
    x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not _is_ours(x if dtype is None else x.new_empty(0, dtype=dtype)):
        return torch.sum(x, dim, keepdim, dtype=dtype)
    x = x if dtype is None else x.to(dtype)
    dims = sorted(each % x.dim() for each in dim or range(x.dim()))
    kept = [each for each in range(x.dim()) if each not in dims]
    rows = x.permute(*kept, *dims).reshape(*(x.shape[each] for each in kept), -1)
    out = _ours().sum_rows(rows)
    return out.view([1 if each in dims else size for each, size in enumerate(x.shape)]) if keepdim else out


def _mean(
    x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    if not _is_ours(x):
        return torch.mean(x, dim, keepdim)
    out = _sum(x.float(), dim, keepdim)
    return (out / (x.numel() / max(out.numel(), 1))).to(x.dtype)


def _layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 - of torch's signature
) -> torch.Tensor:
    weight, bias = (None if each is None else each.reshape(-1) for each in (weight, bias))
    return _ours().layer_norm(x.reshape(*x.shape[: x.dim() - len(shape)], -1), weight, bias, eps).view(x.shape)


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    least = torch.finfo(x.dtype).eps if eps is None else eps
    flat = x.reshape(*x.shape[: x.dim() - len(shape)], -1)
    return _ours().rms_norm(flat, None if weight is None else weight.reshape(-1), least).view(x.shape)


def _matmul(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not _is_ours(x):
        return torch.matmul(x, other)
    if x.dim() == 1:
        return _matmul(x.unsqueeze(0), other).squeeze(-2 if other.dim() > 1 else 0)
    if other.dim() == 1:
        return _matmul(x, other.unsqueeze(1)).squeeze(-1)
    if other.dim() == 2:
        return _ours().linear(x, other.t())
    batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        x.shape[:-2], other.shape[:-2]
    )
    left, right = (each.expand(*batch, *each.shape[-2:]).flatten(0, -3) for each in (x, other))
    return _ours().product(left, right).view(*batch, x.shape[-2], other.shape[-1])


def _bmm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _ours().product(x, other) if _is_ours(x) else torch.bmm(x, other)


def _baddbmm(
    added: torch.Tensor, x: torch.Tensor, other: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return added * beta + _bmm(x, other) * alpha


def _addmm(
    added: torch.Tensor, x: torch.Tensor, other: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return added * beta + _matmul(x, other) * alpha


def _power(x: Any, exponent: Any) -> torch.Tensor:
    """Squares and cubes are computed by multiplication; other powers in float64, then rounded."""
    if isinstance(x, torch.Tensor) and isinstance(exponent, int | float) and exponent in (2, 3):
        return x * x if exponent == 2 else x * x * x
    kinds = [each for each in (x, exponent) if isinstance(each, torch.Tensor)]
    kind = torch.result_type(x, exponent)
    if not kind.is_floating_point or not kinds[0].is_cpu:
        return torch.pow(x, exponent)
    wide = [each.double() if isinstance(each, torch.Tensor) else each for each in (x, exponent)]
    return torch.pow(*wide).to(kind)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _ours().linear(x, weight, bias)


def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    if _ours() is not rowwise:
        return torch.polar(size, angle)
    parts = (rowwise.apply(function, angle) for function in (Function.COSINE, Function.SINE))
    return torch.complex(*(size * each for each in parts))


_FUNCTIONS = {
    "sigmoid": Function.SIGMOID,
    "silu": Function.SILU,
    "tanh": Function.TANH,
    "cos": Function.COSINE,
    "sin": Function.SINE,
}
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **{name: _function(each, getattr(torch.ops.aten, name)) for name, each in _FUNCTIONS.items()},
    **{f"{name}_": _function_in_place(each, getattr(torch.ops.aten, f"{name}_")) for name, each in _FUNCTIONS.items()},
    "gelu": _gelu,
    "softmax.int": _softmax,
    "_softmax": _inner_softmax,
    "sum.dim_IntList": _sum,
    "mean.dim": _mean,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "addmm": _addmm,
    "pow.Tensor_Scalar": _power,
    "pow.Scalar": _power,
    "pow.Tensor_Tensor": _power,
    "polar": _polar,
}
