"""Collectives between the ranks of one engine: the only file that talks to torch.distributed.

There are three implementations: `Alone` (tp = 1), `SharedMemory` (CPU ranks on one x86 host) and `TorchDistributed`
(NCCL on CUDA, gloo elsewhere), the last with symmetric memory for the small sums of decoding where GPUs can read each
other's memory. Sums are taken in a fixed order wherever the library allows it, so that all ranks hold the same bits
and a row's sum does not depend on other rows: on the CPU in a balanced tree of ranks, which `virtual_shards` continues
within a rank; on CUDA in the order of ranks.
"""

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from lockstep_engine.sizes import FLAG_BYTES, segment_bytes
from lockstep_engine.virtual_shards import add_in_tree

logger = logging.getLogger("lockstep.engine")

_SPIN_S = 0.002
_SLEEP_S = 0.00005

_VECTOR_BYTES = 16
"""Width of the one-shot kernel's widest load. Tensors of other sizes are so small that NCCL serves them."""


def one_shot_bytes(size: int) -> int:
    """Up to this many bytes the one-shot sums of `size` GPUs, in which each reads the parts of all others, are taken
    for faster than NCCL's.

    On 4 H100s vllm-project/vllm#24111 measured 10 against 17 us at 512 KiB and 15 against 19 at 1 MiB, with vLLM's
    one-stage kernel. What a rank reads grows with the number of ranks, so that more than four have torch's own
    threshold (`kOneShotThreshBytes` in intra_node_comm.cu). Nothing of this has been measured here.
    """
    return 2**20 if size <= 4 else 2**18


class Collectives(Protocol):
    """The collectives that a model uses. Every rank must make the same calls in the same order."""

    rank: int
    size: int
    spent_ns: int
    """The host's time in collectives since the counter was last set to 0. On the CPU: transfer, and waiting for other
    ranks."""
    marks: list[tuple[str, int, int]] | None
    """While the rank is profiled: each collective's name, begin and end, in ns of the monotonic clock. None: no marks
    are wanted."""

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
    marks: list[tuple[str, int, int]] | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x


class SharedMemory:
    """One-shot collectives through a shared segment: each rank writes its part, then reads the parts of all.

    gloo over loopback TCP costs 200 µs a call with two ranks and milliseconds with more ranks than cores; this costs
    tens of microseconds. Call k uses half k % 2 of the segment. A rank overwrites a half only after call k + 1, in
    which it has seen that all others have finished reading call k. Plain loads and stores are sufficient only under
    x86's memory order.

    Args:
        on_progress: called when this rank's part of a collective can be read.
        fd: memory segment of `sizes.segment_bytes(size, capacity)` bytes, zeroed, the same for all ranks.
        capacity: most bytes that a rank contributes in one call.
    """

    def __init__(self, fd: int, rank: int, size: int, capacity: int, on_progress: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self.spent_ns = 0
        self.marks: list[tuple[str, int, int]] | None = None
        self._on_progress = on_progress
        self._calls = 0
        self._capacity = capacity
        memory = mmap.mmap(fd, segment_bytes(size, capacity))
        self._flags = np.frombuffer(memory, dtype=np.int64, count=size * FLAG_BYTES // 8)[:: FLAG_BYTES // 8]
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=size * FLAG_BYTES)
        self._data = data.view(2, size, capacity)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added in a balanced tree of ranks."""
        if x.nbytes > self._capacity:
            flat = x.contiguous().view(-1)
            for piece in torch.split(flat, self._capacity // x.itemsize):
                self.all_reduce(piece)
            return flat.view(x.shape)
        out = add_in_tree(self.exchange(x), out=x)
        self._finish("all_reduce")
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, concatenated along the last dimension."""
        if x.nbytes > self._capacity:
            rows = x.reshape(-1, x.shape[-1])
            pieces = torch.split(rows, max(1, self._capacity // (rows.shape[1] * rows.itemsize)))
            return torch.cat([self.all_gather(piece) for piece in pieces]).view(*x.shape[:-1], -1)
        out = torch.cat(self.exchange(x), dim=-1)
        self._finish("all_gather")
        return out

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks, by their numbers, in shared memory: valid until the next but one call."""
        self._began_ns = time.perf_counter_ns()
        self._calls += 1
        half = self._data[self._calls % 2]
        parts = [part[: x.nbytes].view(x.dtype).view(x.shape) for part in half]
        parts[self.rank].copy_(x)
        self._flags[self.rank] = self._calls
        self._on_progress()  # not earlier: the count of a rank that stops before its part is visible must be lower
        self._wait()
        return parts

    def _wait(self) -> None:
        """Wait until all ranks have written. If one never does, the supervisor's deadline passes and it kills the
        ranks.
        """
        flags, call = self._flags, self._calls
        give_up = 0.0
        while flags.min() < call:
            if give_up == 0.0:
                give_up = time.perf_counter() + _SPIN_S
            if time.perf_counter() < give_up:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)

    def _finish(self, name: str) -> None:
        ended_ns = time.perf_counter_ns()
        self.spent_ns += ended_ns - self._began_ns
        if self.marks is not None:
            self.marks.append((name, self._began_ns, ended_ns))


class OneShot(Protocol):
    """A faster sum for the tensors that `fits` accepts."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether it can sum `x`. The answer must be the same on all ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape."""
        ...


class SymmetricMemory:
    """Sums of a few rows between GPUs that can read each other's memory. One kernel copies the rank's part to where all
    can read it, waits for the flags of the others, and adds up in the order of ranks; the host is not involved, so that
    it can be part of a CUDA graph.

    Args:
        device: this rank's device.
        capacity: bytes of the largest tensor. Every rank allocates that much memory, and then calls `meet`.
    """

    _DTYPES = (torch.bfloat16, torch.float32)  # what torch's kernel is compiled for

    def __init__(self, device: torch.device, capacity: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - registers its operators

        self._capacity = capacity
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer = symmetric.empty(capacity, dtype=torch.uint8, device=device)
        self._rendezvous = symmetric.rendezvous

    def meet(self) -> None:
        """Have all ranks see each other's memory. Each waits for all others here."""
        self._rendezvous(self._buffer, self._group)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `x` is small, contiguous, of a dtype that the kernel supports, and a multiple of full vectors."""
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
        deterministic: whether a sum must not depend on the element's position in the tensor.
        on_end: called when a collective has been launched.
        on_gpu: whether the ranks add up as those on GPUs do, which is NCCL's or in the order of ranks.
        one_shot: used for the tensors that its `fits` accepts.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        on_progress: Callable[[], None],
        *,
        deterministic: bool,
        on_end: Callable[[], None] = lambda: None,
        on_gpu: bool = False,
        one_shot: OneShot | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.spent_ns = 0
        self.marks: list[tuple[str, int, int]] | None = None
        self._on_progress = on_progress
        self._on_end = on_end
        self._one_shot = one_shot
        self._deterministic = deterministic
        self._on_gpu = on_gpu

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        began = self._begin()
        if self._one_shot is not None and self._one_shot.fits(x):
            x = self._one_shot.all_reduce(x)
        elif self._deterministic and self._on_gpu:  # NCCL chooses its algorithm by the tensor's size
            x = sum_in_order(self._gather(x))
        elif self._deterministic and self.size > 2:
            # The order in which gloo adds more than two summands depends on the element's position in the buffer.
            add_in_tree(self._gather(x), out=x)
        else:
            x = x.contiguous()
            dist.all_reduce(x)
        self._finish("all_reduce", began)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, concatenated along the last dimension."""
        began = self._begin()
        # Parts of several rows have to be interleaved, which is one copy; those of one row already lie as they should.
        out = self._gather(x).movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])
        self._finish("all_gather", began)
        return out

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, …]: the parts of all ranks, received in one tensor without a copy for each rank."""
        x = x.contiguous()
        parts = x.new_empty(self.size * x.numel())
        _all_gather_single(parts, x.view(-1))
        return parts.view(self.size, *x.shape)

    def _begin(self) -> int:
        self._on_progress()
        return time.perf_counter_ns()

    def _finish(self, name: str, began: int) -> None:
        self._on_end()
        ended = time.perf_counter_ns()
        self.spent_ns += ended - began
        if self.marks is not None:
            self.marks.append((name, began, ended))


# Before 2.13 torch has it by its old name only, which is deprecated there.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REASON_BYTES = 512


def gather_reasons(group: Collectives, reason: str) -> list[str]:
    """What each rank says, in the order of ranks: why it cannot do what it tried, or nothing. The ranks meet on their
    hosts, so that work which waits on a GPU does not hold up the answer.

    Args:
        group: the ranks; with TorchDistributed its group serves tensors of the host, too.
        reason: what this rank says; long ones are cut.
    """
    mine = np.zeros(_REASON_BYTES, np.uint8)
    said = reason.encode()[:_REASON_BYTES]
    mine[: len(said)] = np.frombuffer(said, np.uint8)
    every = group.all_gather(torch.from_numpy(mine)).numpy().reshape(group.size, _REASON_BYTES)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in every]


def sum_in_order(parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' parts in the order of ranks, in float32 and rounded once."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def init_torch_distributed(backend: str, store_path: str, rank: int, size: int, timeout_s: float) -> None:
    """Join the group through a file that all ranks can open. gloo and NCCL's bootstrap listen on loopback only.

    Args:
        backend: gloo or nccl. Tensors of the host go over gloo in either case.
        store_path: a file that exists during this call; the ranks meet through it, so that no port is needed.
        timeout_s: longest time for joining. Steps have the supervisor's deadlines, not the library's.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(60.0, timeout_s)),
    )


def symmetric_memory(device: torch.device, size: int) -> SymmetricMemory | None:
    """One-shot sums between the GPUs of the default group. None on all ranks if one of them does not support it: they
    agree before each step in which they would wait for one that has failed. One that fails within torch's rendezvous
    may leave the others waiting there until the start's deadline.
    """
    others = (other for other in range(size) if other != device.index)
    if not _all_ranks(all(torch.cuda.can_device_access_peer(device, other) for other in others), device):
        return None
    made = None
    try:
        made = SymmetricMemory(device, one_shot_bytes(size))
    except RuntimeError as error:  # the driver is too old
        logger.warning("no symmetric memory: %s", error)
    if not _all_ranks(made is not None, device):
        return None
    assert made is not None
    has_met = False
    try:
        made.meet()
        has_met = True
    except RuntimeError as error:  # this container cannot share memory
        logger.warning("no symmetric memory: %s", error)
    return made if _all_ranks(has_met, device) else None


def _all_ranks(mine: bool, device: torch.device) -> bool:
    """Whether something is true on all ranks of the default group."""
    agreed = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())
