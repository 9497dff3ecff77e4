"""Small copies between host and GPU that never make the host wait.

CUDA may wait for earlier work before it copies from memory that is not pinned. Torch's allocator of pinned memory keeps
a piece until the copies from it are done, so that it costs no allocation when it is used again.
"""

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, of its type. On the CPU it shares the array's memory where it can."""
    here = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """`x` on the host, from a GPU in pinned memory; it is valid once the device has finished earlier work."""
    return x.to("cpu", non_blocking=True)
