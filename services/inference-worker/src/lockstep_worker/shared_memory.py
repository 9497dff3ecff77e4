"""Checks before the start that the pod has the shared memory its ranks need: NCCL's own error is not specific."""

import os

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_worker.settings import WorkerSettings

PATH = "/dev/shm"  # noqa: S108 - the path that the C library and NCCL use
NCCL_BYTES_PER_RANK = 256 << 20
"""NCCL moves tensors through shared memory where two GPUs have no direct path. It takes about 10 MB for each channel
and peer, and fails with "unhandled system error" if there is less. A container has 64 MiB by default.
"""


def check_shared_memory(settings: WorkerSettings) -> None:
    """Refuse to start with less shared memory than the ranks need.

    Ranks on the CPU need none: they use anonymous memory (memfd).

    Raises:
        LockstepError: INVALID_REQUEST, naming both sizes.
    """
    needed = settings.min_shm
    if needed is None and settings.device == "cuda" and settings.tp > 1:
        needed = settings.tp * NCCL_BYTES_PER_RANK
    if not needed:
        return
    given = shared_memory_bytes()
    if given < needed:
        raise LockstepError(
            ErrorCode.INVALID_REQUEST,
            f"{PATH} has {_mebibytes(given)} and {settings.tp} ranks need {_mebibytes(needed)} (min_shm): "
            "give the pod a larger one",
            field="min_shm",
        )


def shared_memory_bytes() -> int:
    """The total size of the file system."""
    try:
        system = os.statvfs(PATH)
    except OSError:
        return 0
    return system.f_frsize * system.f_blocks


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.4g} MiB"
