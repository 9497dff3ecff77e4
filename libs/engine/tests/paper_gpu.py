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
from lockstep_engine.kernels.paper import PaperDriver
from lockstep_engine.precompile import resources


@dataclass
class Usage:
    """What a compiled kernel needs."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int] = field(repr=False)


class PaperGpu(PaperDriver):
    """Compiles for `arch` (80, 86: Ampere, 89: Ada, 90: Hopper, 100: Blackwell) and notes what was compiled;
    `examine`: and what it needs.
    """

    def __init__(self, arch, *, examine=True):
        super().__init__(arch, note=self._examine if examine else None)
        self.used = []
        self.compiled = 0

    def install(self):
        super().install()
        triton.knobs.runtime.jit_post_compile_hook = self._count
        return self

    def _count(self, **_):
        self.compiled += 1

    def _examine(self, name, cubin, shared, warps):
        registers, spilled = resources(cubin)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            listing = _cuobjdump("--dump-sass", file.name)
        instructions = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.]+)", listing, re.MULTILINE))
        self.used.append(Usage(name, registers, spilled, shared, dict(instructions)))
        return registers, spilled


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout
