"""The KV cache's tensors on one rank, and where a step's tokens go in them.

Invariant: a slot that holds no token of the block's present owner is zero, so that whatever is masked out is finite.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE


class KvCache:
    """Keys and values of all layers. The last block stays zero.

    `keys` [layers, kv heads, blocks + 1, head dim, 16], `values` [layers, kv heads, blocks + 1, 16, head dim]: heads
    before blocks, so that a head's part of a block is one contiguous piece; keys transposed in it, so that a vector
    holds one component of 16 keys and scores need no sums across a vector.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.padding_block = blocks
        heads_blocks = (layers, kv_heads, blocks + 1)
        self.keys = torch.zeros((*heads_blocks, head_dim, BLOCK_SIZE), dtype=dtype, device=device)
        self.values = torch.zeros((*heads_blocks, BLOCK_SIZE, head_dim), dtype=dtype, device=device)
        self._layers = list(zip(self.keys, self.values, strict=True))

    @staticmethod
    def block_bytes(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one block on one rank."""
        return 2 * layers * kv_heads * BLOCK_SIZE * head_dim * dtype.itemsize

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys [kv heads, blocks + 1, head dim, 16] and values [kv heads, blocks + 1, 16, head dim]."""
        return self._layers[layer]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero the blocks [n] that get a new owner in this step."""
        self.keys.index_fill_(2, blocks, 0)
        self.values.index_fill_(2, blocks, 0)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the step's keys and values, each [kv heads, tokens, head dim], into `slots` [tokens] = block * 16 +
        offset.
        """
        key_cache, value_cache = self._layers[layer]
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        key_cache[:, blocks, :, offsets] = keys.transpose(0, 1)
        value_cache[:, blocks, offsets] = values

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [rows, tokens, head dim], of the blocks named by `index` [rows * blocks a row]."""
        keys, values = (each.flatten(0, 1).index_select(0, index) for each in self._layers[layer])
        shape = (rows, -1, self.head_dim)
        return keys.transpose(1, 2).reshape(shape), values.view(shape)

    def block_index(self, tables: NDArray[np.int32]) -> torch.Tensor:
        """For `gather`: tables [sequences, width] (-1: nothing there) → [sequences * kv heads * width]."""
        blocks = np.where(tables < 0, self.padding_block, tables).astype(np.int64)
        heads = np.arange(self.kv_heads, dtype=np.int64) * (self.padding_block + 1)
        return torch.from_numpy((blocks[:, None, :] + heads[None, :, None]).reshape(-1)).to(self.keys.device)
