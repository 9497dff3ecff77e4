"""A rank's self-test at its start: it measures the rank's numerics and names them by a fingerprint, and its pace.

It computes a fixed text as one chunk, token by token and beside neighbours, and in its exact mode on a GPU in several
chunks, too. Where a token's logits have the same bits
each time, the rank is deterministic on this machine, and a hash of these logits is its numerics fingerprint: workers
with equal fingerprints continue each other's streams exactly. It never decides how the rank computes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.attention import StepLayout, layout_of_one
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.sizes import CANARY_ROWS

Forward = Callable[[torch.Tensor, StepLayout, NDArray[np.int64]], torch.Tensor]
"""Takes the token ids [tokens] of a step, its layout and the indices of the tokens whose logits are wanted; returns
logits [rows, vocabulary]."""

_TOGETHER = (CANARY_ROWS, 2, 3, 4, 7)
"""Numbers of sequences that decode in one step. The first enters a block; the others are past its first token."""
_FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class StepPace:
    """How long a step takes, about: `step_s`, and `token_s` more for each of its tokens."""

    step_s: float
    token_s: float


@dataclass(frozen=True)
class Numerics:
    """Result of the self-test."""

    deterministic: bool
    """Whether a token's logits did not depend on what else the step computed."""
    fingerprint: str
    """Hexadecimal. Equal fingerprints mean equal logits, to the bit. Empty: unknown."""
    pace: StepPace = field(compare=False)
    """Of the steps of the self-test."""


def measure(
    forward: Forward,
    cache: KvCache,
    vocab_size: int,
    count: int,
    description: str,
    *,
    neighbours: bool,
    chunks: bool = False,
    together: Sequence[int] = (),
) -> Numerics:
    """Run the self-test; the cache's blocks are as before when it ends.

    Args:
        forward: computes a step.
        cache: has enough blocks for the text.
        vocab_size: size of the model's vocabulary.
        count: number of tokens of the text.
        description: names the settings that change other logits but may not change these.
        neighbours: compute tokens beside others, too; for ranks that should be deterministic.
        chunks: compute the text once more, cut into chunks.
        together: numbers of rows of logits; compute the text once more for each, with so many.
    """
    device = cache.keys.device
    ids = torch.arange(count, device=device) * 37 % vocab_size
    hot = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)
    cold = np.maximum(hot - (0 if cache.hot_window is None else cache.hot_window.sink), 0)
    last = np.arange(max(0, count - CANARY_ROWS), count)  # across the boundary of a block
    expected = forward(ids, layout_of_one(cache, 0, count, hot, cold), last).clone()
    same = True
    alone_s: list[float] = []
    for positions in _compositions(last, neighbours=neighbours):
        layout = _beside(layout_of_one(cache, position, 1, hot, cold) for position in positions)
        began = time.perf_counter()
        logits = forward(ids[positions], layout, np.arange(len(positions)))
        # The comparison waits for the device.
        same &= torch.equal(logits, expected[[position - last[0] for position in positions]])
        alone_s += [time.perf_counter() - began] if len(positions) == 1 else []
    if chunks:
        parts = []
        for begin, end in _cuts(count):
            wanted = last[(last >= begin) & (last < end)] - begin
            logits = forward(ids[begin:end], layout_of_one(cache, begin, end - begin, hot, cold), wanted)
            parts.append(logits.clone())
        same &= torch.equal(torch.cat(parts), expected)
    for rows in together:
        wanted = np.resize(last, rows)
        logits = forward(ids, layout_of_one(cache, 0, count, hot, cold), wanted)
        same &= torch.equal(logits, expected[wanted - last[0]])
    # Once more for its time: the first one has also allocated, selected and compiled things.
    layout, began = layout_of_one(cache, 0, count, hot, cold), time.perf_counter()
    torch.equal(forward(ids, layout, last), expected)
    pace = pace_of(min(alone_s), time.perf_counter() - began, count)
    cache.clear(torch.from_numpy(hot.astype(np.int64)).to(device))
    if not same:
        return Numerics(deterministic=False, fingerprint="", pace=pace)
    digest = blake2b(description.encode(), digest_size=_FINGERPRINT_BYTES)
    digest.update(expected.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return Numerics(deterministic=True, fingerprint=digest.hexdigest(), pace=pace)


def pace_of(one_s: float, all_s: float, count: int) -> StepPace:
    """The pace that explains the times of a step with one token and of one with `count`."""
    token_s = min(one_s, max(0.0, (all_s - one_s) / (count - 1)))
    return StepPace(step_s=one_s - token_s, token_s=token_s)


def _compositions(last: NDArray[np.int64], *, neighbours: bool) -> Iterator[list[int]]:
    """Positions that are computed in one step, each as a sequence of its own. All have the same blocks, so that a step
    with the first token of a block, which empties it, has all later ones, too.
    """
    positions: list[int] = last.tolist()
    yield from ([position] for position in positions)
    if neighbours:
        entered = max((index for index, position in enumerate(positions) if position % BLOCK_SIZE == 0), default=-1)
        yield positions
        for count in _TOGETHER[1:]:
            yield positions[max(entered + 1, len(positions) - count) :]


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    """Chunks of a text, of many lengths: the first is the shortest, a chunk of one token is in the middle."""
    begin, size = 0, 3
    while begin < count:
        yield begin, min(begin + size, count)
        begin += size
        size = 1 if begin == 3 else 2 * size + 3


def _beside(layouts: Iterator[StepLayout]) -> StepLayout:
    """One step made of several steps that have one sequence each."""
    each = list(layouts)
    width = max(layout.tables.shape[1] for layout in each)

    def rows(tables: Sequence[NDArray[np.int32] | None]) -> NDArray[np.int32]:
        given = [table for table in tables if table is not None]
        wide = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1) for table in given]
        return np.ascontiguousarray(np.concatenate(wide))

    moves = [layout.moves for layout in each if layout.moves is not None]
    return StepLayout(
        starts=np.concatenate([layout.starts for layout in each]),
        lengths=np.concatenate([layout.lengths for layout in each]),
        tables=rows([layout.tables for layout in each]),
        hot_tables=rows([layout.hot_tables for layout in each]),
        moves=np.ascontiguousarray(np.unique(np.concatenate(moves), axis=0)),
    )
