"""The number of CPUs that this process may use, from its affinity and its container's CPU limit.

A container sees all cores of its host. If a process starts a thread for each of them under a limit of a few CPUs, the
kernel throttles it for most of every scheduling period. Both versions of cgroups are read; nothing is written.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float:
    """CPUs that this process may use at a time; a CPU limit can be a fraction.

    Args:
        cgroups: the mount point of the control group file systems.
        membership: the file that names this process's groups.
    """
    return min([float(len(os.sched_getaffinity(0))), *_limits(cgroups, membership)])


def _limits(cgroups: Path, membership: Path) -> Iterator[float]:
    """The CPU limits of this process's groups and of their parents; a group may have none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            for folder in _folders(cgroups, group):
                yield from _limit_v2(folder)
        elif "cpu" in controllers.split(","):
            for mount in {controllers, "cpu", "cpu,cpuacct"}:
                for folder in _folders(cgroups / mount, group):
                    yield from _limit_v1(folder)


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


def _limit_v2(folder: Path) -> Iterator[float]:
    """The limit in `cpu.max`: "QUOTA PERIOD" in microseconds, or "max PERIOD" without a limit."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    yield from _ratio(quota, period)


def _limit_v1(folder: Path) -> Iterator[float]:
    """The limit in `cpu.cfs_quota_us`, which is -1 without a limit, and `cpu.cfs_period_us`."""
    yield from _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)


def _read(file: Path) -> str:
    """The file's content; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
