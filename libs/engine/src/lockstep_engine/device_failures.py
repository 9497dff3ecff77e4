"""Finds from an error what has failed: memory, a kernel that can never run here, or the device.

Ranks are started again after a failure of memory or of a device, and never after that of a kernel, which every start
would repeat. Most of these errors share a type, so the text of the error decides.
"""

import torch
from lockstep_common.errors import LockstepError

_NO_MEMORY = ("can't allocate memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says on the CPU, Triton, and torch of cuBLAS."""
_TRITON = "Triton Error [CUDA]: "
"""What Triton puts before CUDA's answer. The error is a RuntimeError."""
_OF_KERNELS = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "device kernel image is invalid",
    "no kernel image is available for execution on the device",
    "a PTX JIT compilation failed",
    "PTX JIT compiler library not found",
    "the provided PTX was compiled with an unsupported toolchain",
    "PTX JIT compilation was disabled",
    "shared object symbol not found",
    "shared object initialization failed",
    "named symbol not found",
    "too many resources requested for launch",
    "too many blocks in cooperative launch",
    "operation not supported",
    "Failed to create tensor map descriptor",
)
"""CUDA's answers, and one of Triton's, that say that a kernel cannot be built or launched, with whatever start."""
_OF_RECORDING = "captur"
"""Part of CUDA's answers to work that cannot be recorded: all name the capture."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, a GPU's, or that of a library whose error has no type of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(each in str(error) for each in _NO_MEMORY)


def is_of_kernel(error: BaseException) -> bool:
    """Whether an error says that one of our kernels cannot be built or launched here. Triton's have no base of their
    own, but are no RuntimeErrors, except for what the driver answers. Triton wraps also what has failed for want of
    memory.
    """
    if is_of_device(error):
        return False
    if isinstance(error, RuntimeError):
        return _TRITON in str(error) and _is_lasting(error)
    return not isinstance(error, (LockstepError, MemoryError, ConnectionError, TimeoutError))


def is_of_device(error: BaseException) -> bool:
    """Whether memory ran out or the device failed, so that another start may succeed. A recording that such an error
    breaks off may end in another one, so the errors before it count, too.
    """
    while not (is_out_of_memory(error) or _is_answer(error)):
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before
    return True


def _is_answer(error: BaseException) -> bool:
    """Whether CUDA answers that the device has failed."""
    by_triton = isinstance(error, RuntimeError) and _TRITON in str(error)
    answered = by_triton or isinstance(error, torch.AcceleratorError)
    return answered and not _is_lasting(error) and _OF_RECORDING not in _first_line(error)


def _is_lasting(error: BaseException) -> bool:
    said = _first_line(error)
    return any(each in said for each in _OF_KERNELS)


def _first_line(error: BaseException) -> str:
    """CUDA's answer. Torch has further lines, with advice."""
    return str(error).strip().partition("\n")[0]
