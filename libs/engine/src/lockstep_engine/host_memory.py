"""The rank's part of the prefix cache's second tier: slots of host memory, and the copies between them and the KV
cache. The driver decides what is in which slot (`host_tier`).

A block's contents are the same bytes in its slots as in the cache, there divided by heads: the units of a block (see
`HostSizes`) lie one after the other, each as a rank that has its heads alone would have it. So ranks of another number
can use it. All copies are queued on the stream that computes the steps, so that no host waits and no order but the
plan's is possible; on a GPU the memory is pinned.
"""

import logging
import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from lockstep_common.errors import invalid
from numpy.typing import NDArray

from lockstep_engine.blocks import HostSizes
from lockstep_engine.kv_cache import KvCache

logger = logging.getLogger("lockstep.engine")


@dataclass(frozen=True)
class _Part:
    """What one tensor of a cache contributes to each unit of a block."""

    tensor: torch.Tensor
    """Its dimension of heads is divided in two: units, and heads of a unit."""
    dim: int
    """The dimension that counts blocks."""
    shape: torch.Size
    """Of one unit of one block."""
    bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int, units: int) -> "_Part":
        """The part of a tensor whose dimension `dim` counts blocks, and the one before it heads."""
        parted = tensor.view(*tensor.shape[: dim - 1], units, tensor.shape[dim - 1] // units, *tensor.shape[dim:])
        one = parted.select(dim + 1, 0).select(dim - 1, 0)
        return cls(parted, dim + 1, one.shape, one.numel() * tensor.element_size())


class HostMemory:
    """Slots for blocks of a KV cache. Without slots it takes no memory.

    Args:
        sizes: number and size of the slots.
        cache: the blocks.
        segment: descriptor of the memory, which the driver shares; -1: it is the rank's own.

    Raises:
        LockstepError: INVALID_REQUEST: there is not so much memory.
    """

    def __init__(self, sizes: HostSizes, cache: KvCache, segment: int = -1) -> None:
        self._sizes = sizes
        self._cache = cache
        self._device = cache.keys.device
        size = sizes.slots * sizes.slot_bytes
        try:
            if segment < 0 or not size:
                self._memory = torch.empty((sizes.slots, sizes.slot_bytes), dtype=torch.uint8)
            else:
                shared = torch.frombuffer(mmap.mmap(segment, size), dtype=torch.uint8)
                self._memory = shared.view(sizes.slots, sizes.slot_bytes)
        except (RuntimeError, OSError, ValueError) as error:
            raise invalid("host_cache_bytes", f"is more than there is: {size} bytes cannot be allocated") from error
        if sizes.slots and self._device.type == "cuda":
            _pin(self._memory, self._device)
        self._parts = tuple(
            [_Part.of(tensor, dim, sizes.units) for tensor, dim in cache.block_tensors(cold=cold)]
            for cold in (False, True)
        )

    def copy(self, spills: NDArray[np.int32] | None, loads: NDArray[np.int32] | None) -> None:
        """Execute the spills of a plan, then its loads (see `Plan`)."""
        for copies, to_host in ((spills, True), (loads, False)):
            if copies is None:
                continue
            cold = copies[:, 0] >= self._cache.first_cold
            for version, rows in ((False, copies[~cold]), (True, copies[cold])):
                slots = rows[:, 1 : 2 if version else 1 + self._sizes.hot_slots]
                blocks = rows[:, 0].astype(np.int64) - (self._cache.first_cold if version else 0)
                # No more at once than a step loads beside others, so that little of a GPU's memory is needed between.
                batch = max(1, self._sizes.step_slots // slots.shape[1])
                for first in range(0, len(rows), batch):
                    part = slice(first, first + batch)
                    self._copy(blocks[part], slots[part], cold=version, to_host=to_host)

    def _copy(self, blocks: NDArray[np.int64], slots: NDArray[np.int32], *, cold: bool, to_host: bool) -> None:
        """Copy blocks [n] of one version to their slots [n, slots of a block], or back."""
        parts = self._parts[cold]
        index = torch.from_numpy(blocks).to(self._device, non_blocking=True)
        shape = (len(blocks), slots.shape[1] * self._sizes.slot_bytes)
        between = torch.empty(shape, dtype=torch.uint8, device=self._device)
        pieces = list(zip(between.view(-1, self._sizes.slot_bytes), slots.ravel().tolist(), strict=True))
        if not to_host:
            for piece, slot in pieces:
                piece.copy_(self._memory[slot], non_blocking=True)
        units, begin = self._sizes.units, 0
        unit_bytes = sum(each.bytes for each in parts)
        contents = between[:, : units * unit_bytes].view(len(blocks), units, unit_bytes)
        for part in parts:
            end = begin + part.bytes
            piece = contents[..., begin:end]
            if to_host:
                found = part.tensor.index_select(part.dim, index).movedim((part.dim, part.dim - 2), (0, 1))
                piece.copy_(found.reshape(len(blocks), units, -1).view(torch.uint8))
            else:
                found = piece.contiguous().view(part.tensor.dtype).view(-1, units, *part.shape)
                part.tensor.index_copy_(part.dim, index, found.movedim((0, 1), (part.dim, part.dim - 2)))
            begin = end
        if to_host:
            for piece, slot in pieces:
                self._memory[slot].copy_(piece, non_blocking=True)


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pin host memory in place: torch's own pinned memory is rounded up to a power of two. Pages that cannot be pinned
    are copied all the same, but the host waits for each copy.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        logger.warning("the host tier of the prefix cache is not pinned: CUDA error %d", error)
        # The runtime keeps the error until somebody asks for the last one. torch does so after each launch of a kernel,
        # and would take it for that kernel's own: one that does nothing takes it here.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
