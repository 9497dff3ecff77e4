"""A GPU on paper: Triton compiles for it, and launches do nothing. So kernels are compiled on a machine without a GPU,
with the specialisations that Triton derives from a real call's arguments.

Install it before the first kernel is launched, in a process of its own without TRITON_INTERPRET.
"""

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from lockstep_engine.kernels.tiles import LIMITS

Note = Callable[[str, bytes, int, int], tuple[int, int]]
"""Called with a compiled kernel's name, machine code, shared bytes and warps; returns registers and spilled bytes."""


class PaperDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver for a GPU of compute capability `arch` / 10 that is not there.

    Args:
        arch: a key of `tiles.LIMITS`.
        processors: multiprocessors that it claims to have.
        note: called with every kernel that is loaded.
    """

    def __init__(self, arch: int, *, processors: int = 132, note: Note | None = None) -> None:
        self.arch = arch
        self.utils = self
        self._processors = processors
        self._note = note
        self._warps = 0

    def install(self) -> "PaperDriver":
        """Make it Triton's driver in this process."""
        triton.runtime.driver.set_active(self)
        return self

    @classmethod
    def is_active(cls) -> bool:
        """See Triton's `DriverBase`, as for the others."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No C code is made of it."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The GPU."""
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> str:
        """Where tensors are."""
        return "cpu"

    def get_benchmarker(self) -> None:
        """Nothing runs, so nothing can be timed."""
        raise NotImplementedError

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - Triton's
        """There is one."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002 - Triton's
        """The properties that Triton's own driver gives, as far as they are read."""
        return {"max_shared_mem": LIMITS[self.arch].shared_bytes, "multiprocessor_count": self._processors}

    def launcher_cls(self, source: object, metadata: Any) -> Callable[..., None]:  # noqa: ARG002 - Triton's
        """A launch does nothing. Triton asks for it before it loads the kernel."""
        self._warps = metadata.num_warps
        return lambda *_: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:  # noqa: ARG002 - Triton's
        """Module, function, registers, spilled bytes, most threads."""
        registers, spilled = (0, 0) if self._note is None else self._note(name, cubin, shared, self._warps)
        return 0, 0, registers, spilled, 1024
