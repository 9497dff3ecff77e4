"""Runs in the builder stage of every image: wheels in, finished layers out; nothing is fetched.

usage: python3 install.py NAME VERSION [KUBERNETES_API]...

Makes /opt/venv from /wheels, writes its SBOM, drops what no service uses, compiles the bytecode, and moves the result
to /layers/cuda, /layers/torch, /layers/packages and /layers/sbom: trees to be copied onto /, in this order.
"""

import compileall
import fnmatch
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

import elf
import sbom

WHEELS = Path("/wheels")
SBOM_WHEELS = Path("/wheels-sbom")
VENV = Path("/opt/venv")
LAYERS = Path("/layers")

UNUSED = (
    # Only for C++ extensions compiled at run time, and there is no compiler in the image.
    "torch/include",
    "torch/share/cmake",
    "nvidia/*/include",
    "nvidia/*/lib/*.a",
    # Compiled tests of torch and its own protoc. torch refuses to start without torch_shm_manager.
    "torch/test",
    "torch/bin/[!t]*",
    "torch/bin/test*",
    # Tests of libraries.
    "numpy/tests",
    "numpy/*/tests",
    "numpy/f2py",
    "networkx/**/tests",
    "sympy/**/tests",
    "mpmath/tests",
)
"""Patterns of unused files, below site-packages."""

LAYER_PACKAGES = {
    "cuda": ("nvidia", "nvidia_*", "cuda", "cuda_*", "triton", "triton-*"),
    "torch": ("torch", "torch-*", "torchgen", "functorch"),
}
"""Files with a separate layer; all others are in `packages`."""


def install(wheels: Path, venv: Path) -> Path:
    """Make a virtual environment of these wheels, without pip.

    Returns:
        its site-packages.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "--no-cache-dir", "--quiet"]
    # By name, not by path: a package installed from a path has no package URL in the SBOM.
    options = ["--no-index", f"--find-links={wheels}", "--no-deps", "--no-compile", "--root-user-action=ignore"]
    run([*pip, "install", *options, "--require-hashes", "--requirement", str(wheels / "requirements.txt")])
    return next(venv.glob("lib/python3*/site-packages"))


def remove_unused(site: Path) -> None:
    """Delete what UNUSED names."""
    for pattern in UNUSED:
        for path in list(site.glob(pattern)):
            remove(path)


def trim_kubernetes(site: Path, python: Path, apis: list[str]) -> None:
    """Keep these APIs of the Kubernetes client (of its asyncio part), out of over 60 with 1,500 classes of objects."""
    if not (site / "kubernetes").is_dir():
        return
    program = (
        "import json, sys, kubernetes.aio.client as client\n"
        f"for name in {apis}: getattr(client, name)\n"
        "print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)]))"
    )
    loaded = set(json.loads(run([str(python), "-B", "-c", program])))
    for folder in ("client/api", "client/models", "aio/client/api", "aio/client/models"):
        for path in (site / "kubernetes" / folder).glob("*.py"):
            if str(path) not in loaded:
                path.unlink()


def strip_libraries(site: Path) -> None:
    """Shorten all libraries but torch's and CUDA's, whose symbols profilers need."""
    kept = matching(site.iterdir(), tuple(pattern for patterns in LAYER_PACKAGES.values() for pattern in patterns))
    for library in site.rglob("*.so*"):
        if not any(library.is_relative_to(folder) for folder in kept):
            elf.strip(library)


def split(site: Path, venv: Path, layers: Path) -> None:
    """Move the environment `venv` into `layers`."""
    for layer, patterns in LAYER_PACKAGES.items():
        target = layers / layer / site.relative_to("/")
        target.mkdir(parents=True)
        for entry in matching(site.iterdir(), patterns):
            shutil.move(entry, target / entry.name)
    shutil.move(venv, layers / "packages" / venv.relative_to("/"))


def matching(paths: Iterable[Path], patterns: tuple[str, ...]) -> list[Path]:
    """The paths whose last part one of the patterns describes."""
    return [path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)]


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def run(command: list[str]) -> str:
    """Run a command that has to succeed; its output."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Build the layers of the image named on the command line."""
    name, version, *apis = sys.argv[1:]
    site = install(WHEELS, VENV)
    tool = install(SBOM_WHEELS, Path("/sbom-venv")).parents[2]
    sbom.write(tool, VENV, name, version, LAYERS / "sbom/usr/share/sbom" / f"{name}.cdx.json")
    remove_unused(site)
    trim_kubernetes(site, VENV / "bin/python", apis)
    strip_libraries(site)
    # By hash and never checked: file times in an image are not those of the build, and nothing is edited here.
    compileall.compile_dir(str(site), quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, workers=0)
    split(site, VENV, LAYERS)


if __name__ == "__main__":
    main()
