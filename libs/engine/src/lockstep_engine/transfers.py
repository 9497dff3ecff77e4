"""Small copies between host and GPU, which never make the host wait for the GPU's earlier work.

Copies to the GPU come from usual memory, which CUDA stages at once: that takes the host less time than pinned memory.
Larger ones, for which the host would wait, come from memory that torch keeps pinned. A copy costs as much as some
launches, so arrays that go together are one copy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_STAGED_BYTES = 2**20
"""Measured on an H200: copies of up to so much did not wait for a busy GPU."""
_ALIGNED = 16
"""Kernels are compiled for tensors that begin at a multiple of so many bytes."""


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, of its type. On the CPU it shares the array's memory where it can."""
    if not (array.flags.c_contiguous and array.flags.writeable):  # torch warns of what cannot be written to
        array = np.require(array, requirements=["C", "W"])
    here = torch.from_numpy(array)
    if device.type == "cpu":
        return here
    if device.type == "cuda" and array.nbytes > _STAGED_BYTES:
        here = here.pin_memory()
    return here.to(device, non_blocking=True)


def to_device_at_once(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, of their shapes and types, in one copy."""
    sizes = [array.nbytes + -array.nbytes % _ALIGNED for array in arrays]
    ends = np.cumsum(sizes).tolist()
    packed = np.empty(ends[-1], np.uint8)
    parts = []
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        part = packed[end - size : end - size + array.nbytes].view(array.dtype).reshape(array.shape)
        part[...] = array
        parts.append((end - size, array))
    there = to_device(packed, device)
    return [there[begin : begin + array.nbytes].view(_dtype(array.dtype)).view(array.shape) for begin, array in parts]


def to_host(x: torch.Tensor) -> torch.Tensor:
    """`x` on the host, from a GPU in pinned memory; it is valid once the device has finished earlier work."""
    return x.to("cpu", non_blocking=True)


def _dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
