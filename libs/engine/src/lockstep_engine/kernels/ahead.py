"""Builds a model's GPU kernels in threads while its weights are read: compiling is work for the CPU, reading is not.

It is a head start and decides nothing. A kernel that fails here fails again where it is used, and is reported there.
"""

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

logger = logging.getLogger("lockstep.engine")

_MOST_THREADS = 4
"""More wait for each other: part of a compilation is Python."""


class Launch(Protocol):
    """See `launches.Call`."""

    @property
    def kernel(self) -> str:
        """Its name."""
        ...

    def launch(self, device: torch.device) -> None:
        """Launch the kernel on small tensors."""
        ...


class Ahead:
    """Launches kernels once, in threads that begin at once.

    Args:
        calls: the launches, the slowest to compile first.
        device: a GPU.
    """

    def __init__(self, calls: Sequence[Launch], device: torch.device) -> None:
        self._device = device
        self._thread = threading.Thread(target=self._run, args=(calls,), name="kernels", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all of them have been built, or have failed."""
        self._thread.join()

    def _run(self, calls: Sequence[Launch]) -> None:
        if not calls:
            return
        self._launch(calls[-1])  # alone: it loads Triton's driver, which must not be done twice at once
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "kernels") as pool:
            list(pool.map(self._launch, calls[:-1]))

    def _launch(self, call: Launch) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            call.launch(self._device)
        except Exception as error:
            logger.debug("kernel %s was not built ahead: %s", call.kernel, type(error).__name__)
