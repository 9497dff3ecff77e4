"""Scales of a matrix's inputs, and the operation before it that takes them: the matrix is multiplied by s for each
input, and what gives the input is divided by s. The model stays the same, and other weights are rounded.

Which operation that is depends on the architecture. Modules are proposed by name, and a proposal is used only if the
layer's outputs stay the same with it: so layers with other norms, other orders or other activations are not damaged.
Scales of the proposals are powers of two, which change no bit of a product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_tools.quantization.layers import LayeredModel, Unit, is_router

_ROUTER = "router"
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa"})
_GATED = frozenset({"gate_proj", "up_proj", "gate_up_proj", _ROUTER})
_AFTER_NORMS = (
    ("input_layernorm", _ATTENTION),
    ("input_layernorm", _ATTENTION | _GATED),  # attention and MLP side by side
    ("post_attention_layernorm", _GATED),
    ("pre_feedforward_layernorm", _GATED),
    ("q_a_layernorm", frozenset({"q_b_proj"})),
    ("kv_a_layernorm", frozenset({"kv_b_proj"})),
)
"""Names of norms, and of the modules that may multiply their outputs."""
_AFTER_ROWS = (
    ("v_proj", "o_proj", 1),
    ("qkv_proj", "o_proj", 3),
    ("up_proj", "down_proj", 1),
    ("gate_up_proj", "down_proj", 2),
)
"""Names of modules, those of the modules that may multiply their last outputs, and how many times as many outputs as
the others' inputs they have. With fewer values than queries o_proj has more inputs than v_proj has outputs.
"""
_TOLERANCE = 1e-5
"""Of the mean magnitude of a layer's outputs: what rounding to float32 explains."""


@dataclass(frozen=True)
class Fold:
    """Matrices whose inputs are scaled, and the operation that takes the scales."""

    producer: Unit
    """A norm's weight, or a matrix."""
    outputs: torch.Tensor
    """The part of it that gives the inputs, a view: [inputs], or [inputs, in]."""
    bias: Unit | None
    """The producer's."""
    consumers: tuple[Unit, ...]
    """[out, inputs] each."""
    offset: float = 0.0
    """What a norm adds to its weight (Gemma's: 1)."""

    def apply(self, scales: torch.Tensor) -> None:
        """Scale, in place.

        Args:
            scales: [inputs], float32, positive.
        """
        by_row = scales if self.outputs.dim() == 1 else scales[:, None]
        self.outputs.add_(self.offset).div_(by_row).sub_(self.offset)
        if self.bias is not None:
            self.bias.value[-len(scales) :].div_(scales)
        for consumer in self.consumers:
            consumer.value.mul_(scales)

    @property
    def vectors(self) -> list[Unit]:
        """The norm's weight, and the bias."""
        norm = [self.producer] if self.outputs.dim() == 1 else []
        return norm if self.bias is None else [*norm, self.bias]

    def storable(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The nearest scales with which the producer's vector is a number of its stored type: its rounding is made good
        by the matrices, which are rounded anyway.

        Args:
            scales: [inputs].
            dtype: the stored type of the norm's weight or the matrix's bias.
        """
        if self.outputs.dim() == 1:
            before = self.outputs + self.offset
        elif self.bias is not None:
            before = self.bias.value[-len(scales) :]
        else:
            return scales
        after = (before / scales - self.offset).to(dtype).float() + self.offset
        usable = (after != 0) & after.isfinite()
        return torch.where(usable, before / after, torch.where(before == 0, scales, 1.0))


def find(model: LayeredModel, number: int, compute: Callable[[int], Any]) -> list[Fold]:
    """The folds of a layer, which is loaded.

    Args:
        compute: the layer's outputs for so many windows.
    """
    expected, folds, taken = _states(compute(1)), [], set[str]()
    for proposal in _proposals(model.units(number), model.plain(number), model):
        stored = {consumer.stored for fold in proposal for consumer in fold.consumers}
        if not stored & taken and _is_equal(proposal, expected, compute):
            folds += proposal
            taken |= stored
    return folds


def _is_equal(folds: Sequence[Fold], expected: torch.Tensor, compute: Callable[[int], Any]) -> bool:
    """Whether the layer's outputs stay the same. The weights are the same bits afterwards."""
    vectors = [(unit.value, unit.value.clone()) for fold in folds for unit in (fold.producer, fold.bias) if unit]
    tried = [_powers(len(fold.outputs)) for fold in folds]
    for fold, scales in zip(folds, tried, strict=True):
        fold.apply(scales)
    found = _states(compute(1))
    for fold, scales in zip(folds, tried, strict=True):
        fold.apply(1 / scales)
    for value, before in vectors:
        value.copy_(before)
    return bool((found - expected).abs().mean() <= _TOLERANCE * expected.abs().mean())


def _powers(count: int) -> torch.Tensor:
    exponents = torch.randint(-2, 3, (count,), generator=torch.Generator().manual_seed(count))
    return torch.exp2(exponents.float())


def _states(output: Any) -> torch.Tensor:
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _proposals(units: Sequence[Unit], plain: dict[str, Unit], model: LayeredModel) -> Iterator[list[Fold]]:
    """Folds that are to be tried; those of one proposal together."""
    matrices = [*units, *(each for each in plain.values() if each.value.dim() == 2 and is_router(each.parameter))]
    for name, leaves in _AFTER_NORMS:
        norms = [each for each in plain.values() if _name(each)[1] == name and each.value.dim() == 1]
        for norm in norms:
            width = len(norm.value)
            after = tuple(each for each in matrices if _name(each)[1] in leaves and each.value.shape[1] == width)
            bias = plain.get(norm.parameter.removesuffix("weight") + "bias")
            if after and norm.parameter.endswith(".weight"):
                yield [Fold(norm, norm.value, bias, after)]
                yield [Fold(norm, norm.value, bias, after, offset=1.0)]
    is_clipped = getattr(model.model.config, "clip_qkv", None) is not None  # a value that is divided is clipped later
    for before, leaf, times in _AFTER_ROWS:
        if not (is_clipped and leaf == "o_proj"):
            yield from _after_rows(units, plain, before, leaf, times)


def _after_rows(
    units: Sequence[Unit], plain: dict[str, Unit], before: str, leaf: str, times: int
) -> Iterator[list[Fold]]:
    producers: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        parent, name = _name(unit)
        if name == before:
            producers.setdefault((parent, unit.inputs[1]), []).append(unit)
    proposals: dict[str, list[Fold]] = {}
    for unit in units:
        parent, name = _name(unit)
        parts, width = producers.get((parent, unit.inputs[1]), []), unit.value.shape[1]
        if name != leaf or not parts or sum(len(part.value) for part in parts) != times * width:
            continue
        bias = plain.get(f"{parent}.{before}.bias")
        proposals.setdefault(unit.parameter, []).append(Fold(parts[-1], parts[-1].value[-width:], bias, (unit,)))
    yield from proposals.values()


def _name(unit: Unit) -> tuple[str, str]:
    """The names of the module around a parameter's module, and of that module in it (a router's: `_ROUTER`)."""
    parent, _, leaf = unit.parameter.removesuffix(".weight").rpartition(".")
    return parent, _ROUTER if is_router(unit.parameter) else leaf
