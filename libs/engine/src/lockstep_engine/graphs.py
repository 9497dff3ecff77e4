"""Decode steps that are recorded once and replayed: on a GPU as CUDA graphs, so that a step costs one launch instead of
hundreds. Steps with chunks of prompts are in `chunk_graphs`.

A recording covers a step from its token ids to the result of its body. There is one for each of some numbers of
sequences, the largest recorded first; all share one pool of memory. A step with another number of sequences runs as the
next larger recording; padding rows have position -1 and do nothing. What changes from step to step is read from tensors
that stay in place.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.attention import StepLayout
from lockstep_engine.recorders import Agree, Recorder, Recordings, Staging, recorder_for
from lockstep_engine.transfers import to_device

MAX_RECORDED_SEQS = 512
"""Most sequences of a recorded step. In larger steps the GPU takes longer than the host's launches, so that a graph
gains nothing."""


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


Body = Callable[[DecodeInputs], torch.Tensor]
"""Computes a step. Its result has a row for each sequence."""


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
        self.recorder = recorder or recorder_for(device)
        largest = self.sizes[-1]
        self._inputs = DecodeInputs(
            torch.zeros(largest, dtype=torch.int64, device=device),
            torch.full((largest,), -1, dtype=torch.int64, device=device),
            torch.full((largest, width), -1, dtype=torch.int32, device=device),
        )
        self._staging = Staging(device)
        self._recordings = Recordings(
            lambda size: body(self._inputs.first(size)),
            self.sizes[::-1],
            lambda size: f"a decode step of {size} sequences",
            self.recorder,
            agree,
        )

    @property
    def bytes(self) -> int:
        """Memory of the device that the recordings take; 0 if unknown."""
        return self._recordings.bytes

    @property
    def seconds(self) -> float:
        """Time spent on recording."""
        return self._recordings.seconds

    def capture(self) -> None:
        """Record all sizes. Call it under `torch.inference_mode`, like the steps. The cache does not change, because
        rows with position -1 touch no block.

        Raises:
            NotRecordableError: says why; then `fits` is false for every step.
            RuntimeError: the ranks have to be started again, because memory or a device of one of them failed.
        """
        self._inputs.positions.fill_(-1)
        self._recordings.capture()

    def estimate_bytes(self) -> int:
        """Memory that `capture` will take: see `Recordings.estimate_bytes`. Raises errors as `capture`."""
        self._inputs.positions.fill_(-1)
        return self._recordings.estimate_bytes()

    def fits(self, layout: StepLayout) -> bool:
        """Whether a step only decodes, and has a recording."""
        return (
            len(self._recordings) > 0
            and len(layout.lengths) <= self.sizes[-1]
            and bool((layout.lengths == 1).all())
            and layout.hot_tables is None
            and (layout.moves is None or not len(layout.moves))
            and layout.tables.shape[1] <= self._inputs.tables.shape[1]
        )

    def run(self, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Run a step that `fits`.

        Args:
            ids: [sequences], int64 on the device: one token of each.
            layout: the layout of the step.
            rows: [rows], indices of the sequences whose results are wanted. None: all.

        Returns:
            The body's result, a row for each of them; valid until the next call.
        """
        count = len(ids)
        size = next(each for each in self.sizes if each >= count)
        inputs = self._inputs.first(size)
        positions = np.full(size, -1, np.int64)
        positions[:count] = layout.starts
        width = layout.tables.shape[1]
        self._staging.begin()
        inputs.ids[:count].copy_(ids)
        inputs.positions.copy_(self._staging.put("positions", positions), non_blocking=True)
        inputs.tables[:count, :width].copy_(self._staging.put("tables", layout.tables), non_blocking=True)
        self._staging.mark_sent()
        recording = self._recordings[size]
        recording.replay()
        if rows is None or np.array_equal(rows, np.arange(count)):
            return recording.out[:count]
        return recording.out[to_device(rows.astype(np.int64), ids.device)]

    def close(self) -> None:
        """Free the recordings. Call it before the process group is destroyed."""
        self._recordings.clear()


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
