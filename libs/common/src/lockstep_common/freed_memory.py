"""Returns freed memory to the system.

glibc keeps what a program frees for its later allocations, and that counts against a container's limit.
"""

import ctypes


def return_freed_memory() -> None:
    """Give what is free in the allocator back to the kernel. Only glibc has a call for it; others need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
