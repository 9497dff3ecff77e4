"""Finds the smallest checkpoint that meets a perplexity budget: 4 bits for all layers, if that is enough; otherwise the
layers that suffer most from 4 bits get 8, and where 8 are too few, all their own.

Each layer's effect is measured once, with the other layers in float. Effects on the loss are taken to add up; what is
written was measured as a whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lockstep_common.errors import invalid
from lockstep_engine import EngineConfig
from lockstep_engine.model_config import inspect_model
from lockstep_engine.quantized.tensors import Tensors
from lockstep_engine.weights import Checkpoint

from lockstep_tools.quantization.files import Shards
from lockstep_tools.quantization.layers import LayeredModel
from lockstep_tools.quantization.production import Made, Recipe, copy_plain, finish, produce

LEVELS = ("gptq", "int8", "float")
"""From the smallest to the largest."""

Note = Callable[[str], None]
"""Called with a sentence about the progress."""


@dataclass(frozen=True)
class Choice:
    """What was chosen."""

    levels: tuple[str, ...]
    """Of each layer, one of `LEVELS`."""
    float_perplexity: float
    perplexity: float

    @property
    def change(self) -> float:
        """By how much the perplexity rises, as a share."""
        return self.perplexity / self.float_perplexity - 1


def choose(
    model: LayeredModel,
    folder: Path,
    scratch: Path,
    recipe: Recipe,
    calibration: torch.Tensor,
    held_out: torch.Tensor,
    budget: float,
    note: Note = lambda _: None,
) -> Choice:
    """Write the smallest checkpoint that meets the budget.

    Args:
        model: the float model.
        folder: an empty directory for the result.
        scratch: an empty directory for the candidates; needs as much space as both.
        recipe: group size, order and head; its scheme is not used.
        calibration, held_out: windows of tokens [windows, tokens], of different parts of a text.
        budget: by how much the perplexity of `held_out` may rise, as a share of that in float.

    Raises:
        LockstepError: INVALID_REQUEST, the head alone takes more than the budget.
    """
    candidates: dict[str, Made] = {}
    sources: dict[str, Checkpoint | None] = {"float": None}
    for level in LEVELS[:2]:
        note(f"all layers in {level}")
        made = scratch / level
        made.mkdir()
        own = replace(recipe, scheme=level)
        candidates[level] = produce(model, made, own, calibration)
        sources[level] = Checkpoint(inspect_model(EngineConfig(model=str(made))))
    count = len(model.layers)

    head = None if recipe.head == "none" else sources["int8"]  # all candidates have the same

    def loss(levels: Sequence[str]) -> float:
        return math.log(model.perplexity(held_out, [sources[level] for level in levels], head))

    base = math.log(model.perplexity(held_out))
    unmixed = base if head is None else loss(["float"] * count)
    allowed = base + math.log1p(budget)
    if unmixed > allowed:
        rise = math.expm1(unmixed - base)
        raise invalid("head", f"{recipe.head} alone changes the perplexity by {rise:+.2%}; the budget is {budget:.2%}")
    levels, measured = ["gptq"] * count, 0.0
    measured = loss(levels)
    for upper, lower in zip(LEVELS[1:], LEVELS, strict=False):
        if measured <= allowed:
            break
        effects = []
        for number in range(count):
            note(f"layer {number} alone in {lower}")
            alone = ["float"] * count
            alone[number] = lower
            effects.append((loss(alone) - unmixed, number))
        for sensitive, number in sorted(effects, reverse=True):
            levels[number] = upper
            left = sum(effect for effect, other in effects if levels[other] == lower)
            if sensitive > 0 and unmixed + left > allowed and lower in levels:
                continue  # the rest alone is too much already: no need to measure
            note(f"{levels.count(upper)} of {count} layers in {upper}")
            measured = loss(levels)
            if measured <= allowed:
                break
    merge(model, folder, candidates, levels)
    return Choice(tuple(levels), math.exp(base), math.exp(measured))


def merge(model: LayeredModel, folder: Path, candidates: dict[str, Made], levels: Sequence[str]) -> Made:
    """Write a checkpoint whose layers come from different candidates, or stay in float; the head is that of the
    candidates, which all have the same.
    """
    made = Made(folder)
    shards = Shards(folder)
    taken: dict[str, str] = {}
    for number, level in enumerate(levels):
        if level in candidates:
            styles = candidates[level].styles
            taken |= {unit.module: level for unit in model.units(number) if unit.module in styles}
    taken |= {model.head().module: level for level in candidates if model.head().module in candidates[level].styles}
    plain = Tensors(model.info.path, model.info.weight_files)
    copy_plain(plain, {f"{module}.weight" for module in taken}, shards)
    for level, candidate in candidates.items():
        tensors = Tensors(candidate.folder, sorted(file.name for file in candidate.folder.glob("*.safetensors")))
        for name in tensors:
            module = name.rpartition(".")[0]
            if taken.get(module) == level and name.rpartition(".")[2].startswith("weight"):
                shards.add(name, tensors.read(name))
    for module, level in taken.items():
        made.styles[module] = candidates[level].styles[module]
    shards.finish()
    finish(model, made)
    return made
