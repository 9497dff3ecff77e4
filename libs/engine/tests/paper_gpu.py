"""A GPU on paper: kernels are compiled for it to machine code and never run.

It shows without a device that kernels compile for real GPUs in the types that Triton's interpreter cannot compute
with, that they fit registers and shared memory, and how often they are compiled. Install it before the first kernel is
launched, in a process of its own without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""What a program may have: NVIDIA's tables of technical specifications per compute capability."""


@dataclass
class Usage:
    """What a compiled kernel needs."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int] = field(repr=False)


class PaperGpu(DriverBase):
    """Compiles for `arch` (80, 86: Ampere, 89: Ada, 90: Hopper, 100: Blackwell) and
    notes what was compiled; `examine`: and what it needs."""

    def __init__(self, arch: int, *, examine: bool = True) -> None:
        self.arch = arch
        self._examine = examine
        self.used: list[Usage] = []
        self.compiled = 0
        self.utils = self

    def install(self) -> "PaperGpu":
        triton.runtime.driver.set_active(self)
        triton.knobs.runtime.jit_post_compile_hook = self._count
        return self

    def _count(self, **_: object) -> None:
        self.compiled += 1

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> str:
        return "cpu"

    def get_benchmarker(self) -> None:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self.arch]}

    def launcher_cls(self, source: object, metadata: object) -> object:
        return lambda *_: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        if not self._examine:
            return 0, 0, 0, 0, 1024
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            report = _cuobjdump("--dump-resource-usage", file.name)
            listing = _cuobjdump("--dump-sass", file.name)
        registers, stack, local = (
            int(re.search(rf"\b{word}:(\d+)", report).group(1)) for word in ("REG", "STACK", "LOCAL")
        )
        instructions = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.]+)", listing, re.MULTILINE))
        self.used.append(Usage(name, registers, stack + local, shared, dict(instructions)))
        return 0, 0, registers, stack + local, 1024


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout
