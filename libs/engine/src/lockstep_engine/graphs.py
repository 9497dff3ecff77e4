"""Decode steps that are recorded once and replayed: on a GPU as CUDA graphs, so that a step costs one launch instead of
hundreds.

A recording covers a step from its token ids to the result of its body. There is one for each of some numbers of
sequences, the largest recorded first; all share one pool of memory. A step with another number of sequences runs as the
next larger recording; padding rows have position -1 and do nothing. What changes from step to step is read from tensors
that stay in place.
"""

import gc
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lockstep_common.errors import LockstepError
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_engine.attention import StepLayout
from lockstep_engine.device_failures import is_of_device
from lockstep_engine.kernels import gpu

MAX_RECORDED_SEQS = 512
"""Most sequences of a recorded step. In larger steps the GPU takes longer than the host's launches, so that a graph
gains nothing."""
_OF_DEVICE = "memory or device failed: "
"""How a reason begins for which ranks do not go without recordings, but are started again."""


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of a decode step, on the device."""

    ids: torch.Tensor
    """[sequences], int64: one token of each."""
    positions: torch.Tensor
    """[sequences], int64: the tokens' positions; -1: a padding row."""
    tables: torch.Tensor
    """[sequences, width], int32: as in `StepLayout`."""

    def first(self, rows: int) -> "DecodeInputs":
        """The same memory, for fewer sequences."""
        return DecodeInputs(self.ids[:rows], self.positions[:rows], self.tables[:rows])


class NotRecordableError(RuntimeError):
    """A step needs the host, for example to read a tensor and decide what to compute next."""


Body = Callable[[DecodeInputs], torch.Tensor]
"""Computes a step. Its result has a row for each sequence."""

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


class GraphedStep:
    """Recorded decode steps of up to `max_seqs` sequences.

    Args:
        body: computes a step from its inputs alone, in kernels and copies on the device. No shape, branch or number in
            it may depend on the contents of a tensor.
        max_seqs: most sequences of a step.
        width: width of the block tables, which is the number of blocks of the longest context.
        device: the device of the inputs.
        recorder: records the steps. None: the one for this device.
        sizes: numbers of sequences to record. None: `graph_sizes`.
        agree: given why this rank cannot record ("": it can), returns what all ranks say, in the order of ranks. None:
            there is one rank.
    """

    def __init__(
        self,
        body: Body,
        max_seqs: int,
        width: int,
        device: torch.device,
        recorder: Recorder | None = None,
        sizes: Sequence[int] | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.sizes = tuple(sorted(sizes or graph_sizes(max_seqs)))
        self.bytes = 0
        """Memory of the device that the recordings take; 0 if unknown."""
        self.seconds = 0.0
        """Time spent on recording."""
        self._body = body
        self._agree: Agree = agree or (lambda reason: [reason])
        self._device = device
        self.recorder = recorder or (CudaRecorder(device) if device.type == "cuda" else HostRecorder())
        largest = self.sizes[-1]
        self._inputs = DecodeInputs(
            torch.zeros(largest, dtype=torch.int64, device=device),
            torch.full((largest,), -1, dtype=torch.int64, device=device),
            torch.full((largest, width), -1, dtype=torch.int32, device=device),
        )
        self._staging = _Staging(largest, device)
        self._recordings: dict[int, Recording] = {}

    def capture(self) -> None:
        """Record all sizes. Call it under `torch.inference_mode`, like the steps. The cache does not change, because
        rows with position -1 touch no block.

        Raises:
            NotRecordableError: says why; then `fits` is false for every step.
            RuntimeError: the ranks have to be started again, because memory or a device of one of them failed.
        """
        began, before = time.perf_counter(), self.recorder.used_bytes()
        self._inputs.positions.fill_(-1)
        with _no_garbage_collection():
            for size in reversed(self.sizes):
                self._record(size)
        self.bytes = max(0, self.recorder.used_bytes() - before)
        self.seconds = time.perf_counter() - began

    def estimate_bytes(self) -> int:
        """Memory that `capture` will take. Records the two largest sizes: the first one makes the pool, and each
        further one adds at most what the second one adds. The recordings stay.

        Raises:
            NotRecordableError: as for `capture`.
        """
        self._inputs.positions.fill_(-1)
        # Memory that the first run allocates does not belong to the recordings.
        self._run_on_all("the largest decode step", lambda: self._body(self._inputs))
        used = [self.recorder.used_bytes()]
        with _no_garbage_collection():
            for size in self.sizes[:-3:-1]:
                self._record(size)
                used.append(self.recorder.used_bytes())
        first, second = used[1] - used[0], used[-1] - used[1]
        return max(0, first) + max(0, second) * max(0, len(self.sizes) - 1)

    def fits(self, layout: StepLayout) -> bool:
        """Whether a step only decodes, and has a recording."""
        return (
            bool(self._recordings)
            and len(layout.lengths) <= self.sizes[-1]
            and bool((layout.lengths == 1).all())
            and layout.hot_tables is None
            and (layout.moves is None or not len(layout.moves))
            and layout.tables.shape[1] <= self._inputs.tables.shape[1]
        )

    def run(self, ids: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """Run a step that `fits`.

        Args:
            ids: [sequences], int64 on the device: one token of each.
            layout: the layout of the step.

        Returns:
            The body's result, a row for each sequence; valid until the next call.
        """
        count = len(ids)
        size = next(each for each in self.sizes if each >= count)
        inputs = self._inputs.first(size)
        inputs.ids[:count].copy_(ids)
        inputs.positions.copy_(self._staging.put(layout.starts, size), non_blocking=True)
        width = layout.tables.shape[1]
        inputs.tables[:count, :width].copy_(self._staging.put_tables(layout.tables), non_blocking=True)
        self._staging.mark_sent()
        recording = self._recordings[size]
        recording.replay()
        return recording.out[:count]

    def close(self) -> None:
        """Free the recordings. Call it before the process group is destroyed."""
        self._recordings.clear()

    def _record(self, size: int) -> None:
        """Record a size on all ranks, or on none. A rank that replays executes collectives in which one that does not
        would never take part, so each size is agreed on before the next one's.

        Raises:
            NotRecordableError: on all ranks, if any cannot record.
            RuntimeError: on all ranks, which must be started again: some have left a step that others wait in, or
                memory or a device of some failed.
        """
        inputs = self._inputs.first(size)

        def work() -> torch.Tensor:
            return self._body(inputs)

        self._run_on_all(f"a decode step of {size} sequences", lambda: self.recorder.prepare(work))

        def record() -> None:
            self._recordings[size] = self.recorder.record(work)

        reasons = self._run_and_agree(record)
        if any(reasons):
            self._recordings.clear()
            raise NotRecordableError(_said(reasons))

    def _run_on_all(self, what: str, work: Callable[[], object]) -> None:
        """Run work with collectives, and agree on how it ended. Raises errors as `_record`."""
        reasons = self._run_and_agree(work)
        if any(reasons):
            self._recordings.clear()
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
            self._recordings.clear()
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


class _Staging:
    """Host memory from which inputs are copied to the device. There are two sets, because the last copy may still
    run.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._positions = [torch.empty(rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(2)]
        self._tables = [torch.empty(0, dtype=torch.int32) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        self._current = 0

    def put(self, positions: NDArray[np.int32], size: int) -> torch.Tensor:
        """[size]: the positions, padded with -1. Begins the use of the other set."""
        self._current = 1 - self._current
        if self._cuda:
            self._events[self._current].synchronize()
        padded = self._positions[self._current].numpy()
        padded[: len(positions)], padded[len(positions) : size] = positions, -1
        return self._positions[self._current][:size]

    def put_tables(self, tables: NDArray[np.int32]) -> torch.Tensor:
        """The tables, in the current set."""
        if not self._cuda:
            return torch.from_numpy(tables.copy())
        if self._tables[self._current].numel() < tables.size:
            self._tables[self._current] = torch.empty(2 * tables.size, dtype=torch.int32, pin_memory=True)
        part = self._tables[self._current][: tables.size].view(tables.shape)
        part.numpy()[:] = tables
        return part

    def mark_sent(self) -> None:
        """All copies from the current set have been launched."""
        if self._cuda:
            self._events[self._current].record()


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of sequences to record: 1, 2, 4, multiples of 8 up to 256, multiples of 16 above, and the largest."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, max_seqs + 1, 16)]
    return sorted({size for size in steps if size < max_seqs} | {max_seqs})


class BuildCounter:
    """Counts the kernels that Triton builds while the counter is installed. Once a rank is ready there should be none:
    a build delays all streams by seconds.

    Args:
        on_build: called with the name of each kernel built.
    """

    def __init__(self, on_build: Callable[[str], None] | None = None) -> None:
        self.builds = 0
        self._on_build = on_build
        self._next: Callable[..., Any] | None = None

    def install(self) -> "BuildCounter":
        """Start to count, if Triton is loaded."""
        runtime = self._runtime()
        if runtime is not None:
            self._next = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = self._count
        return self

    def remove(self) -> None:
        """Stop counting."""
        runtime = self._runtime()
        if runtime is not None:
            runtime.jit_post_compile_hook = self._next

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.builds += 1
        if self._on_build is not None:
            self._on_build(str(kwargs.get("repr")))
        return None if self._next is None else self._next(*args, **kwargs)

    @staticmethod
    def _runtime() -> Any:
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        return None if knobs is None else knobs.runtime


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
