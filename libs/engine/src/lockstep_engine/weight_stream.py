"""Copies plain tensors of a checkpoint to a GPU. Threads read parts of its files into pinned memory, and each thread
copies what it has read on a stream of its own, so that reads and copies overlap.

Files are read, not mapped: a fault for each page is slow in a virtual machine. Memory is bounded: a buffer of
`CHUNK_BYTES` for each reader in pinned memory, which torch keeps for later use, and one on the device. Slices and types
are the device's work.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep_engine.model_config import refuse

READERS = 8
"""Threads that read. One copies from the page cache at a few GB/s."""
CHUNK_BYTES = 16 << 20
"""Bytes that are read at once, unless one row is longer."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: contiguous, in row-major order, little-endian."""

    path: Path
    offset: int
    """Of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """Rows of a stored vector or matrix, and where they go."""

    source: Stored
    """These rows alone."""
    columns: slice
    """Columns of a matrix that are wanted."""
    target: torch.Tensor
    """On the device, of the shape of what is wanted, of any dtype and strides."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return math.prod(self.source.shape) * self.source.dtype.itemsize


def chunks(stored: Stored, dim: int, start: int, target: torch.Tensor, most_bytes: int) -> Iterator[Chunk]:
    """Cut a slice of a tensor into what is read at once.

    Args:
        stored: the whole tensor, of at least one dimension.
        dim: the dimension that is sliced.
        start: first index of the slice; its length is the target's.
        target: [..., length, ...], of the shape of the slice.
        most_bytes: of a chunk, unless one row is longer.
    """
    first, count = (start if dim == 0 else 0), len(target)
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    if len(stored.shape) > 2:
        for index in range(count):
            inner = Stored(stored.path, stored.offset + (first + index) * row_bytes, stored.shape[1:], stored.dtype)
            yield from chunks(inner, max(0, dim - 1), start if dim else 0, target[index], most_bytes)
        return
    columns = slice(start, start + target.shape[1]) if dim == 1 else slice(None)
    step = max(1, most_bytes // max(1, row_bytes))
    for begin in range(0, count, step):
        rows = min(step, count - begin)
        offset = stored.offset + (first + begin) * row_bytes
        part = Stored(stored.path, offset, (rows, *stored.shape[1:]), stored.dtype)
        yield Chunk(part, columns, target[begin : begin + rows])


def copy_chunks(
    work: Iterable[Chunk],
    device: torch.device,
    on_copied: Callable[[Chunk], None] = lambda _: None,
) -> None:
    """Copy chunks to the device. When it returns, all are there.

    Args:
        work: the chunks; it is iterated in the calling thread, a few chunks ahead of the readers.
        device: of the targets. The CPU stands in for a GPU in tests.
        on_copied: called in the calling thread with each chunk, in their order.

    Raises:
        LockstepError: a file cannot be read, or is shorter than its header says; names it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the targets' memory may be in use until now
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    memory = threading.local()

    def copy(chunk: Chunk) -> None:
        if not hasattr(memory, "reader"):  # not by the pool, which would keep to itself why it cannot be
            memory.reader = Reader(device)
        memory.reader.copy(chunk)

    pool = ThreadPoolExecutor(READERS, "weights")
    waiting: deque[tuple[Chunk, Future[None]]] = deque()

    def finish_first() -> None:
        chunk, done = waiting.popleft()
        done.result()
        on_copied(chunk)

    try:
        for chunk in work:
            waiting.append((chunk, pool.submit(copy, chunk)))
            if len(waiting) > 2 * READERS:
                finish_first()
        while waiting:
            finish_first()
    finally:
        pool.shutdown(cancel_futures=True)


class Reader:
    """One thread's buffers and stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host = torch.empty(0, dtype=torch.uint8)
        self._there = torch.empty(0, dtype=torch.uint8)

    def copy(self, chunk: Chunk) -> None:
        """Read a chunk and copy it. Returns when the device has it."""
        source, count = chunk.source, chunk.nbytes
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:  # the caller's mode, in which the targets may have been made
            if len(self._host) < count:
                size = max(count, CHUNK_BYTES)
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
                self._there = torch.empty(size, dtype=torch.uint8, device=self._device)
            read_into(self._host.numpy().data[:count], source.path, source.offset)
            there = self._there[:count]
            there.copy_(self._host[:count], non_blocking=True)
            values = there.view(source.dtype).view(source.shape)
            chunk.target.copy_(values if len(source.shape) < 2 else values[:, chunk.columns])
            if self._stream is not None:
                self._stream.synchronize()


def read_into(buffer: memoryview, path: Path, offset: int) -> None:
    """Fill a buffer from a file.

    Raises:
        LockstepError: names the file.
    """
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error
    if done < len(buffer):
        raise refuse(f"{path} ends at byte {offset + done}, and its header names more")
