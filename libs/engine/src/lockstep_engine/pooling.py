"""From hidden states to embeddings, on rank 0.

The mean of a text is summed token by token, in double precision and in the order of positions: its bits do not depend
on how a prompt is divided into steps, nor on what else a step computes. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.plan import Plan


@dataclass(frozen=True)
class Pooled:
    """The hidden states of a step that embeddings are made of. They are on the host once the device has finished
    earlier work; steps must be read in order.
    """

    pooler: "Pooler"
    plan: Plan
    states: torch.Tensor
    """[rows, hidden], float32."""

    def read(self) -> NDArray[np.float32]:
        """[embeddings, hidden]: those that this step completes, in the plan's order, each of length 1."""
        return self.pooler.add(self.plan, self.states.numpy())


class Pooler:
    """Makes embeddings.

    Args:
        mean: make the mean of all tokens' states; otherwise take the last token's.
        size: numbers of a hidden state.
    """

    def __init__(self, *, mean: bool, size: int) -> None:
        self._mean = mean
        self._size = size
        self._sums: dict[int, NDArray[np.float64]] = {}
        """By sampling row: the sum of the states so far."""

    def rows(self, plan: Plan) -> NDArray[np.int64]:
        """Indices of the tokens of a step whose hidden states are wanted."""
        assert plan.pools is not None
        assert plan.completes is not None
        ends = np.cumsum(plan.lengths, dtype=np.int64)
        if not self._mean:
            return ends[plan.completes] - 1
        parts = [np.arange(end - length, end) for end, length in zip(ends, plan.lengths, strict=True)]
        return np.concatenate([part for part, pools in zip(parts, plan.pools, strict=True) if pools])

    def fetch(self, plan: Plan, states: torch.Tensor) -> Pooled:
        """Begin to copy the states [rows, hidden], of any float type, to the host."""
        return Pooled(self, plan, states.float().to("cpu", non_blocking=True))

    def add(self, plan: Plan, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Pooled.read`."""
        assert plan.pools is not None
        assert plan.completes is not None
        if not self._mean:
            return _stack([_normalized(state.astype(np.float64)) for state in states], self._size)
        complete, begin = [], 0
        for sequence in plan.pools.nonzero()[0]:
            row, length = int(plan.sampling_rows[sequence]), int(plan.lengths[sequence])
            if plan.starts[sequence] == 0:
                self._sums[row] = np.zeros(self._size, dtype=np.float64)
            for state in states[begin : begin + length]:
                self._sums[row] += state
            begin += length
            if plan.completes[sequence]:
                complete.append(_normalized(self._sums.pop(row)))
        return _stack(complete, self._size)


def _normalized(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    """The vector with length 1. The length's bits do not depend on the machine: its sum of squares is exact."""
    length = math.sqrt(math.fsum((vector * vector).tolist())) if np.isfinite(vector).all() else math.nan
    scaled: NDArray[np.float32] = (vector / (length or 1.0)).astype(np.float32)
    return scaled


def _stack(vectors: list[NDArray[np.float32]], size: int) -> NDArray[np.float32]:
    return np.stack(vectors) if vectors else np.empty((0, size), dtype=np.float32)
