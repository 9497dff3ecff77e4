"""Where the limits of this process's container are: the folders of its control groups. Both versions are read; nothing
is written.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""The mount point of the control group file systems."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that names this process's groups."""


def group_folders(
    controller: str, mounts: Sequence[str], cgroups: Path, membership: Path
) -> Iterator[tuple[int, Path]]:
    """The folders of this process's groups and of their parents, each with its version, 1 or 2.

    Args:
        controller: the one whose limits are wanted, as cpu.
        mounts: where it may be mounted below `cgroups`, in version 1.
        cgroups: see `CGROUPS`.
        membership: see `MEMBERSHIP`.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            yield from ((2, folder) for folder in _folders(cgroups, group))
        elif controller in controllers.split(","):
            for mount in {controllers, *mounts}:
                yield from ((1, folder) for folder in _folders(cgroups / mount, group))


def read(file: Path) -> str:
    """The file's content; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a group and of its parents. The innermost may be missing: a container often sees its own group as
    the root of the mount, while its membership has the host's name.
    """
    yield mount
    folder = mount
    for name in group.split("/"):
        if name and name != "..":
            folder = folder / name
            yield folder
