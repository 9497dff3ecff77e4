"""`python -m lockstep_tools.repository.lock`: writes requirements.lock, requirements-cuda.lock and
requirements-strangers.lock, with hashes.

pip-compile resolves, and takes the hashes of every file of a version from pip's own index. torch is the exception: its
release has a CPU build (`+cpu`, on PyTorch's index or a local folder) and others on PyPI, under one version. The lock
names the version without the build and has the hashes of all of them, so that any index may serve it. What PyPI's build
for Linux (CUDA) needs beyond the rest is in a file of its own. So are other projects' clients, which have an
environment of their own: their versions have nothing to do with the rest.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.repository.images.catalog import distribution
from lockstep_tools.repository.images.locks import CUDA_LOCK, LOCK

_ROOT = Path(__file__).resolve().parents[4]
_SOURCE = "requirements.in"
_STRANGERS_SOURCE, _STRANGERS_LOCK = "requirements-strangers.in", "requirements-strangers.lock"
_COMPILE = (
    *("--quiet", "--generate-hashes", "--strip-extras", "--allow-unsafe", "--no-header"),
    *("--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"),
)
_TORCH = re.compile(r"^torch==([0-9.]+)(\+\w+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^([A-Za-z0-9][\w.-]*)==(?:.*\\\n)+.*\n", re.MULTILINE)
_PYTHONS = ("3.11", "3.12", "3.13")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_14_0_arm64")
_TIMEOUT_S = 1800


def main() -> int:
    """Write the files."""
    try:
        text = compiled(_SOURCE, (_ROOT / LOCK).read_text())
        found = _TORCH.search(text)
        if found is None:
            raise CommandError(f"pip-compile gives no torch for {_SOURCE}", FAILED)
        version = found[1]
        sums = set(re.findall(r"[0-9a-f]{64}", found[3])) | torch_sums(version)
        (_ROOT / LOCK).write_text(text.replace(found[0], torch_entry(version, sums)))
        (_ROOT / CUDA_LOCK).write_text(cuda_entries(version, text))
        strangers = _ROOT / _STRANGERS_LOCK
        strangers.write_text(compiled(_STRANGERS_SOURCE, strangers.read_text()))
    except CommandError as error:
        print(f"lock: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def compiled(source: str, previous: str, *options: str) -> str:
    """pip-compile's output for a file of requirements; versions in `previous` are kept where possible.

    Raises:
        CommandError: pip-compile cannot resolve it.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, LOCK)
        # Only versions are kept: hashes are fetched again.
        output.write_text("".join(f"{pin}\n" for pin in pins_of(previous)))
        command = [sys.executable, "-m", "piptools", "compile", *_COMPILE, *options, "--output-file", str(output)]
        done = subprocess.run(
            [*command, source], cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise CommandError(f"{source} cannot be resolved: {done.stderr.strip()[-500:]}", FAILED)
        return output.read_text()


def pins_of(text: str) -> list[str]:
    """`name==version` of every entry of a lock file."""
    return re.findall(r"^[A-Za-z0-9][\w.-]*==[^\s;]+", text, re.MULTILINE)


def torch_entry(version: str, sums: set[str]) -> str:
    """The lock file's entry for any build of a version of torch."""
    lines = [f"torch=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(sums))]
    return " \\\n".join(lines) + "\n"


def torch_sums(version: str) -> set[str]:
    """The sha256 of torch's wheels on the index beside the CPU build. Nothing is downloaded but their metadata.

    Raises:
        CommandError: the index has none.
    """
    sums = set()
    for python in _PYTHONS:
        for platform in _PLATFORMS:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--ignore-installed",
                "--no-deps",
            ]
            command += ["--only-binary=:all:", "--target=/nowhere", "--report=-"]
            command += [f"--python-version={python}", f"--platform={platform}", f"torch=={version},!={version}+cpu"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode == 0:
                entries = json.loads(done.stdout)["install"]
                sums |= {entry["download_info"]["archive_info"]["hashes"]["sha256"] for entry in entries}
    if not sums:
        raise CommandError(f"the index has no torch {version} beside the CPU build", FAILED)
    return sums


def cuda_entries(version: str, lock: str) -> str:
    """The entries that the CUDA build of torch needs beyond the lock file."""
    locked = {distribution(pin) for pin in pins_of(lock)}
    with tempfile.TemporaryDirectory() as folder:
        source, constraints = Path(folder, "torch.in"), Path(folder, "pins.txt")
        source.write_text(f"torch=={version},!={version}+cpu\n")
        constraints.write_text("".join(f"{pin}\n" for pin in pins_of(lock) if distribution(pin) != "torch"))
        previous = (_ROOT / CUDA_LOCK).read_text()
        text = compiled(str(source), previous, "--no-annotate", "--constraint", str(constraints))
    return "".join(match[0] for match in _ENTRY.finditer(text) if distribution(match[1]) not in locked)


if __name__ == "__main__":
    sys.exit(main())
