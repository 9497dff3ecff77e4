"""Wheels on the host: `build/wheels/<image>` holds what the image installs, at the versions of the lock file.

Fetched by pip with its own configuration (index, mirror, wheel folder), so that an air-gapped site changes nothing
but pip's settings. A folder is left alone while neither requirements nor lock file change, and its wheels are compared
with the lock file's hashes before every build.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.repository.images.catalog import DEV_REQUIREMENTS, Build, distribution, needs
from lockstep_tools.repository.images.locks import CUDA_LOCK, LOCK, read_pins

PYTHON_VERSION = "3.11"
"""Python's version in the base image."""

GLIBC = (2, 36)
"""glibc's version in the base image, Debian 12. Wheels and kernels that need a later one would not load."""

PIP = (sys.executable, "-m", "pip")

_OLDEST_MANYLINUX = 5


def fetch(root: Path, build: Build) -> Path:
    """Fetch the build's wheels, its development extras and those of the SBOM generator where needed.

    Returns:
        the folder of the image's own wheels.

    Raises:
        CommandError: when pip cannot find or fetch one, or it is not a locked file.
    """
    constraints = read_constraints(root, build.variant)
    folder = root / "build/wheels"
    fetch_into(folder / build.name, needs(root, build.image).requirements, constraints, build.image.unused)
    locked = _requirements(root / LOCK)
    fetch_into(folder / "sbom", ("cyclonedx-bom",), locked)
    check(root, folder / build.name, build.variant)
    check(root, folder / "sbom", None)
    if build.dev:
        fetch_into(folder / "dev", DEV_REQUIREMENTS, locked)
        check(root, folder / "dev", None)
    return folder / build.name


def read_constraints(root: Path, variant: str | None) -> dict[str, str]:
    """The lock file as distribution → requirement; what the CUDA build of torch needs beyond it is in another lock
    file.

    On PyPI torch for Linux is the CUDA build; other indexes have both under one version: each is requested by its local
    version.
    """
    constraints = _requirements(root / LOCK)
    version = constraints["torch"].removeprefix("torch==")
    if variant == "cuda":
        constraints |= _requirements(root / CUDA_LOCK)
        constraints["torch"] = f"torch=={version},!={version}+cpu"
    else:
        constraints["torch"] = f"torch=={version}+cpu"
    return constraints


def platforms() -> list[str]:
    """Every wheel platform that the base image can load, the newest first. pip takes each by its exact name."""
    machine = "x86_64"
    newest = GLIBC[1]
    modern = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, _OLDEST_MANYLINUX - 1, -1)]
    return [
        *modern,
        f"manylinux2014_{machine}",
        f"manylinux2010_{machine}",
        f"manylinux1_{machine}",
        f"linux_{machine}",
    ]


def _requirements(path: Path) -> dict[str, str]:
    return {name: pin.requirement for name, pin in read_pins(path).items()}


def check(root: Path, folder: Path, variant: str | None) -> None:
    """Compare every wheel with the lock files' hashes, and write `requirements.txt` beside them, for the install.

    Raises:
        CommandError: a wheel is not one of the locked files. The folder is gone then.
    """
    pins = read_pins(root / LOCK) | (read_pins(root / CUDA_LOCK) if variant == "cuda" else {})
    lines = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if distribution(name) not in pins or digest not in pins[distribution(name)].sha256:
            shutil.rmtree(folder)
            sentence = f"{wheel.name} is not a file of the lock (sha256 {digest}): its index serves another one"
            raise CommandError(f"wheels of {folder.name} were refused: {sentence}", FAILED)
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    (folder / "requirements.txt").write_text("".join(lines))


def drop_unused(folder: Path, requirements: tuple[str, ...], unused: tuple[str, ...]) -> None:
    """Delete the wheels that `requirements` do not lead to once `unused` is taken away."""
    wheels = {distribution(path.name.partition("-")[0]): path for path in folder.glob("*.whl")}
    waiting = list(requirements)
    reached: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = distribution(requirement)
        if name in wheels and name not in unused and requirement not in reached:
            reached |= {name, requirement}
            waiting += _required_by(wheels[name], requirement)
    for name in wheels.keys() - reached:
        wheels[name].unlink()


def _required_by(wheel: Path, requirement: str) -> list[str]:
    """What a wheel needs for a requirement with these extras. pip has already evaluated other markers."""
    extras = re.search(r"\[(.*?)\]", requirement)
    wanted = set(re.split(r"\s*,\s*", extras[1])) if extras else set()
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    found = []
    for line in lines:
        if line.startswith("Requires-Dist: "):
            needed, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
            only_for = set(re.findall(r"\bextra *== *['\"]([^'\"]+)", marker))
            if not only_for or only_for & wanted:
                found.append(needed.strip())
    return found


def fetch_into(
    folder: Path,
    requirements: tuple[str, ...],
    constraints: dict[str, str],
    unused: tuple[str, ...] = (),
    pip: tuple[str, ...] = PIP,
) -> None:
    """Fetch the wheels of these requirements with `pip`, unless the folder has them already.

    Raises:
        CommandError: when pip cannot find or fetch one.
    """
    stamp = folder.with_name(f"{folder.name}.stamp")
    wanted = hashlib.sha256(repr((requirements, unused, sorted(constraints.items()))).encode()).hexdigest()
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pins = folder.with_name(f"{folder.name}.constraints")
    pins.write_text("".join(f"{line}\n" for line in constraints.values()))
    command = [*pip, "download", "--quiet", "--dest", str(folder), "--constraint", str(pins)]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    command += [f"--platform={platform}" for platform in platforms()]
    print(f"wheels: {folder.name}", flush=True)
    done = subprocess.run([*command, *requirements], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder)
        hint = f"are the versions of {pins.name} in pip's index, and can it be reached?"
        raise CommandError(f"wheels of {folder.name} could not be fetched, {hint} pip: {_reason(done.stderr)}", FAILED)
    if unused:
        drop_unused(folder, requirements, unused)
    stamp.write_text(wanted)


def _reason(stderr: str) -> str:
    """Pip's own first error."""
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[0] if errors else "pip failed without an error message"
