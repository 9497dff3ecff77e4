"""The number of CPUs that this process may use, from its affinity and its container's CPU limit.

A container sees all cores of its host. If a process starts a thread for each of them under a limit of a few CPUs, the
kernel throttles it for most of every scheduling period.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from lockstep_common.control_groups import CGROUPS, MEMBERSHIP, group_folders, read


def usable_cpus(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """CPUs that this process may use at a time; a CPU limit can be a fraction.

    Args:
        cgroups: the mount point of the control group file systems.
        membership: the file that names this process's groups.
    """
    return min([float(len(os.sched_getaffinity(0))), *_limits(cgroups, membership)])


def _limits(cgroups: Path, membership: Path) -> Iterator[float]:
    """The CPU limits of this process's groups and of their parents; a group may have none."""
    for version, folder in group_folders("cpu", ("cpu", "cpu,cpuacct"), cgroups, membership):
        yield from _limit_v2(folder) if version == 2 else _limit_v1(folder)


def _limit_v2(folder: Path) -> Iterator[float]:
    """The limit in `cpu.max`: "QUOTA PERIOD" in microseconds, or "max PERIOD" without a limit."""
    quota, _, period = read(folder / "cpu.max").partition(" ")
    yield from _ratio(quota, period)


def _limit_v1(folder: Path) -> Iterator[float]:
    """The limit in `cpu.cfs_quota_us`, which is -1 without a limit, and `cpu.cfs_period_us`."""
    yield from _ratio(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)
