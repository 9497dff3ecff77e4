"""The device's clock, in Triton: one program adds what it reads to a sum."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from lockstep_engine.collective_clock import WEIGHTS, ClockStream


@triton.jit
def _add_time(total, weight: tl.constexpr):
    tl.store(total, tl.load(total) + weight * globaltimer())


def add_time(total: torch.Tensor, weight: int) -> None:
    """Add the time of the device that runs it, times `weight`, to a sum that may overflow.

    The clock is %globaltimer, which all kernels of a device share. It counts ns; how often it changes is up to the
    device (PTX ISA, "Special Registers").

    Args:
        total: [1], int64, on a GPU.
        weight: one of `WEIGHTS`.
    """
    _add_time[1,](total, weight=weight, num_warps=1)


class TritonClockStream(ClockStream):
    """The current stream of a GPU.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        for weight in WEIGHTS:
            self.add_time(weight)  # none is built while serving

    def add_time(self, weight: int) -> None:
        """See `ClockStream.add_time`."""
        add_time(self._total, weight)

    def publish(self) -> None:
        """See `ClockStream.publish`."""
        self._word.copy_(self._total, non_blocking=True)

    def published_ns(self) -> int:
        """See `ClockStream.published_ns`."""
        return int(self._word)
