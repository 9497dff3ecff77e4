"""Makes a quantized checkpoint of a float one, one decoder layer in memory at a time."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lockstep_common.errors import invalid
from lockstep_engine.model_config import read_json
from lockstep_engine.quantized.tensors import Tensors
from torch import nn

from lockstep_tools.quantization import awq, folds, rounding
from lockstep_tools.quantization.files import Shards, Style, copy_rest, quantization_config, tensors_of
from lockstep_tools.quantization.gptq import to_int4_by_hessian
from lockstep_tools.quantization.layers import InputProducts, LayeredModel, Unit
from lockstep_tools.quantization.rounding import Rounded

SCHEMES: Mapping[str, str] = {
    "int8": "8-bit integers, a scale for each row; activations stay float (W8A16)",
    "w8a8": "as int8, and marked for engines that also compute activations in 8 bits",
    "fp8": "e4m3, a scale for each row; activations stay float",
    "gptq": "4-bit integers, a scale for each group; errors made good with the calibration text",
    "awq": "4-bit integers with zero points; inputs with large activations are scaled up before",
    "rtn4": "4-bit integers rounded to the nearest; to compare gptq with",
    "ternary": "BitNet b1.58's rounding; only for models that were trained for it",
}
"""Each scheme that is produced, and what it is."""

_HEAD_ROWS = 8192
"""Rows of a head that are rounded at once: copies of all of them would take more than a layer does."""

Progress = Callable[[int, int], None]
"""Called with the number of layers done and their total."""


@dataclass(frozen=True)
class Recipe:
    """How to quantize."""

    scheme: str
    """A key of `SCHEMES`."""
    group_size: int = 128
    by_activation: bool = True
    """GPTQ rounds the inputs with the largest activations first."""
    skip: tuple[str, ...] = ()
    """Globs of names of the layers' modules that stay as they are."""
    head: str = "none"
    """What becomes of the output head: none, it stays as it is; int8, 8-bit integers with a scale for each row."""

    @property
    def activations(self) -> bool:
        """Whether the checkpoint says that activations are quantized as well."""
        return self.scheme == "w8a8"


@dataclass
class Made:
    """What a directory holds."""

    folder: Path
    styles: dict[str, Style] = field(default_factory=dict)
    """Each quantized module, by its name in the checkpoint."""
    scaled: int = 0
    """How many of them have scaled inputs (awq)."""


def produce(
    model: LayeredModel,
    folder: Path,
    recipe: Recipe,
    calibration: torch.Tensor | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Made:
    """Write the quantized checkpoint.

    Args:
        model: the float model.
        folder: an empty directory.
        calibration: windows of tokens [windows, tokens], for gptq and awq.

    Raises:
        LockstepError: INVALID_REQUEST, the scheme is awq and nothing in this architecture's layers can take its scales.
    """
    production = _Production(model, folder, recipe, progress)
    with torch.inference_mode():
        if calibration is not None and recipe.scheme in ("gptq", "awq"):
            model.states(calibration, production.calibrate)
        else:
            for number in range(len(model.layers)):
                with model.loaded(number):
                    production.write(number, {})
        return production.finish()


class _Production:
    """Writes a checkpoint layer by layer; see `produce` for the arguments."""

    def __init__(self, model: LayeredModel, folder: Path, recipe: Recipe, progress: Progress) -> None:
        self._model, self._recipe, self._progress = model, recipe, progress
        self._made, self._shards = Made(folder), Shards(folder)
        self._tensors = Tensors(model.info.path, model.info.weight_files)
        layers = range(len(model.layers))
        self._wanted = [{unit.stored for unit in model.units(each) if _wanted(unit, recipe)} for each in layers]
        self._changed = set().union(*self._wanted)
        """Tensors of the float checkpoint that are not copied."""

    def calibrate(self, number: int, layer: nn.Module, compute: Callable[..., Any]) -> Any:
        """Write a layer with what the calibration says about its inputs; see `layers.Visit`."""
        with InputProducts(layer) as products:
            compute()
        if self._recipe.scheme == "awq":
            self._scale(number, products, compute)
        self.write(number, products.sums)
        return compute()  # the next layer is calibrated on what this one now gives

    def _scale(self, number: int, products: InputProducts, compute: Callable[[int], Any]) -> None:
        found = folds.find(self._model, number, compute)
        if number == 0 and not found:
            name = self._model.info.architecture
            raise invalid("scheme", f"awq: nothing before the matrices of {name} can take their scales; use gptq")
        wanted, size = self._wanted[number], self._recipe.group_size
        changed, count = awq.scale_layer(found, products, wanted, self._tensors, size, _scale_dtype(self._model))
        for unit in changed:
            self._shards.add(unit.stored, unit.value.to(self._tensors.read(unit.stored).dtype))
            self._changed.add(unit.stored)
        self._made.scaled += count

    def write(self, number: int, sums: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Write a layer's matrices, and give it their rounded values.

        Args:
            number: a layer that is loaded.
            sums: of x xᵀ over the inputs, where they are known; see `InputProducts`.
        """
        activations = self._recipe.activations
        for unit in self._model.units(number):
            if unit.stored in self._wanted[number]:
                rounded = round_unit(unit, self._recipe, sums.get(unit.inputs), _scale_dtype(self._model))
                for name, tensor in tensors_of(unit.module, rounded, activations=activations).items():
                    self._shards.add(name, tensor)
                unit.value.copy_(rounded.values())
                self._made.styles[unit.module] = (rounded.kind, rounded.group, activations)
        self._progress(number + 1, len(self._model.layers))

    def finish(self) -> Made:
        """Write the rest."""
        if self._recipe.head == "int8":
            head = self._model.head()
            _write_head(head, self._shards, self._made)
            self._changed.add(head.stored)
        copy_plain(self._tensors, self._changed, self._shards)
        self._shards.finish()
        finish(self._model, self._made)
        return self._made


def _write_head(head: Unit, shards: Shards, made: Made) -> None:
    """Write the head in 8 bits. Its inputs stay in float in every scheme: rounding them would change every logit."""
    starts = range(0, len(head.value), _HEAD_ROWS)
    parts = [rounding.to_int8(head.value[start : start + _HEAD_ROWS]) for start in starts]
    rounded = Rounded("int8", torch.cat([each.codes for each in parts]), torch.cat([each.scales for each in parts]))
    for name, tensor in tensors_of(head.module, rounded, activations=False).items():
        shards.add(name, tensor)
    made.styles[head.module] = (rounded.kind, rounded.group, False)


def _wanted(unit: Unit, recipe: Recipe) -> bool:
    return not any(fnmatch.fnmatchcase(unit.module, glob) for glob in recipe.skip)


def round_unit(unit: Unit, recipe: Recipe, products: torch.Tensor | None, scale_dtype: torch.dtype) -> Rounded:
    """A matrix in a scheme; `products` is the sum of x xᵀ over its inputs."""
    if recipe.scheme in ("int8", "w8a8"):
        return rounding.to_int8(unit.value)
    if recipe.scheme == "fp8":
        return rounding.to_fp8(unit.value)
    if recipe.scheme == "ternary":
        return rounding.to_ternary(unit.value)
    columns = unit.value.shape[1]
    group = rounding.group_of(columns, recipe.group_size)
    if recipe.scheme == "awq":
        return awq.to_int4(unit.value, products, group, scale_dtype)
    if recipe.scheme == "rtn4" or products is None:  # an expert that no token of the calibration chose
        return rounding.to_int4(unit.value, group, scale_dtype)
    return to_int4_by_hessian(unit.value, products, group, scale_dtype, by_activation=recipe.by_activation)


def _scale_dtype(model: LayeredModel) -> torch.dtype:
    return torch.bfloat16 if model.info.dtype == "bfloat16" else torch.float16


def copy_plain(tensors: Tensors, changed: set[str], shards: Shards) -> None:
    """Copy the tensors that are not quantized or otherwise changed."""
    for name in tensors:
        if name not in changed:
            shards.add(name, tensors.read(name))


def finish(model: LayeredModel, made: Made) -> None:
    """Write config.json and copy the tokenizer."""
    settings = read_json(model.info.path / "config.json")
    settings["quantization_config"] = quantization_config(made.styles, _ignored(model, made.styles))
    if model.head().module in made.styles:
        settings["tie_word_embeddings"] = False  # the embedding stays in float, for look-ups
    copy_rest(model.info.path, made.folder, settings)


def _ignored(model: LayeredModel, quantized: Mapping[str, Style]) -> set[str]:
    """Linears that stay as they are, by name."""
    names = {name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
    head = model.head()
    if head.module in quantized:
        names.discard(head.parameter.removesuffix(".weight"))  # old checkpoints have other names
    return names - set(quantized)


def samples(ids: Sequence[int], count: int, length: int) -> torch.Tensor:
    """Up to `count` windows of `length` tokens, spread evenly over a text: [windows, tokens].

    Raises:
        ValueError: the text is shorter than a window.
    """
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a window of {length}")
    count = min(count, len(ids) // length)
    starts = [(len(ids) - length) * number // max(1, count - 1) for number in range(count)]
    return torch.tensor([list(ids[start : start + length]) for start in starts])
