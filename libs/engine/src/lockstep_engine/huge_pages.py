"""Memory in huge pages, for weights that every step reads from end to end: with pages of 4 KiB a processor waits for
addresses as well as for memory.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE = 2 * 2**20


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU without values. The kernel is asked for huge pages if it fills some; where it has none the
    tensor is in usual ones.
    """
    size = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < 2 * HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
