"""How much memory this process and its children can get, from the machine and from its container's memory limit.

Linux grants memory that it does not have, and kills a process once it uses it: no allocation fails in time.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep_common.control_groups import CGROUPS, MEMBERSHIP, group_folders, read

_MEMINFO = Path("/proc/meminfo")


def usable_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that this process and its children can have at most: the tightest memory limit of the container, or what
    the machine has available now if that is less; `sys.maxsize` if nothing says how much.

    Args:
        cgroups: the mount point of the control group file systems.
        membership: the file that names this process's groups.
        meminfo: the file that has the machine's available memory.
    """
    return min([sys.maxsize, *_limits(cgroups, membership), *_available(meminfo)])


def _limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """The memory limits of this process's groups and of their parents. Without one, version 2 says "max" and version 1
    a number that no machine reaches.
    """
    for version, folder in group_folders("memory", ("memory",), cgroups, membership):
        limit = read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit.isdecimal():
            yield int(limit)


def _available(meminfo: Path) -> Iterator[int]:
    for line in read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.removesuffix("kB")) * 1024
