"""The KV cache's tensors on one rank: where a step's tokens are stored, and how hot blocks are compressed to cold ones.

There are two pools. Hot blocks hold keys and values in the model's dtype. Cold blocks are made of full hot ones and
hold them in eight bits (e4m3) with a scale for each token and head. A list of ids names a sequence's blocks in order of
position: an id below `first_cold` is a hot block, any other is the cold block id - first_cold, -1 is no block. Which
version of a block a query sees is decided by `HotWindow`, a function of positions alone.

Where a model's values are the first components of its keys (latent attention), the keys are stored alone: `values` are
views of them, and a token's codes and scale serve as both.

Layers with a window may have hot blocks alone (`WindowedLayers`); no query of theirs sees what is not hot. Without
compression cold blocks of the other layers are copies of the hot ones. They follow these in the same tensors, so that
attention reads either version by its id, and knows of no cold block.

A cell has one token's keys and values; its number is hot block * 16 + offset in the block. Invariant: a cell without a
token of the block's present owner is zero, so that masked-out values are finite. Cold blocks are full.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels import cpu, gpu
from lockstep_engine.kernels.cpu_structs import LayerCall
from lockstep_engine.layer_cache import ColdLayer, ColdLayers, LayerCache, compress

_SCALE_BYTES = 4
_COPIED_AT_ONCE = 32
"""Blocks of all layers that are copied through memory between."""


class KvCache:
    """Keys and values of all layers. The last block of each pool stays zero.

    `keys` [layers, kv heads, blocks + 1, head dim, 16], `values` [layers, kv heads, blocks + 1, 16, head dim]: heads
    before blocks, so that a head's part of a block is contiguous. Keys are transposed in it, so that a SIMD vector
    holds one component of 16 keys and scores need no sums across a vector. With a latent `values` is a view of `keys`
    [layers, kv heads, blocks + 1, 16, latent]. If cold blocks are copies, both are those of the layers that have cold
    blocks, and have blocks + 1 + cold_blocks + 1 of them.

    Args:
        layers: number of the model's layers.
        kv_heads: number of key/value heads on this rank.
        head_dim: width of a head.
        blocks: number of hot blocks.
        dtype: the model's dtype.
        device: the model's device.
        cold_blocks: number of cold blocks; 0 if all blocks are hot.
        hot_window: decides which blocks a query sees compressed. None: no block; then cold blocks are copies.
        compressed_layers: layers whose cold blocks are compressed; in others they keep the model's dtype. None: all.
        latent: values are the first so many components of keys; 0: they are stored beside them. The compiled CPU
            kernel needs the latter.
        hot_layers: layers that have no cold blocks, but not all.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        cold_blocks: int = 0,
        hot_window: HotWindow | None = None,
        compressed_layers: Collection[int] | None = None,
        latent: int = 0,
        hot_layers: Collection[int] = (),
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.latent = latent
        self.padding_block = blocks
        self.first_cold = blocks + 1
        self.cold_blocks = cold_blocks
        self.hot_window = hot_window
        self.hot_layers = tuple(hot_layers)
        self._copies = bool(hot_layers) and hot_window is None
        both = [each for each in range(layers) if each not in self.hot_layers]
        """Layers with hot and cold blocks."""

        def tensors(count: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys = torch.zeros((count, kv_heads, blocks, head_dim, BLOCK_SIZE), dtype=dtype, device=device)
            return keys, self._values_of(keys)

        if self._copies:
            self._tensors = [tensors(len(both), self.first_cold + cold_blocks + 1)]
            self._tensors.append(tensors(layers - len(both), self.first_cold))
            order = [*both, *self.hot_layers]
        else:
            self._tensors, order = [tensors(layers, self.first_cold)], list(range(layers))
        self.keys, self.values = self._tensors[0]
        self.by_cpu_kernel = cpu.available(self.keys) and not latent
        """Whether the compiled CPU kernel reads and writes it."""
        self._groups: list[ColdLayers] = []
        """Of layers with cold blocks of one form."""
        self._alone: dict[int, ColdLayers] = {}
        """Each such layer for itself, by its number."""
        if hot_window is not None:
            compressed = set(range(layers)) if compressed_layers is None else set(compressed_layers)
            for is_compressed in (True, False):
                self._group_layers([each for each in both if (each in compressed) == is_compressed], is_compressed)
        hot = [each for keys, values in self._tensors for each in zip(keys, values, strict=True)]
        self._layers = [
            LayerCache(*each, self._alone[number].cold.at(0) if number in self._alone else None, latent)
            for number, each in sorted(zip(order, hot, strict=True), key=lambda pair: pair[0])
        ]
        """By their numbers."""
        calls = map(_layer_call, self._layers) if self.by_cpu_kernel else ()
        self.calls = (LayerCall * layers)(*calls)
        """Arguments of the CPU kernels, one for each layer; without meaning where these do not run."""

    @staticmethod
    def block_bytes(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, latent: int = 0) -> int:
        """Memory of one hot block on one rank."""
        return (1 if latent else 2) * layers * kv_heads * BLOCK_SIZE * head_dim * dtype.itemsize

    @staticmethod
    def cold_block_bytes(
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        compressed_layers: Collection[int] | None = None,
        latent: int = 0,
    ) -> int:
        """Memory of one cold block on one rank; `layers`: those that have cold blocks, `compressed_layers` among
        them.
        """
        compressed = layers if compressed_layers is None else len(compressed_layers)
        uncompressed = (layers - compressed) * head_dim * dtype.itemsize
        stored = kv_heads * BLOCK_SIZE * (uncompressed + compressed * (head_dim + _SCALE_BYTES))
        return stored if latent else 2 * stored

    def cold_layers(self, layer: int) -> ColdLayers:
        """A layer that has cold blocks, alone."""
        return self._alone[layer]

    @property
    def layers(self) -> list[LayerCache]:
        """The blocks of all layers."""
        return self._layers

    def layer(self, layer: int) -> LayerCache:
        """A layer's blocks."""
        return self._layers[layer]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero the hot blocks [n] that get a new owner in this step."""
        for keys, values in self._tensors:
            keys.index_fill_(2, blocks, 0)
            if not self.latent:
                values.index_fill_(2, blocks, 0)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, cells: torch.Tensor) -> None:
        """Write the step's keys and values, each [kv heads, tokens, head dim], into `cells`
        [tokens]; with a latent the keys alone.
        """
        cache = self._layers[layer]
        blocks, offsets = cells // BLOCK_SIZE, cells % BLOCK_SIZE
        cache.keys[:, blocks, :, offsets] = keys.transpose(0, 1)
        if not self.latent:
            cache.values[:, blocks, offsets] = values

    def compress(self, moves: NDArray[np.int32], layer: int | None = None) -> None:
        """Compress full hot blocks to cold ones, or copy them, in one layer or in all that have cold blocks.

        Args:
            moves: [n, 2], hot blocks and cold ones.
            layer: number of the layer; None: all layers. Copies are made in all.
        """
        if not len(moves):
            return
        if self._copies:
            self._copy(moves)
            return
        numbers = self._alone if layer is None else [each for each in (layer,) if each in self._alone]
        device = self.keys.device
        if gpu.usable(device, self.keys.dtype, self.head_dim, self.latent):
            from lockstep_engine.kernels import triton_compress  # noqa: PLC0415 - loads Triton

            moves_on_device = torch.from_numpy(moves.astype(np.int32)).to(device, non_blocking=True)
            for group in self._groups if layer is None else [self._alone[each] for each in numbers]:
                triton_compress.compress(group, moves_on_device)
        elif self.by_cpu_kernel:
            for number in numbers:
                cpu.compress(self.calls[number], moves, torch.get_num_threads())
        else:
            indices = torch.from_numpy(moves.astype(np.int64)).to(device, non_blocking=True)
            for number in numbers:
                compress(self._layers[number], indices)

    def _copy(self, moves: NDArray[np.int32]) -> None:
        """Copy hot blocks to cold ones, a few at a time: a large step has hundreds of them."""
        for first in range(0, len(moves), _COPIED_AT_ONCE):
            sources, targets = moves[first : first + _COPIED_AT_ONCE].T.astype(np.int64)
            pairs = torch.from_numpy(np.stack([sources, targets + self.first_cold]))
            hot, cold = pairs.to(self.keys.device, non_blocking=True)
            for each in (self.keys, self.values):
                each.index_copy_(2, cold, each.index_select(2, hot))

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [rows, tokens, head dim], of the blocks named by `index` [rows * blocks a row], which
        `block_index` has made for the layer. Values of a latent are that wide.
        """
        cache = self._layers[layer]
        return self._gather(cache.keys, cache.values, index, rows)

    def gather_cold(
        self, layer: int, index: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The cold blocks named by `index` [rows * blocks a row]: codes of keys and values in the model's dtype, each
        [rows, tokens, head dim], and their scales [rows, tokens]; None if the layer is not compressed.
        """
        cold = self._layers[layer].cold
        assert cold is not None
        keys, values = self._gather(cold.keys, cold.values, index, rows)
        if cold.key_scales is None or cold.value_scales is None:
            return keys, values, None, None
        keys, values = (each.view(torch.float8_e4m3fn).to(self.keys.dtype) for each in (keys, values))
        scales = (each.flatten(0, 1).index_select(0, index) for each in (cold.key_scales, cold.value_scales))
        key_scales, value_scales = (each.view(rows, -1) for each in scales)
        return keys, values, key_scales, value_scales

    def block_tensors(self, *, cold: bool) -> list[tuple[torch.Tensor, int]]:
        """What the cold blocks, or the hot ones, consist of: tensors, and the dimension of each that counts blocks;
        the one before it counts heads.
        """
        if not cold:
            stored = 1 if self.latent else 2
            return [(each, 2) for tensors in self._tensors for each in tensors[:stored]]
        if self._copies:
            return [(each[:, :, self.first_cold :], 2) for each in (self.keys, self.values)]
        colds = [each.cold for each in self._layers if each.cold is not None]
        parts: list[tuple[torch.Tensor | None, ...]] = [
            (each.keys, each.key_scales)
            if self.latent
            else (each.keys, each.values, each.key_scales, each.value_scales)
            for each in colds
        ]
        return [(tensor, 1) for tensors in parts for tensor in tensors if tensor is not None]

    def block_index(self, tables: NDArray[np.int32], layer: int = 0) -> torch.Tensor:
        """For `gather`: tables [sequences, width] → [sequences * kv heads * width]; ids that the layer's tensors of hot
        blocks do not have give zeros.
        """
        blocks = self._layers[layer].keys.shape[1]
        return self._index(np.where((tables < 0) | (tables >= blocks), blocks - 1, tables), blocks)

    def cold_index(self, tables: NDArray[np.int32]) -> torch.Tensor:
        """For `gather_cold`: tables [sequences, width] → [sequences * kv heads * width]; ids that are not cold give
        zeros.
        """
        cold = tables.astype(np.int64) - self.first_cold
        return self._index(np.where(cold < 0, self.cold_blocks, cold), self.cold_blocks + 1)

    def _group_layers(self, numbers: list[int], is_compressed: bool) -> None:
        """Make the cold blocks of some layers."""
        if not numbers:
            return
        each = (len(numbers), self.kv_heads, self.cold_blocks + 1)
        dtype = torch.uint8 if is_compressed else self.keys.dtype

        def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((*each, *shape), dtype=of, device=self.keys.device)

        key_scales = zeros(BLOCK_SIZE, of=torch.float32) if is_compressed else None
        value_scales = zeros(BLOCK_SIZE, of=torch.float32) if is_compressed and not self.latent else key_scales
        keys = zeros(self.head_dim, BLOCK_SIZE)
        on_device = torch.tensor(numbers, dtype=torch.int32, device=self.keys.device)
        cold = ColdLayer(keys, self._values_of(keys), key_scales, value_scales)
        group = ColdLayers(on_device, self.keys, self.values, cold, self.latent)
        self._groups.append(group)
        self._alone |= {number: group.at(place) for place, number in enumerate(numbers)}

    def _values_of(self, keys: torch.Tensor) -> torch.Tensor:
        """The values to keys [..., head dim, 16]: a part of them, or zeros of their own [..., 16, head dim]."""
        if self.latent:
            return keys[..., : self.latent, :].transpose(-2, -1)
        return keys.new_zeros((*keys.shape[:-2], BLOCK_SIZE, self.head_dim))

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (each.flatten(0, 1).index_select(0, index) for each in (keys, values))
        return keys.transpose(1, 2).reshape(rows, -1, self.head_dim), values.reshape(rows, -1, values.shape[-1])

    def _index(self, blocks: NDArray[np.integer], of: int) -> torch.Tensor:
        heads = np.arange(self.kv_heads, dtype=np.int64) * of
        index = blocks.astype(np.int64)[:, None, :] + heads[None, :, None]
        return torch.from_numpy(index.reshape(-1)).to(self.keys.device, non_blocking=True)


def _layer_call(cache: LayerCache) -> LayerCall:
    kv_heads, blocks, dim, _ = cache.keys.shape
    call = LayerCall(
        keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(),
        kv_heads=kv_heads,
        blocks=blocks,
        dim=dim,
        kind=cpu.kind(cache.keys.dtype),
    )
    if cache.cold is not None:
        cold = cache.cold
        call.cold_keys, call.cold_values = cold.keys.data_ptr(), cold.values.data_ptr()
        call.cold_blocks = cold.keys.shape[1]
        if cold.key_scales is not None and cold.value_scales is not None:
            call.key_scales, call.value_scales = cold.key_scales.data_ptr(), cold.value_scales.data_ptr()
    return call
