"""A mixture's experts on a GPU as two grouped products, whose rows do not depend on other tokens and which never wait
for the host, so that they can be recorded.

It takes the place of experts of the usual shape: gate and up projections stacked in one tensor, no bias. Experts of
other shapes run by the model's own code, expert by expert; that is exact, too, but cannot be recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.kernels.triton_linear import Groups, grouped

_MOST_CHOICES = 16
"""Experts of a token: more than any model has."""


class GroupedExperts(nn.Module):
    """Experts for which `fits` holds, with their parameters where they are.

    Args:
        experts: the model's own.

    Attributes:
        by_own_code: these compute.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts: Any = experts
        self.by_own_code = False

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether the module's weights are [experts, 2 * inner, hidden] and [experts, hidden, inner], without bias."""
        marks = {"has_gate": True, "has_bias": False, "is_transposed": False}
        if any(getattr(module, name, None) is not value for name, value in marks.items()):
            return False
        if getattr(module, "has_post_expert_norm", False):  # old versions of transformers have neither name nor norm
            return False
        up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        return (
            isinstance(up, nn.Parameter)
            and isinstance(down, nn.Parameter)
            and up.dim() == down.dim() == 3
            and up.shape[1] == 2 * down.shape[2]
            and up.dtype == down.dtype
            and up.is_contiguous()
            and down.is_contiguous()
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Take x [tokens, hidden], and each token's experts and their weights [tokens, choices] → [tokens, hidden].

        A token's results are added in the order of its experts' numbers, as the model's own code does. Numbers from the
        count of experts on mean none.
        """
        experts = self.experts
        if self.by_own_code:
            own: torch.Tensor = experts(x, chosen, weights)
            return own
        count = experts.gate_up_proj.shape[0]
        chosen, order = chosen.sort(dim=1, stable=True)
        weights = weights.gather(1, order)
        groups = Groups.of(chosen, count, x.dtype)
        inner = experts._apply_gate(grouped(x.contiguous(), experts.gate_up_proj, None, groups, per_pair=False))
        results = grouped(inner.contiguous(), experts.down_proj, None, groups, per_pair=True).view(*chosen.shape, -1)
        added = (results * weights.unsqueeze(-1)).to(x.dtype)
        # An expert that is none has no result: what is there was never written.
        added = added.masked_fill((chosen >= count).unsqueeze(-1), 0)
        out = torch.zeros_like(x)
        for choice in range(chosen.shape[1]):
            out = out + added[:, choice]
        return out


def group_experts(model: nn.Module) -> int:
    """Put grouped experts in place of all that fit, when weights are loaded; returns how many. The weights stay where
    they are.
    """
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(module, GroupedExperts) and GroupedExperts.fits(child):
                setattr(module, name, GroupedExperts(child))
                replaced += 1
    return replaced


def launch_all(model: nn.Module, most_tokens: int) -> None:
    """Launch the products of a model's grouped experts once in every form that a step can have, so that none has to be
    built while serving.

    Args:
        model: with its weights on a GPU.
        most_tokens: of a step.
    """
    seen = set()
    for experts in (each.experts for each in model.modules() if isinstance(each, GroupedExperts)):
        up, down = experts.gate_up_proj, experts.down_proj
        if (up.shape, down.shape, up.dtype) in seen:
            continue
        seen.add((up.shape, down.shape, up.dtype))
        for pairs in forms(len(up), most_tokens):
            chosen = torch.arange(pairs, device=up.device).unsqueeze(1) % len(up)
            groups = Groups.of(chosen, len(up), up.dtype)
            for weight, per_pair in ((up, False), (down, True)):
                x = torch.zeros(pairs, weight.shape[2], dtype=weight.dtype, device=weight.device)
                grouped(x, weight, None, groups, per_pair=per_pair)


def forms(experts: int, most_tokens: int) -> list[int]:
    """Numbers of pairs of a token and an expert at which the form of grouped products changes: the tile follows the
    pairs of an expert, and whether segments have programs of their own follows all pairs.
    """
    begins = {1, PRODUCT_ROWS[-1] + 1, *((most + 1) * experts for most in PRODUCT_ROWS[:-1])}
    return sorted(each for each in begins if each <= most_tokens * _MOST_CHOICES)


@contextmanager
def experts_by_own_code(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model's own experts compute, instead of the grouped ones in their place."""
    grouped_ones = [each for each in model.modules() if isinstance(each, GroupedExperts)]
    for each in grouped_ones:
        each.by_own_code = True
    try:
        yield
    finally:
        for each in grouped_ones:
            each.by_own_code = False
