"""Steps with chunks of prompts, recorded once and replayed as the decode steps of `graphs` are: any mixture of chunks
and decoding sequences, up to some hundred tokens. The host launches larger steps one kernel after the other while the
GPU computes.

There is a recording for each of some pairs of a number of tokens and a number of sequences. A step runs as the smallest
one that holds it. Its free tokens belong to one more sequence, of negative positions, which sees and stores nothing;
where each token is, and which tiles of queries there are, follows on the device from the lengths of the sequences
(`attention_triton.ChunkAttention`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.attention import StepLayout
from lockstep_engine.config import BLOCK_SIZE, RECORDED_TOKENS
from lockstep_engine.recorders import Agree, Recorder, Recordings, Staging

_FEW = 8
"""Sequences of the smaller one of two recordings with so many tokens. The decode form of attention splits keys by the
sequences that a recording has room for, and few sequences would not fill a GPU with the splits of many."""
_ALIGNED = 4
"""Kernels are compiled for tensors that begin at a multiple of 16 bytes: so many int32."""


class ChunkSize(NamedTuple):
    """The size of a recording."""

    tokens: int
    sequences: int

    @property
    def moves(self) -> int:
        """Blocks that go cold in a step of this size: a sequence passes the end of at most one more block than its
        tokens fill.
        """
        return self.tokens // BLOCK_SIZE + self.sequences


@dataclass(frozen=True)
class ChunkInputs:
    """The inputs of a step with chunks, on the device."""

    ids: torch.Tensor
    """[tokens], int64: those of the first sequence, then those of the second, and so on, then padding."""
    starts: torch.Tensor
    """[sequences], int32: position of the first token."""
    lengths: torch.Tensor
    """[sequences], int32: number of tokens; 0: there is no such sequence."""
    rows: torch.Tensor
    """[sequences], int32: indices of the tokens whose logits are wanted, then padding of any indices."""
    moves: torch.Tensor
    """[most moves, 2], int32: as in `StepLayout`, then padding of -1."""
    tables: torch.Tensor
    """[sequences + 1, width], int32: as in `StepLayout`; the last row may hold anything."""
    hot_tables: torch.Tensor
    """The same with the hot blocks; `tables` itself where no block goes cold."""


class GraphedChunks:
    """Recorded steps with chunks of prompts.

    Args:
        body: computes a step from its inputs, as for `GraphedStep`. Its result has a row for each of `inputs.rows`.
        sizes: what is recorded, in ascending order: `chunk_sizes`.
        width: width of the block tables, which is the number of blocks of the longest context.
        device: the device of the inputs.
        recorder: records the steps.
        compressed: whether blocks go cold.
        agree: as for `GraphedStep`.
    """

    def __init__(
        self,
        body: Callable[[ChunkInputs], torch.Tensor],
        sizes: Sequence[ChunkSize],
        width: int,
        device: torch.device,
        recorder: Recorder,
        *,
        compressed: bool,
        agree: Agree | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self._body = body
        self._compressed = compressed
        tokens, sequences, moves = (max(each) for each in zip(*((*size, size.moves) for size in sizes), strict=True))
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._part = -(-sequences // _ALIGNED) * _ALIGNED
        self._idle = np.zeros(3 * self._part + 2 * moves * compressed, np.int32)
        self._idle[3 * self._part :] = -1
        self._numbers = torch.empty(len(self._idle), dtype=torch.int32, device=device)
        """Starts, lengths, rows and moves: one copy from the host."""
        self._tables = torch.full((sequences + 1, width), -1, dtype=torch.int32, device=device)
        self._hot_tables = self._tables.clone() if compressed else self._tables
        self._out: torch.Tensor | None = None
        self._staging = Staging(device)
        self._recordings = Recordings(
            self._compute,
            self.sizes[::-1],
            lambda size: f"a step of {size.tokens} tokens of {size.sequences} sequences",
            recorder,
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
        """Record all sizes. Neither cache nor blocks change. Raises errors as `GraphedStep.capture`."""
        self._numbers.copy_(torch.from_numpy(self._idle))
        self._recordings.capture()

    def estimate_bytes(self) -> int:
        """Memory that `capture` will take: see `Recordings.estimate_bytes`. Raises errors as `capture`."""
        self._numbers.copy_(torch.from_numpy(self._idle))
        estimated = self._recordings.estimate_bytes()
        return estimated + (0 if self._out is None else self._out.nbytes)

    def fits(self, layout: StepLayout, rows: NDArray[np.int64]) -> bool:
        """Whether a step has a recording; `rows`: indices of the tokens whose logits are wanted."""
        return len(self._recordings) > 0 and self._size_of(layout, rows) is not None

    def run(self, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64]) -> torch.Tensor:
        """Run a step that `fits`.

        Args:
            ids: [tokens], int64 on the device.
            layout: the layout of the step.
            rows: [rows], indices of the tokens whose logits are wanted.

        Returns:
            The body's result, a row for each of `rows`; valid until the next call.
        """
        size = self._size_of(layout, rows)
        assert size is not None
        count, width = layout.tables.shape
        numbers, part = self._idle.copy(), self._part
        numbers[:count] = layout.starts
        numbers[part : part + count] = layout.lengths
        numbers[2 * part : 2 * part + len(rows)] = rows
        if layout.moves is not None:
            numbers[3 * part : 3 * part + layout.moves.size] = layout.moves.ravel()
        self._staging.begin()
        self._ids[: len(ids)].copy_(ids)
        self._numbers.copy_(self._staging.put("numbers", numbers), non_blocking=True)
        self._tables[:count, :width].copy_(self._staging.put("tables", layout.tables), non_blocking=True)
        if self._compressed:
            hot_tables = layout.tables if layout.hot_tables is None else layout.hot_tables
            self._hot_tables[:count, :width].copy_(self._staging.put("hot", hot_tables), non_blocking=True)
        self._staging.mark_sent()
        recording = self._recordings[size]
        recording.replay()
        return recording.out[: len(rows)]

    def close(self) -> None:
        """Free the recordings. Call it before the process group is destroyed."""
        self._recordings.clear()

    def _size_of(self, layout: StepLayout, rows: NDArray[np.int64]) -> ChunkSize | None:
        """The smallest recording that holds a step; None: there is none."""
        tokens, sequences = int(layout.lengths.sum()), max(len(layout.lengths), len(rows))
        moves = 0 if layout.moves is None else len(layout.moves)
        if layout.tables.shape[1] > self._tables.shape[1]:
            return None
        return next(
            (
                size
                for size in self.sizes
                if size.tokens >= tokens and size.sequences >= sequences and size.moves >= moves
            ),
            None,
        )

    def _inputs(self, size: ChunkSize) -> ChunkInputs:
        starts, lengths, rows = (
            self._numbers[place * self._part : place * self._part + size.sequences] for place in range(3)
        )
        most = size.moves * self._compressed
        moves = self._numbers[3 * self._part :][: 2 * most].view(most, 2)
        tables, hot_tables = (each[: size.sequences + 1] for each in (self._tables, self._hot_tables))
        return ChunkInputs(self._ids[: size.tokens], starts, lengths, rows, moves, tables, hot_tables)

    def _compute(self, size: ChunkSize) -> torch.Tensor:
        """The body's result, in memory that all recordings share: each would keep its own, of the whole vocabulary."""
        result = self._body(self._inputs(size))
        if self._out is None:  # the first run, of the largest size, which is not recorded
            self._out = torch.empty_like(result)
        return self._out[: len(result)].copy_(result)


def chunk_sizes(most_tokens: int, most_seqs: int) -> list[ChunkSize]:
    """Sizes to record, in ascending order: up to 16, 32 and multiples of 64 tokens, each of few sequences and of as
    many as there can be.

    Args:
        most_tokens: of a step.
        most_seqs: of a step.
    """
    most = min(most_tokens, RECORDED_TOKENS)
    steps = {each for each in (16, 32, *range(64, most, 64)) if each < most} | {most}
    return [
        ChunkSize(tokens, sequences)
        for tokens in sorted(steps)
        for sequences in sorted({min(_FEW, most_seqs, tokens), min(most_seqs, tokens)})
    ]
