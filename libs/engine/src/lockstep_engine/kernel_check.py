"""A rank's check at its start that the GPU's kernels compute what torch computes, on the device that will serve.

A kernel may be compiled wrongly for a GPU, or by a version of Triton, on which it was never tested. The rank computes a
fixed text as a chunk and its last token as a decode step: with the kernels, and with the model's own code and torch.
Blocks that go cold meanwhile are compared, too. A rank that computes something else refuses to serve. All ranks see the
same logits, so that they agree without asking one another.
"""

from dataclasses import dataclass

import numpy as np
import torch
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine import layer_cache
from lockstep_engine.attention import StepLayout, layout_of_one
from lockstep_engine.canary import Forward
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kv_cache import KvCache

MAX_DIFFERENCE = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far a row of logits may be from torch's: the Euclidean norm of the difference by that of torch's row, without its
mean. Rounding to n bits errs by u = 2^-n in each operation; errors of several hundred of them, at random, add up to
some 20 u (Higham and Mary 2019), which is 0.01 for float16 and for float32's products in TF32, 0.08 for bfloat16. A
wrong mask, scale or order of elements moves most logits by as much as they are apart."""
_CODE_STEP = 2.0**-3
"""Between two neighbouring codes of e4m3, relative to the value."""


@dataclass(frozen=True)
class Difference:
    """What was compared, and how far it is from torch's."""

    what: str
    size: float
    bound: float

    @property
    def is_small(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.size <= self.bound


def check_kernels(
    rank: int, by_kernels: Forward, by_torch: Forward, cache: KvCache, vocab_size: int, count: int
) -> None:
    """Compare; the cache's blocks are as before when it ends.

    Args:
        rank: named by the error.
        by_kernels: computes a step as the rank will.
        by_torch: computes a step with torch alone.
        cache: has enough blocks for the text.
        vocab_size: size of the model's vocabulary.
        count: number of tokens of the text, at least 2.

    Raises:
        LockstepError: INTERNAL: something is further apart than rounding explains.
    """
    for each in compare(by_kernels, by_torch, cache, vocab_size, count):
        if not each.is_small:
            raise LockstepError(
                ErrorCode.INTERNAL,
                f"rank {rank}: the GPU's kernels do not compute what torch computes: {each.what} are off by "
                f"{each.size:.3g}, and rounding explains {each.bound:g}; nothing is served with them",
            )


def compare(by_kernels: Forward, by_torch: Forward, cache: KvCache, vocab_size: int, count: int) -> list[Difference]:
    """The differences that `check_kernels` looks at; its arguments."""
    device, bound = cache.keys.device, MAX_DIFFERENCE[cache.keys.dtype]
    ids = torch.arange(count, device=device) * 37 % vocab_size
    hot = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)
    cold = np.maximum(hot - (0 if cache.hot_window is None else cache.hot_window.sink), 0)
    parts = (("the logits of a chunk", 0, count - 1), ("the logits of a decode step", count - 1, count))
    found = []
    for what, begin, end in parts:
        layout = layout_of_one(cache, begin, end - begin, hot, cold)
        rows = np.array([end - begin - 1])
        ours = by_kernels(ids[begin:end], layout, rows).float().clone()
        made = _made(cache, layout)
        if made is not None:
            found.append(Difference("compressed keys and values", made, _CODE_STEP))
        theirs = by_torch(ids[begin:end], layout, rows).float()
        spread = (theirs - theirs.mean()).norm().clamp_min(torch.finfo(torch.float32).tiny)
        found.append(Difference(what, float((ours - theirs).norm() / spread), bound))
    cache.clear(torch.from_numpy(hot.astype(np.int64)).to(device))
    return found


def _made(cache: KvCache, layout: StepLayout) -> float | None:
    """The largest relative difference of a compressed component from what torch makes of the same hot blocks, which is
    then in its place. None: the step compressed nothing.
    """
    if layout.moves is None or not len(layout.moves):
        return None
    moves = torch.from_numpy(layout.moves.astype(np.int64)).to(cache.keys.device)
    largest = 0.0
    for layer in cache.layers:
        if layer.cold is None:
            continue
        ours = _values(layer, moves[:, 1])
        layer_cache.compress(layer, moves)
        for one, other in zip(ours, _values(layer, moves[:, 1]), strict=True):
            apart = (one - other).abs() / other.abs().clamp_min(torch.finfo(torch.float32).tiny)
            largest = max(largest, float(torch.where(one == other, 0, apart).max()))
    return largest


def _values(layer: layer_cache.LayerCache, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of these cold blocks, in float32."""
    cold = layer.cold
    assert cold is not None
    values = []
    for codes, scales, axis in ((cold.keys, cold.key_scales, 2), (cold.values, cold.value_scales, 3)):
        chosen = codes.index_select(1, blocks)
        if scales is None:
            values.append(chosen.float())
        else:
            values.append(chosen.view(torch.float8_e4m3fn).float() * scales.index_select(1, blocks).unsqueeze(axis))
    return values
