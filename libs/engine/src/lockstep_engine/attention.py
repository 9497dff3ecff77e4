"""Paged attention for one step: where its tokens' keys and values go, and which blocks its queries look at.

`StepAttention` is what a model's layers see. Sequences that decode and sequences that prefill go through the same
call, and a query row's result does not depend on what else is in the step.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring


class StepLayout(NamedTuple):
    """A step's sequences. The step's tokens are those of the first sequence, then those of the second, and so on."""

    starts: NDArray[np.int32]
    """[sequences]: position of the first token."""
    lengths: NDArray[np.int32]
    """[sequences]: number of tokens."""
    tables: NDArray[np.int32]
    """[sequences, width]: ids of the blocks (see `kv_cache`), each in the version that the step's last query of the
    sequence sees; -1 where unused."""
    hot_tables: NDArray[np.int32] | None = None
    """[sequences, width]: ids of the hot blocks, -1 where no query of the step sees the block hot. None: `tables` has
    them, because no block is seen in both versions."""
    moves: NDArray[np.int32] | None = None
    """[n, 2]: full hot blocks, and the cold ones that each layer makes of them when it has stored the step's keys and
    values; without `first_cold`."""


def layout_of_one(
    cache: KvCache, start: int, length: int, hot: NDArray[np.int32], cold: NDArray[np.int32]
) -> StepLayout:
    """A step of one sequence that has both versions of all its blocks.

    Args:
        cache: holds the blocks.
        start: position of the first token; all before it have been computed, in steps like this one.
        length: number of tokens.
        hot: ids of the hot blocks, in order.
        cold: ids of the cold blocks, in order, without `first_cold`.
    """
    used, hot_window = -(-(start + length) // BLOCK_SIZE), cache.hot_window
    hot_tables = np.ascontiguousarray(hot[None, :used])
    tables, made = hot_tables.copy(), slice(0)
    if hot_window is not None:
        last = hot_window.first_hot(used - 1)
        tables[0, hot_window.sink : last] = cold[hot_window.sink : last] + cache.first_cold
        made = slice(hot_window.first_hot(max(start - 1, 0) // BLOCK_SIZE), last)
    moves = np.stack([hot[made], cold[made]], axis=1)
    return StepLayout(np.array([start], np.int32), np.array([length], np.int32), tables, hot_tables, moves)


class StepAttention(ABC):
    """Attention for one step, used by all layers.

    Args:
        cache: the rank's cache. Blocks that a sequence enters in this step are zeroed.
        step: the step's sequences.
    """

    def __init__(self, cache: KvCache, step: StepLayout) -> None:
        self._cache = cache
        self._owners, self.positions, self._cells, entered = self._places(step)
        """[tokens] each."""
        if len(entered):
            cache.clear(entered)

    def _places(self, step: StepLayout) -> tuple[NDArray[np.int32], torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequences, positions and cells of the step's tokens, and the hot blocks in which a sequence computes its
        first position; all but the sequences int64 on the device.
        """
        lengths = step.lengths
        owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths - step.starts, lengths)
        hot_tables = step.tables if step.hot_tables is None else step.hot_tables
        blocks = hot_tables[owners, positions // BLOCK_SIZE].astype(np.int64)
        offsets = positions % BLOCK_SIZE
        numbers = positions, blocks * BLOCK_SIZE + offsets, blocks[offsets == 0]
        device = self._cache.keys.device
        placed, cells, entered = (torch.from_numpy(each).to(device, non_blocking=True) for each in numbers)
        return owners, placed, cells, entered

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store the step's keys and values and attend over the whole context.

        Args:
            layer: number of the layer.
            queries: [heads, tokens, head dim].
            keys, values: [kv heads, tokens, head dim]; heads is a multiple of kv heads. A cache of a latent does not
                look at the values.
            scoring: how scores are made; its bias and sinks are for these heads.

        Returns:
            [tokens, heads, head dim]; of a latent at least its width.
        """
        self._store(layer, keys, values)
        return self._attend(layer, queries, scoring)

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values into the cache."""
        self._cache.store(layer, keys, values, self._cells)

    @abstractmethod
    def _attend(self, layer: int, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Make the step's cold blocks and attend, when its keys and values have been stored."""
