"""What is compiled on the host for images: the engine's C kernels, which are plain C behind ctypes, so nothing else has
to match; and the C module by which Triton launches GPU kernels, for which Python and Triton have to be the image's.

The compilers' flags are in the engine's `setup.py` and `precompile.py` alone.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.repository.images.wheels import GLIBC

PYTHON = (3, 11)
"""Of the base image."""


def build(root: Path) -> Path:
    """Compile into `build/kernels/lockstep_engine/kernels/_cpu.so`, a name that every Python finds.

    Nothing is done while that is newer than its sources. The library that an editable install has made of them is taken
    where there is one: `make setup` has spent the time of compiling already.

    Raises:
        CommandError: without a compiler, or when the result would not load in the image.
    """
    engine = root / "libs/engine"
    kernels = engine / "src/lockstep_engine/kernels"
    library = root / "build/kernels/lockstep_engine/kernels/_cpu.so"
    sources = [engine / "setup.py", *kernels.glob("*.[ch]")]
    if _is_newer(library, sources):
        return library
    installed = next((found for found in kernels.glob("_cpu.*.so") if _is_newer(found, sources)), None)
    with tempfile.TemporaryDirectory() as folder:
        built = installed or _compile(engine, folder)
        check_glibc(built)
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, library)
    return library


def _is_newer(library: Path, sources: Iterable[Path]) -> bool:
    return library.is_file() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def _compile(engine: Path, folder: str) -> Path:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", folder, "--build-temp", folder]
    done = subprocess.run(command, cwd=engine, capture_output=True, text=True, check=False)
    built = next(Path(folder).glob("lockstep_engine/kernels/_cpu.*.so"), None)
    if built is None:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"the engine's C kernels were not built, a C compiler is needed: {reason}", FAILED)
    return built


def build_gpu_module(root: Path, variant: str | None) -> Path:
    """Compile Triton's C module into `build/gpu-module`. For another variant than CUDA the folder stays empty.

    Raises:
        CommandError: without a compiler or Triton, with another Python than the image's, or when the result would not
            load in the image.
    """
    folder = root / "build/gpu-module"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if variant != "cuda":
        return folder
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        raise CommandError(
            f"Triton's C module is compiled for the image's Python: `make` needs Python {wanted}", FAILED
        )
    command = [sys.executable, "-m", "lockstep_engine.precompile", "module", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"the module for GPU kernels was not built: {reason}", FAILED)
    for library in folder.glob("*.so"):
        check_glibc(library)
    return folder


def check_glibc(library: Path) -> None:
    """Refuse a library that needs a later glibc than the base image has.

    Raises:
        CommandError: naming both versions.
    """
    newest = newest_glibc(library.read_bytes())
    if newest > GLIBC:
        needed, has = (".".join(map(str, pair)) for pair in (newest, GLIBC))
        raise CommandError(
            f"{library.name} needs glibc {needed}, the base image has {has}: build on an older system", FAILED
        )


def newest_glibc(binary: bytes) -> tuple[int, int]:
    """The newest `GLIBC_x.y` symbol version in an ELF file; (0, 0) without any."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", binary)
    return max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
