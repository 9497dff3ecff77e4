"""Draws tokens from logits: inverse-CDF sampling over the tokens that top-k, top-p and min-p keep.

A row's token depends on its own logits, settings and uniform number. On the CPU it has the same bits on every machine.
On a GPU prefix sums are taken over integers, so that it does not matter in which order a library adds them up, which
with torch's `cumsum` depends on the number of rows.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import rowwise
from lockstep_engine.sampling_table import Cut, Draw
from lockstep_engine.transfers import to_device

_UNIT = 2.0**-44
"""What 1 means in integer prefix sums. Weights are at most 1, and a vocabulary has fewer than 2**19 tokens."""


def draw(logits: torch.Tensor, rows: Draw, uniforms: NDArray[np.float64]) -> torch.Tensor:
    """Draw a token for each row, in the order of token ids.

    Args:
        logits: [rows, vocabulary], float32; overwritten.
        rows: the rows' settings.
        uniforms: [rows], in [0, 1).

    Returns:
        [rows], int64.
    """
    device, most = logits.device, torch.finfo(torch.float32)
    # A row with NaN or infinity is an error, see `Sampler.sample`; here it only has to give an id that exists.
    logits.nan_to_num_(nan=most.min, posinf=most.max, neginf=most.min)
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    weights = _softmax(logits.div_(rows.temperature))
    if rows.cuts:
        least = torch.zeros(len(weights), 1, dtype=weights.dtype, device=device)
        for cut in rows.cuts:
            least.index_copy_(0, cut.rows, _least_kept(weights.index_select(0, cut.rows), cut))
        weights.masked_fill_(weights < least, 0)
    cumulative = prefix_sums(weights)
    total = cumulative[:, -1:].contiguous()
    targets = to_device(uniforms, device).unsqueeze(1) * total
    # The first id whose cumulative weight is above the target; rounding must not lead past the last id with weight.
    chosen = torch.searchsorted(cumulative, targets, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(chosen, last).squeeze(1)


def _least_kept(weights: torch.Tensor, cut: Cut) -> torch.Tensor:
    """[rows, 1]: the smallest probability that is kept; tokens of equal probability are kept together."""
    if cut.last is None:
        return weights.amax(dim=-1, keepdim=True) * cut.min_p
    ordered = _largest(weights, cut.depth)
    last = ordered.gather(1, cut.last)
    if cut.top_p is not None:
        cumulative = prefix_sums(ordered)
        kept = cumulative - ordered < cut.top_p * cumulative.gather(1, cut.last)
        if cut.shallow:
            kept &= torch.arange(cut.depth, device=weights.device) <= cut.last
        in_nucleus = ordered.gather(1, kept.sum(dim=-1, keepdim=True).clamp_min_(1) - 1)
        last = torch.where(cut.top_p < 1, in_nucleus, last)
    return torch.maximum(last, ordered[:, :1] * cut.min_p)


def _largest(weights: torch.Tensor, depth: int) -> torch.Tensor:
    """[rows, depth]: the largest weights, in descending order."""
    if weights.device.type != "cpu":
        is_full_sort = depth == weights.shape[1]
        return weights.sort(dim=-1, descending=True).values if is_full_sort else torch.topk(weights, depth).values
    numbers = weights.numpy()  # numpy's vector sort takes a tenth of torch's time
    if depth < numbers.shape[1]:
        numbers = np.partition(numbers, numbers.shape[1] - depth, axis=-1)[:, -depth:]
    return torch.from_numpy(np.sort(numbers, axis=-1)[:, ::-1].copy())


def prefix_sums(weights: torch.Tensor) -> torch.Tensor:
    """[rows, n], float64."""
    return weights.cumsum(dim=-1, dtype=torch.float64) if weights.device.type == "cpu" else integer_sums(weights)


def integer_sums(weights: torch.Tensor) -> torch.Tensor:
    """Prefix sums of weights that are rounded to multiples of 2**-44: exact, whatever the order of additions."""
    return (weights.double() * (1 / _UNIT)).round_().long().cumsum(dim=-1).double().mul_(_UNIT)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """On the CPU with the same bits on every machine: a draw near a token's limit must not depend on it."""
    return rowwise.softmax(x) if x.device.type == "cpu" else torch.softmax(x, dim=-1)
