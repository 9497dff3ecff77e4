"""Kernels that were compiled when the image was built: where they are, and how Triton is made to find them.

Two things are prebuilt: the C module by which Triton talks to the driver (the only thing that it needs a C compiler
for), and machine code for some models and GPUs. Both are in one folder that nothing writes to, named by
LOCKSTEP_PREBUILT_KERNELS. Machine code that is not there is compiled by Triton's own compiler, which needs no other
program, into a folder that is writable (`TRITON_CACHE_DIR`, by default below the home directory).

Importing this module does not load Triton; `activate` does.
"""

import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger("lockstep.engine")

FOLDER_VARIABLE = "LOCKSTEP_PREBUILT_KERNELS"
MANIFEST = "manifest.json"
CODE = "code"
"""Folder of the machine code, in Triton's own layout: a folder for each key."""
_MODULE = "cuda_utils"


def folder() -> Path | None:
    """Where prebuilt kernels are; None: this installation has none."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name else None


def module_path(where: Path) -> Path:
    """The C module for this Python."""
    return where / f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"


def source_digest() -> str:
    """Hash of the source of Triton's C module, as it is installed."""
    return hashlib.sha256(source_path().read_bytes()).hexdigest()


def source_path() -> Path:
    """The source of Triton's C module."""
    import triton  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415 - imported where it is used

    return Path(triton.__file__).parent / "backends/nvidia/driver.c"


def module_problem(where: Path) -> str | None:
    """Why the prebuilt C module cannot be used with the installed Triton and Python; None: it can."""
    try:
        manifest = json.loads((where / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{FOLDER_VARIABLE}: {where / MANIFEST} cannot be read ({type(error).__name__})"
    if not module_path(where).is_file():
        return f"{FOLDER_VARIABLE}: {module_path(where)} is missing: it was built for another Python, or not at all"
    if not isinstance(manifest, dict) or manifest.get("driver_sha256") != source_digest():
        return f"{FOLDER_VARIABLE}: {where} was built for another version of Triton"
    return None


class Misses:
    """Kernels that were not in the prebuilt folder, since the process began."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str) -> None:
        """Note a kernel's name."""
        self.names.append(name)


MISSES = Misses()


@cache
def activate() -> None:
    """Make Triton use the prebuilt folder in this process, if there is one. Call it before the first kernel.

    Raises:
        ImportError: Triton is not installed.
    """
    where = folder()
    if where is None:
        return
    import triton  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415 - loads Triton

    if module_problem(where) is None:
        module = str(module_path(where))

        def prebuilt(name: str, *_: Sequence[str] | str) -> str:
            """Stands in for the C compiler."""
            if name != _MODULE:
                raise RuntimeError(f"{name} is not prebuilt, and this image has no C compiler")
            return module

        triton.knobs.build.impl = prebuilt
        # Triton looks for libcuda's folder to link with it, by a program that an image may not have.
        if not os.environ.get("TRITON_LIBCUDA_PATH"):
            triton.knobs.nvidia.libcuda_path = str(where)
    triton.knobs.cache.manager_class = _cache_class(where / CODE)


def _cache_class(code: Path) -> type[Any]:
    """Triton's class of a kernel's cache, which looks into a folder first and never writes to it."""
    from triton.runtime.cache import FileCacheManager  # noqa: PLC0415 - loads Triton

    class PrebuiltCache(FileCacheManager):  # type: ignore[misc,unused-ignore]
        """Machine code of one key: from the prebuilt folder, else from Triton's own cache."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self._ready = code / key
            self._found = not override and not dump and self._ready.is_dir()
            if not self._found:
                super().__init__(key, override=override, dump=dump)

        def get_file(self, filename: str) -> str | None:
            if self._found:
                path = self._ready / filename
                return str(path) if path.is_file() else None
            found: str | None = super().get_file(filename)
            return found

        def get_group(self, filename: str) -> dict[str, str] | None:
            if self._found:
                # The paths that Triton wrote down are those of the machine that compiled.
                return {path.name: str(path) for path in self._ready.iterdir() if not path.name.startswith("__grp__")}
            MISSES.add(filename.removesuffix(".json"))
            group: dict[str, str] | None = super().get_group(filename)
            return group

    return PrebuiltCache
