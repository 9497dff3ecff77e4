"""The files that pin the parts of a release: requirements with their hashes, and the base image with its digest."""

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.repository.images.catalog import distribution

LOCK = "requirements.lock"
CUDA_LOCK = "requirements-cuda.lock"
BASE_LOCK = "base-image.lock"

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_BASE = re.compile(r"(?P<name>[a-z0-9][a-z0-9./:-]*?)(:(?P<tag>[\w.-]+))?@(?P<digest>sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One locked distribution."""

    requirement: str
    """`name==version`, with a marker if there is one."""
    sha256: frozenset[str]
    """The hashes of every file of that version that may be installed."""


def read_pins(path: Path) -> dict[str, Pin]:
    """A lock file's pins by distribution, normalized.

    Raises:
        CommandError: a pin has no hash.
    """
    pins = {}
    text = re.sub(r"\\\n", " ", path.read_text())
    for line in (line.partition(" #")[0].strip() for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        requirement = " ".join(_HASH.sub("", line).split())
        hashes = frozenset(_HASH.findall(line))
        if not hashes:
            raise CommandError(f"{path.name}: {requirement} has no hash", FAILED)
        pins[distribution(requirement)] = Pin(requirement, hashes)
    return pins


def read_base(root: Path) -> str:
    """The recorded base image by digest, as `name@sha256:…`: builders take no tag beside a digest.

    Raises:
        CommandError: the file names no image by digest.
    """
    lines = [line for line in (root / BASE_LOCK).read_text().splitlines() if line and not line.startswith("#")]
    match = _BASE.fullmatch(lines[0].strip()) if len(lines) == 1 else None
    if match is None:
        raise CommandError(f"{BASE_LOCK} has to hold one image with its digest: NAME:TAG@sha256:…", FAILED)
    return f"{match['name']}@{match['digest']}"
