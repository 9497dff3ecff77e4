"""Decode steps that are recorded once and replayed: on a GPU as CUDA graphs, so that a step costs one launch instead of
hundreds.

What is recorded is the whole step from token ids to whatever its body returns, for some numbers of sequences, the
largest first, all in one pool of memory. A step with fewer sequences runs as the next larger recording; the rows that
only fill it up have position -1 and do nothing. Whatever changes from step to step is read from tensors that stay
where they are.
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
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_engine.attention import StepLayout


@dataclass(frozen=True)
class DecodeInputs:
    """What a decode step reads, on the device."""

    ids: torch.Tensor
    """[sequences], int64: a token each."""
    positions: torch.Tensor
    """[sequences], int64: of these tokens; -1: the row only fills the step up."""
    tables: torch.Tensor
    """[sequences, width], int32: as in `StepLayout`."""

    def first(self, rows: int) -> "DecodeInputs":
        """The same memory, for fewer sequences."""
        return DecodeInputs(self.ids[:rows], self.positions[:rows], self.tables[:rows])


class NotRecordableError(RuntimeError):
    """A step does something that only the host can do, such as looking at a tensor to decide what comes next."""


Body = Callable[[DecodeInputs], torch.Tensor]
"""Computes a step; its result has a row for each sequence."""


class Recording(ABC):
    """Work that can be done again."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        """Where the result is after a replay, until the next one of any recording."""

    @abstractmethod
    def replay(self) -> None:
        """Do it, on the current stream."""


class Recorder(ABC):
    """How a device records; all recordings of one recorder share their memory."""

    @abstractmethod
    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """Run the work, then record it. Raises RuntimeError when it cannot be recorded."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory of the device that is in use now, by everybody."""


class _CudaRecording(Recording):
    def __init__(self, out: torch.Tensor, graph: torch.cuda.CUDAGraph) -> None:
        super().__init__(out)
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder(Recorder):
    """Records CUDA graphs. They must be gone before the process group is: NCCL waits for what a graph holds of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """See `Recorder.record`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()  # builds kernels, and has libraries choose theirs
            with _DeviceOnly():  # type: ignore[no-untyped-call]
                work()  # a recording that breaks off says less about why
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = work()
        return _CudaRecording(out, graph)

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _DeviceOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what makes the host wait for a tensor's content; a recording on a GPU fails at the same places."""

    _WAITING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it is one of these, or takes elements by a mask."""
        name = func.overloadpacket.__name__
        masked = name == "index" and any(each is not None and each.dtype is torch.bool for each in args[1])
        if masked or name in self._WAITING:
            raise RuntimeError(f"{func} needs the host")
        return func(*args, **(kwargs or {}))


class _HostRecording(Recording):
    def __init__(self, recorder: "HostRecorder", work: Callable[[], torch.Tensor]) -> None:
        with _DeviceOnly():  # type: ignore[no-untyped-call]
            super().__init__(work().clone())
        self._recorder = recorder
        self._work = work

    def replay(self) -> None:
        result = self._work()
        for other in self._recorder.recordings:  # they share memory on a GPU: nobody may count on an old result
            if other.out.is_floating_point():
                other.out.fill_(torch.nan)
            else:
                other.out.fill_(-1)
        self.out.copy_(result)


class HostRecorder(Recorder):
    """Stands in where there are no graphs: does the work again, and is as strict about results as a GPU."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """See `Recorder.record`."""
        self.recordings.append(_HostRecording(self, work))
        return self.recordings[-1]

    def used_bytes(self) -> int:
        """See `Recorder.used_bytes`: unknown."""
        return 0


class GraphedStep:
    """Decode steps of up to so many sequences, recorded.

    Args:
        body: computes a step from its inputs alone, in kernels and copies on the device: no shape, branch or number of
            it may depend on what a tensor holds.
        max_seqs: sequences at most.
        width: of the block tables; the blocks of the longest context.
        device: where the inputs are.
        recorder: None: the device's.
        sizes: numbers of sequences to record; None: `graph_sizes`.
    """

    def __init__(
        self,
        body: Body,
        max_seqs: int,
        width: int,
        device: torch.device,
        recorder: Recorder | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.sizes = tuple(sorted(sizes or graph_sizes(max_seqs)))
        self.bytes = 0
        """Memory of the device that the recordings take, as far as it is known."""
        self.seconds = 0.0
        """Spent on recording."""
        self._body = body
        self._device = device
        self._recorder = recorder or (CudaRecorder(device) if device.type == "cuda" else HostRecorder())
        largest = self.sizes[-1]
        self._inputs = DecodeInputs(
            torch.zeros(largest, dtype=torch.int64, device=device),
            torch.full((largest,), -1, dtype=torch.int64, device=device),
            torch.full((largest, width), -1, dtype=torch.int32, device=device),
        )
        self._staging = _Staging(largest, device)
        self._recordings: dict[int, Recording] = {}

    def capture(self) -> None:
        """Record all sizes. Under `torch.inference_mode`, like the steps. The cache stays as it is, since rows with
        position -1 touch no block.

        Raises:
            NotRecordableError: says what stands in the way; then nothing fits, and steps run as they come.
        """
        began, before = time.perf_counter(), self._recorder.used_bytes()
        self._inputs.positions.fill_(-1)
        with _no_garbage_collection():
            for size in reversed(self.sizes):
                self._record(size)
        self.bytes = max(0, self._recorder.used_bytes() - before)
        self.seconds = time.perf_counter() - began

    def estimate_bytes(self) -> int:
        """What `capture` will take, from recording the two largest sizes: the first one makes the pool, and each more
        adds about what the second one does. Rounded up generously; the recordings stay.

        Raises:
            NotRecordableError: as for `capture`.
        """
        self._inputs.positions.fill_(-1)
        self._body(self._inputs)  # what its first run leaves behind is no part of the recordings
        marks = [self._recorder.used_bytes()]
        with _no_garbage_collection():
            for size in self.sizes[:-3:-1]:
                self._record(size)
                marks.append(self._recorder.used_bytes())
        first, second = marks[1] - marks[0], marks[-1] - marks[1]
        return max(0, first) + max(0, second) * max(0, len(self.sizes) - 1)

    def fits(self, layout: StepLayout) -> bool:
        """Whether a step is one of decoding alone that has been recorded."""
        return (
            bool(self._recordings)
            and len(layout.lengths) <= self.sizes[-1]
            and bool((layout.lengths == 1).all())
            and layout.hot_tables is None
            and (layout.moves is None or not len(layout.moves))
            and layout.tables.shape[1] <= self._inputs.tables.shape[1]
        )

    def run(self, ids: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """A step that `fits`.

        Args:
            ids: [sequences], int64 on the device: a token each.
            layout: of the step.

        Returns:
            The body's result, a row for each sequence: valid until the next call.
        """
        count = len(ids)
        size = next(each for each in self.sizes if each >= count)
        inputs = self._inputs.first(size)
        inputs.ids[:count].copy_(ids)
        inputs.positions.copy_(self._staging.put(layout.starts, size), non_blocking=True)
        width = layout.tables.shape[1]
        inputs.tables[:count, :width].copy_(self._staging.put_tables(layout.tables), non_blocking=True)
        self._staging.sent()
        recording = self._recordings[size]
        recording.replay()
        return recording.out[:count]

    def close(self) -> None:
        """Forget the recordings; before the process group goes."""
        self._recordings.clear()

    def _record(self, size: int) -> None:
        inputs = self._inputs.first(size)
        try:
            self._recordings[size] = self._recorder.record(lambda: self._body(inputs))
        except RuntimeError as error:
            self._recordings.clear()
            raise NotRecordableError(str(error).partition("\n")[0]) from error


class _Staging:
    """Host memory that copies to the device start from; two sets, since a copy may still be under way."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._positions = [torch.empty(rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(2)]
        self._tables = [torch.empty(0, dtype=torch.int32) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def put(self, positions: NDArray[np.int32], size: int) -> torch.Tensor:
        """[size]: the positions, filled up."""
        self._turn = 1 - self._turn
        if self._cuda:
            self._events[self._turn].synchronize()
        whole = self._positions[self._turn].numpy()
        whole[: len(positions)], whole[len(positions) : size] = positions, -1
        return self._positions[self._turn][:size]

    def put_tables(self, tables: NDArray[np.int32]) -> torch.Tensor:
        """The tables, in memory of this turn."""
        if not self._cuda:
            return torch.from_numpy(tables.copy())
        if self._tables[self._turn].numel() < tables.size:
            self._tables[self._turn] = torch.empty(2 * tables.size, dtype=torch.int32, pin_memory=True)
        part = self._tables[self._turn][: tables.size].view(tables.shape)
        part.numpy()[:] = tables
        return part

    def sent(self) -> None:
        """All copies of this turn have been asked for."""
        if self._cuda:
            self._events[self._turn].record()


def graph_sizes(max_seqs: int) -> list[int]:
    """Numbers of sequences worth a recording: 1, 2, 4, then every 8 to 256, every 16 beyond, and the largest."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, max_seqs + 1, 16)]
    return sorted({size for size in steps if size < max_seqs} | {max_seqs})


class BuildCounter:
    """Counts what Triton builds while it is installed. After a rank is ready there is to be nothing: a build takes
    seconds, in the middle of everybody's stream.

    Args:
        on_build: is told which kernel has been built.
    """

    def __init__(self, on_build: Callable[[str], None] | None = None) -> None:
        self.builds = 0
        self._on_build = on_build
        self._next: Callable[..., Any] | None = None

    def install(self) -> "BuildCounter":
        """Count from now on, if Triton is there at all."""
        runtime = self._runtime()
        if runtime is not None:
            self._next = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = self._count
        return self

    def remove(self) -> None:
        """Count no more."""
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
    """Freeing memory of the device while work is recorded breaks the recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
