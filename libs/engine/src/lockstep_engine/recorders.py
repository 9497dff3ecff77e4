"""Records steps, so that a step costs the host one launch instead of hundreds: on a GPU as CUDA graphs, in tests by a
stand-in that repeats the work. Ranks have all recordings of a kind, or none.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from lockstep_common.errors import LockstepError
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_engine.device_failures import is_of_device
from lockstep_engine.kernels import gpu

_OF_DEVICE = "memory or device failed: "
"""How a reason begins for which ranks do not go without recordings, but are started again."""


class NotRecordableError(RuntimeError):
    """A step needs the host, for example to read a tensor and decide what to compute next."""


Agree = Callable[[str], list[str]]
"""Exchanges what ranks say; every rank must call it equally often."""


class Recording(ABC):
    """Work that can be repeated."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        """The result of the last replay; valid until the next replay of any recording."""

    @abstractmethod
    def replay(self) -> None:
        """Repeat the work, on the current stream."""


class Recorder(ABC):
    """Records work on a device. All recordings of one recorder share their memory."""

    @abstractmethod
    def prepare(self, work: Callable[[], torch.Tensor]) -> None:
        """Run the work, and check that it needs no host. Does not wait for the device: another rank may have failed, so
        that a collective never ends.
        """

    @abstractmethod
    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """Record work that has been prepared. Its collectives are not executed."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory of the device that is in use now, by all processes. What an allocator keeps for later is not."""


class _CudaRecording(Recording):
    def __init__(self, out: torch.Tensor, graph: torch.cuda.CUDAGraph) -> None:
        super().__init__(out)
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


def end_allocation(pool: tuple[int, int]) -> None:
    """Inform the allocator of the current device that nothing is recorded into a pool any more. Torch has no public
    name for it.
    """
    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


class CudaRecorder(Recorder):
    """Records CUDA graphs. They must be freed before the process group: NCCL waits for communicators that graphs
    hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def prepare(self, work: Callable[[], torch.Tensor]) -> None:
        """See `Recorder.prepare`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()  # builds our kernels, and lets libraries select theirs
            with _DeviceOnly():  # type: ignore[no-untyped-call]
                work()  # an error names the operation, which that of a failed recording does not

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """See `Recorder.record`."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                out = work()
        except BaseException:
            if torch.cuda.current_stream(self._device) != stream:
                self._leave_recording(stream)
            raise
        return _CudaRecording(out, graph)

    def _leave_recording(self, stream: torch.cuda.Stream) -> None:
        """Do what torch leaves out when a recording's end fails, as it does after an operation that must not be
        recorded. Otherwise all later work runs on the recorder's stream, and the allocator, which believes that the
        recording goes on, gives no cached memory back before it reports that there is none.
        """
        torch.cuda.set_stream(stream)
        end_allocation(self._pool)

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a recording begins with that, too: what the step before it kept would be missing
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _DeviceOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that make the host wait for a tensor's content. Recording them on a GPU would fail."""

    _WAITING = frozenset(
        {"_local_scalar_dense", "nonzero", "masked_select", "bincount"}
        | {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it waits for the device or indexes with a mask."""
        name = func.overloadpacket.__name__
        sized_by_content = name in self._WAITING or (
            name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        )
        # One number put where a mask says is a fill.
        indexes = name == "index" or (name.lstrip("_").startswith("index_put") and args[2].numel() != 1)
        masked = indexes and any(each is not None and each.dtype is torch.bool for each in args[1])
        if masked or sized_by_content:
            raise RuntimeError(f"{func} needs the host")
        return func(*args, **(kwargs or {}))


class _HostRecording(Recording):
    def __init__(self, recorder: "HostRecorder", work: Callable[[], torch.Tensor], out: torch.Tensor) -> None:
        super().__init__(out)
        self._recorder = recorder
        self._work = work

    def replay(self) -> None:
        result = self._work()
        for other in self._recorder.recordings:  # on a GPU they share memory, so old results are lost
            if other.out.is_floating_point():
                other.out.fill_(torch.nan)
            else:
                other.out.fill_(-1)
        self.out.copy_(result)


class HostRecorder(Recorder):
    """A stand-in for CUDA graphs on the CPU, for tests and benchmarks: a recording that repeats its work, overwrites
    old results and rejects host reads, as a GPU does.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self._prepared = torch.empty(0)

    def prepare(self, work: Callable[[], torch.Tensor]) -> None:
        """See `Recorder.prepare`."""
        with _DeviceOnly():  # type: ignore[no-untyped-call]
            self._prepared = work().clone()

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """See `Recorder.record`."""
        self.recordings.append(_HostRecording(self, work, self._prepared))
        return self.recordings[-1]

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`: unknown."""
        return 0


def recorder_for(device: torch.device) -> Recorder:
    """What records steps on this device."""
    return CudaRecorder(device) if device.type == "cuda" else HostRecorder()


Size = TypeVar("Size")


class Recordings(Generic[Size]):
    """The recordings of one kind of step, in several sizes.

    Args:
        body: computes a step of a size from tensors that stay in place.
        sizes: what is recorded, the largest first: it makes the memory that all share.
        name: how errors call a step of a size.
        recorder: records the steps.
        agree: given why this rank cannot record ("": it can), returns what all ranks say, in the order of ranks. None:
            there is one rank.
    """

    def __init__(
        self,
        body: Callable[[Size], torch.Tensor],
        sizes: Sequence[Size],
        name: Callable[[Size], str],
        recorder: Recorder,
        agree: Agree | None,
    ) -> None:
        self.bytes = 0
        """Memory of the device that the recordings take; 0 if unknown."""
        self.seconds = 0.0
        """Time spent on recording."""
        self._body = body
        self._sizes = sizes
        self._name = name
        self._recorder = recorder
        self._agree: Agree = agree or (lambda reason: [reason])
        self._made: dict[Size, Recording] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, size: Size) -> Recording:
        return self._made[size]

    def capture(self) -> None:
        """Record all sizes. Raises errors as `GraphedStep.capture`."""
        began, before = time.perf_counter(), self._recorder.used_bytes()
        with _no_garbage_collection():
            for size in self._sizes:
                self._record(size)
        self.bytes = max(0, self._recorder.used_bytes() - before)
        self.seconds = time.perf_counter() - began

    def estimate_bytes(self) -> int:
        """Memory that `capture` will take. Records the two largest sizes: the first one makes the pool, and each
        further one adds at most what the second one adds. The recordings stay. Raises errors as `capture`.
        """
        # Memory that the first run allocates does not belong to the recordings.
        largest = self._sizes[0]
        self._run_on_all(self._name(largest), lambda: self._body(largest))
        used = [self._recorder.used_bytes()]
        with _no_garbage_collection():
            for size in self._sizes[:2]:
                self._record(size)
                used.append(self._recorder.used_bytes())
        first, second = used[1] - used[0], used[-1] - used[1]
        return max(0, first) + max(0, second) * max(0, len(self._sizes) - 1)

    def clear(self) -> None:
        """Free the recordings."""
        self._made.clear()

    def _record(self, size: Size) -> None:
        """Record a size on all ranks, or on none. A rank that replays executes collectives in which one that does not
        would never take part, so each size is agreed on before the next one's.

        Raises:
            NotRecordableError: on all ranks, if any cannot record.
            RuntimeError: on all ranks, which must be started again: some have left a step that others wait in, or
                memory or a device of some failed.
        """

        def work() -> torch.Tensor:
            return self._body(size)

        self._run_on_all(self._name(size), lambda: self._recorder.prepare(work))

        def record() -> None:
            self._made[size] = self._recorder.record(work)

        reasons = self._run_and_agree(record)
        if any(reasons):
            self.clear()
            raise NotRecordableError(_said(reasons))

    def _run_on_all(self, what: str, work: Callable[[], object]) -> None:
        """Run work with collectives, and agree on how it ended. Raises errors as `_record`."""
        reasons = self._run_and_agree(work)
        if any(reasons):
            self.clear()
            if not all(reasons):
                raise RuntimeError(f"{what} fails on some ranks: {_said(reasons)}")
            raise NotRecordableError(_said(reasons))

    def _run_and_agree(self, work: Callable[[], object]) -> list[str]:
        """Run work; returns why it failed on each rank, or nothing.

        Raises:
            RuntimeError: on all ranks: memory or a device of one failed. That rank raises the error itself.
        """
        error = _failure_of(work)
        failure = error if error is not None and is_of_device(error) else None
        reasons = self._agree("" if error is None else (_OF_DEVICE if failure else "") + gpu.first_line(error))
        lost = [reason if reason.startswith(_OF_DEVICE) else "" for reason in reasons]
        if any(lost):
            self.clear()
            raise failure or RuntimeError(_said(lost))
        return reasons


def _failure_of(work: Callable[[], object]) -> Exception | None:
    """Why the work fails; None: it does not. What Triton raises is often no RuntimeError: OutOfResources,
    CalledProcessError, AssertionError. Our own errors refuse the model, on all ranks alike, so they pass.
    """
    try:
        work()
    except LockstepError:
        raise
    except Exception as error:
        return error
    return None


def _said(reasons: list[str]) -> str:
    """The first reason, and whose it is."""
    rank = next(index for index, reason in enumerate(reasons) if reason)
    return f"rank {rank}: {reasons[rank]}" if len(reasons) > 1 else reasons[rank]


class Staging:
    """Host memory from which a step's inputs are copied to the device. There are two sets, because the last copies may
    still run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._sets: list[dict[str, torch.Tensor]] = [{}, {}]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        self._current = 0

    def begin(self) -> None:
        """Use the other set from here on, once the copies from it have ended."""
        self._current = 1 - self._current
        if self._cuda:
            self._events[self._current].synchronize()

    def put(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """A copy of the array in the current set, in the place of this name."""
        if not self._cuda:
            return torch.from_numpy(array.copy())
        held = self._sets[self._current]
        if name not in held or held[name].numel() < array.size:
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
            held[name] = torch.empty(2 * array.size, dtype=dtype, pin_memory=True)
        part = held[name][: array.size].view(array.shape)
        part.numpy()[...] = array
        return part

    def mark_sent(self) -> None:
        """All copies from the current set have been launched."""
        if self._cuda:
            self._events[self._current].record()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold off the garbage collector: freeing device memory during a recording breaks it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
