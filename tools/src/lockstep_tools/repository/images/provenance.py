"""Where an image comes from, for its labels: the commit, its time, the repository's address.

The same commit gives the same labels, so that it gives the same image.
"""

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def of(root: Path) -> dict[str, str]:
    """REVISION, CREATED and SOURCE, as the Dockerfiles take them; empty for an archive without history."""
    revision = _git(root, "rev-parse", "HEAD")
    if revision and _git(root, "status", "--porcelain"):
        revision += "-dirty"
    seconds = _git(root, "log", "-1", "--format=%ct")
    created = datetime.fromtimestamp(int(seconds), UTC).isoformat() if seconds else ""
    return {"REVISION": revision, "CREATED": created, "SOURCE": public(_git(root, "remote", "get-url", "origin"))}


def public(address: str) -> str:
    """The address without a user or password in it."""
    return re.sub(r"^(\w+://)[^/@]*@", r"\1", address)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
