"""The KV cache's tensors on one rank, and where a step's tokens go in them.

Invariant: a slot that holds no token of the block's present owner is zero, so that whatever is masked out is finite.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE


class KvCache:
    """Keys and values of all layers: two tensors [layers, kv heads, blocks + 1, 16, head dim]; the last block stays zero.

    Heads come before blocks so that the tokens of one head and block are one contiguous piece, which is what attention reads.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, kv_heads, blocks + 1, BLOCK_SIZE, head_dim)
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.padding_block = blocks
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._key_slots = list(self.keys.view(layers, kv_heads, -1, head_dim))
        self._value_slots = list(self.values.view(layers, kv_heads, -1, head_dim))
        self._key_blocks = list(self.keys.view(layers, kv_heads * (blocks + 1), BLOCK_SIZE * head_dim))
        self._value_blocks = list(self.values.view(layers, kv_heads * (blocks + 1), BLOCK_SIZE * head_dim))

    @staticmethod
    def block_bytes(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one block on one rank."""
        return 2 * layers * kv_heads * BLOCK_SIZE * head_dim * dtype.itemsize

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero the blocks [n] that get a new owner in this step."""
        self.keys.index_fill_(2, blocks, 0)
        self.values.index_fill_(2, blocks, 0)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [kv heads, slots, head dim]; slot = block * 16 + position in the block."""
        return self._key_slots[layer], self._value_slots[layer]

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the step's keys and values, each [kv heads, tokens, head dim], into `slots` [tokens]."""
        self._key_slots[layer].index_copy_(1, slots, keys)
        self._value_slots[layer].index_copy_(1, slots, values)

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [rows, tokens, head dim], of the blocks named by `index` [rows * blocks a row]."""
        shape = (rows, -1, self.head_dim)
        return (
            self._key_blocks[layer].index_select(0, index).view(shape),
            self._value_blocks[layer].index_select(0, index).view(shape),
        )

    def block_index(self, tables: NDArray[np.int32]) -> torch.Tensor:
        """For `gather`: tables [sequences, width] (-1: nothing there) → [sequences * kv heads * width]."""
        blocks = np.where(tables < 0, self.padding_block, tables).astype(np.int64)
        heads = np.arange(self.kv_heads, dtype=np.int64) * (self.padding_block + 1)
        return torch.from_numpy((blocks[:, None, :] + heads[None, :, None]).reshape(-1)).to(self.keys.device)
