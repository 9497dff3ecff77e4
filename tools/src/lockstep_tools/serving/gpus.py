"""Which GPUs of this machine each worker of a stack uses: a rank one each, and no two ranks the same.

Ranks count their GPUs from 0, so each worker's process sees only its own, by CUDA_VISIBLE_DEVICES. This process never
imports torch and never starts CUDA: a child counts the GPUs.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from lockstep_tools.failure import UNUSABLE, CommandError

VARIABLE = "CUDA_VISIBLE_DEVICES"

_COUNT_S = 60.0  # the driver may have to start the GPUs first
_COUNT = """\
import ctypes, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError:
    print(0)  # no driver: torch, which takes seconds to import, would say the same
else:
    import torch
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""


def of_workers(device: str, workers: int, tp: int) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each worker; empty: workers compute on the CPU.

    Args:
        device: as ranks take it: with `auto` they use the CPU where there are fewer than `tp` GPUs.
        workers: their number.
        tp: ranks of each.

    Raises:
        CommandError: there are too few GPUs for all workers, or they cannot be counted.
    """
    if device == "cpu":
        return []
    given = os.environ.get(VARIABLE)
    names = visible(given, 0 if given is not None and not given.strip() else count())
    if device == "auto" and len(names) < tp:
        return []
    return slices(names, workers, tp)


def visible(given: str | None, number: int) -> list[str]:
    """What names each GPU in CUDA_VISIBLE_DEVICES.

    Args:
        given: the variable of this process; None: it is not set.
        number: GPUs that CUDA finds with it. It ignores what follows an entry that it does not know.
    """
    names = map(str, range(number)) if given is None else (entry.strip() for entry in given.split(","))
    return list(names)[:number]


def slices(names: Sequence[str], workers: int, tp: int) -> list[str]:
    """`tp` consecutive GPUs for each worker.

    Raises:
        CommandError: there are too few.
    """
    if len(names) < workers * tp:
        raise CommandError(
            f"--workers {workers} with --tp {tp} needs {workers * tp} GPUs, one for each rank, and torch finds "
            f"{len(names)} here: use fewer workers, a smaller --tp, or --device cpu",
            UNUSABLE,
        )
    return [",".join(names[begin : begin + tp]) for begin in range(0, workers * tp, tp)]


def count(driver: str = "libcuda.so.1") -> int:
    """GPUs that the ranks' torch can use, with this process's environment.

    Args:
        driver: the library without which there are none.

    Raises:
        CommandError: they cannot be counted.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT, driver],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COUNT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"the GPUs have not answered within {_COUNT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().rpartition("\n")[2]
        raise CommandError(f"the GPUs cannot be counted: {said or f'exit code {error.returncode}'}") from None
    return int(done.stdout.split()[-1])
