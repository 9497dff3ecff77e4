"""Builds a model's GPU kernels in threads while its weights are read: compiling is work for the CPU, reading is not.

It is a head start and decides nothing. A kernel that fails here fails again where it is used, and is reported there.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # it loads Triton
    from lockstep_engine.kernels.launches import Call

logger = logging.getLogger("lockstep.engine")

_MOST_THREADS = 8
"""More wait for each other: part of a compilation is Python. Eight compiled 13 kernels in 5.4 s, three in 7.0, one in
11.6 (16 CPUs, Triton 3.6)."""


class Ahead:
    """Launches kernels once, in threads that begin at once.

    Args:
        calls: the launches, the slowest to compile first.
        device: a GPU.
        threads: this rank's part of the machine's CPUs.
    """

    def __init__(self, calls: Sequence["Call"], device: torch.device, threads: int) -> None:
        self._device = device
        self._threads = min(_MOST_THREADS, threads)
        self._thread = threading.Thread(target=self._run, args=(calls,), name="kernels", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all of them have been built, or have failed."""
        self._thread.join()

    def _run(self, calls: Sequence["Call"]) -> None:
        if not calls:
            return
        self._launch(calls[-1])  # alone: it loads Triton's driver, which must not be done twice at once
        with ThreadPoolExecutor(self._threads, "kernels") as pool:
            list(pool.map(self._launch, calls[:-1]))

    def _launch(self, call: "Call") -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            call.launch(self._device)
        except Exception as error:
            logger.debug("kernel %s was not built ahead: %s", call.kernel, type(error).__name__)
