"""Collectives between the ranks of one engine: the only file that talks to torch.distributed.

Three ways to the same results: alone (tp = 1), shared memory (CPU ranks on one x86 host), torch.distributed (NCCL on
CUDA, gloo elsewhere), the last with symmetric memory for the small sums of decoding where GPUs reach each other. Sums
are taken in the order of ranks wherever the library leaves us the choice, so that all ranks hold the same bits and a
row's sum does not depend on its neighbours.
"""

import logging
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from lockstep_engine.sizes import FLAG_BYTES, segment_bytes

logger = logging.getLogger("lockstep.engine")

_SPIN_S = 0.002
_SLEEP_S = 0.00005

ONE_SHOT_BYTES = 256 * 1024
"""Up to here each GPU reading all of every other's part beats NCCL. It is torch's own threshold (`kOneShotThreshBytes`
in intra_node_comm.cu); on 4 H100s vllm-project/vllm#24111 measured 10 against 17 us at 512 KiB and 15 against 19 at
1 MiB.
"""
_VECTOR_BYTES = 16
"""The one-shot kernel's widest load. Shorter ones would do; sums whose rows are that short are not worth the case."""


class Collectives(Protocol):
    """What a model needs of its group. Every rank must make the same calls in the same order."""

    rank: int
    size: int
    spent_ns: int
    """Time in collectives since the counter was last set to 0: transfer and waiting for the others."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; may overwrite `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[…, n] on every rank → […, size * n], parts in the order of ranks."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1
    spent_ns = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x


class SharedMemory:
    """One-shot collectives through a shared segment: everybody writes, everybody reads everything.

    gloo over loopback TCP costs 200 µs a call on two ranks and milliseconds on more ranks than cores; this costs
    tens of microseconds. Call k uses half k % 2 of the segment: a rank writes a half again only after call k + 1, in
    which it has seen that all others are done with reading call k. Plain loads and stores are enough under x86's memory
    order alone.

    Args:
        on_progress: called when a collective is entered.
        fd: memory segment of `sizes.segment_bytes(size, capacity)` bytes, zeroed, the same for all ranks.
        capacity: bytes a rank can contribute in one call.
    """

    def __init__(self, fd: int, rank: int, size: int, capacity: int, on_progress: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self.spent_ns = 0
        self._on_progress = on_progress
        self._calls = 0
        self._capacity = capacity
        memory = mmap.mmap(fd, segment_bytes(size, capacity))
        self._flags = np.frombuffer(memory, dtype=np.int64, count=size * FLAG_BYTES // 8)[:: FLAG_BYTES // 8]
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=size * FLAG_BYTES)
        self._data = data.view(2, size, capacity)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the order of ranks."""
        if x.nbytes > self._capacity:
            flat = x.contiguous().view(-1)
            for piece in torch.split(flat, self._capacity // x.itemsize):
                self.all_reduce(piece)
            return flat.view(x.shape)
        parts = self._exchange(x)
        out = torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            out.add_(part)
        self._finish()
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Parts side by side along the last dimension."""
        if x.nbytes > self._capacity:
            rows = x.reshape(-1, x.shape[-1])
            pieces = torch.split(rows, max(1, self._capacity // (rows.shape[1] * rows.itemsize)))
            return torch.cat([self.all_gather(piece) for piece in pieces]).view(*x.shape[:-1], -1)
        out = torch.cat(self._exchange(x), dim=-1)
        self._finish()
        return out

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._began_ns = time.perf_counter_ns()
        self._on_progress()
        self._calls += 1
        half = self._data[self._calls % 2]
        parts = [part[: x.nbytes].view(x.dtype).view(x.shape) for part in half]
        parts[self.rank].copy_(x)
        self._flags[self.rank] = self._calls
        self._wait()
        return parts

    def _wait(self) -> None:
        """Until all ranks have written. It ends with the supervisor's SIGKILL if one of them never does."""
        flags, call = self._flags, self._calls
        give_up = 0.0
        while flags.min() < call:
            if give_up == 0.0:
                give_up = time.perf_counter() + _SPIN_S
            if time.perf_counter() < give_up:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)

    def _finish(self) -> None:
        self.spent_ns += time.perf_counter_ns() - self._began_ns


class OneShot(Protocol):
    """A faster sum for tensors that it likes."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether it takes `x`. The answer must be the same on all ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape."""
        ...


class SymmetricMemory:
    """Sums of a few rows between GPUs that can read each other's memory, in one kernel and without a host's help, so
    that a CUDA graph can hold it: copy the part where all can read it, wait for the others' flags, add up in the order
    of ranks.

    Args:
        device: this rank's.
        capacity: bytes of the largest tensor. Every rank keeps as much memory.
    """

    _DTYPES = (torch.bfloat16, torch.float32)  # what torch's kernel is compiled for

    def __init__(self, device: torch.device, capacity: int = ONE_SHOT_BYTES) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - registers its operators

        self._capacity = capacity
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer = symmetric.empty(capacity, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def fits(self, x: torch.Tensor) -> bool:
        """Small, of a type that the kernel knows, contiguous, and made of whole vectors."""
        return (
            0 < x.nbytes <= self._capacity
            and x.dtype in self._DTYPES
            and x.is_contiguous()
            and x.nbytes % _VECTOR_BYTES == 0
            and x.storage_offset() * x.itemsize % _VECTOR_BYTES == 0
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in a new tensor."""
        place = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", self._group)
        return out


class TorchDistributed:
    """torch.distributed's default group: NCCL on CUDA, gloo on the CPU.

    Args:
        deterministic: sums do not depend on an element's place.
        one_shot: takes the sums that fit it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        on_progress: Callable[[], None],
        *,
        deterministic: bool,
        one_shot: OneShot | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.spent_ns = 0
        self._on_progress = on_progress
        self._one_shot = one_shot
        # The order in which gloo adds more than two summands depends on an element's place in the buffer.
        self._gather_and_add = deterministic and size > 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        began = self._begin()
        if self._one_shot is not None and self._one_shot.fits(x):
            x = self._one_shot.all_reduce(x)
        elif self._gather_and_add:
            parts = self._gather(x)
            torch.add(parts[0], parts[1], out=x)
            for part in parts[2:]:
                x.add_(part)
        else:
            x = x.contiguous()
            dist.all_reduce(x)
        self._finish(began)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Parts side by side along the last dimension."""
        began = self._begin()
        out = torch.cat(self._gather(x), dim=-1)
        self._finish(began)
        return out

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return parts

    def _begin(self) -> int:
        self._on_progress()
        return time.perf_counter_ns()

    def _finish(self, began: int) -> None:
        self.spent_ns += time.perf_counter_ns() - began


def init_torch_distributed(backend: str, store_path: str, rank: int, size: int, timeout_s: float) -> None:
    """Join the group through a file that all ranks can open. gloo and NCCL's bootstrap listen on loopback only.

    Args:
        backend: gloo or nccl.
        store_path: a file that exists for the time of this call; no port is needed to meet.
        timeout_s: for meeting. In steps the supervisor's deadlines count, not the library's.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=max(60.0, timeout_s))
    )


def symmetric_memory(device: torch.device, size: int) -> SymmetricMemory | None:
    """One-shot sums between the GPUs of the default group; None, on all ranks alike, where one of them cannot."""
    made = None
    others = (other for other in range(size) if other != device.index)
    if all(torch.cuda.can_device_access_peer(device, other) for other in others):
        try:
            made = SymmetricMemory(device)
        except RuntimeError as error:  # no way to share memory in this container, or a driver too old
            logger.warning("no symmetric memory: %s", error)
    agreed = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return made if agreed.item() else None
