"""The cost gate: how many leading blocks to fetch, so that the request is sooner than if it computed them.

Pure functions of estimates: `link.py` measures the link, and the engine knows the pace of prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

ADVANTAGE = 0.8
"""A fetch has to take less than this part of the computing: estimates err, and a fetch costs others bandwidth."""
_CANDIDATES = 32
"""Numbers of blocks that are compared. More would cost the event loop time and gain a thirty-second of the prefix."""


@dataclass(frozen=True)
class LinkEstimate:
    """What a transfer from the state server costs now."""

    latency_s: float
    """From the request to its first byte."""
    bytes_per_s: float
    waiting_bytes: int = 0
    """What other fetches have yet to get over the same link."""

    def fetch_s(self, count: int) -> float:
        """Seconds until so many bytes have come."""
        return self.latency_s + (self.waiting_bytes + count) / self.bytes_per_s

    def of_fetch(self, calls: int, further_bytes: int) -> "LinkEstimate":
        """The same for all of a fetch: so many calls, and two more for further bytes that its blocks are of no use
        without.
        """
        calls += 2 if further_bytes else 0
        return replace(self, latency_s=calls * self.latency_s, waiting_bytes=self.waiting_bytes + further_bytes)


@dataclass(frozen=True)
class Choice:
    """What the gate has decided, and the estimates behind it. Without blocks they are those of all blocks."""

    blocks: int
    """Leading blocks to fetch; 0: computing is as fast or faster."""
    fetch_s: float
    recompute_s: float


def choose(blocks: int, block_bytes: int, link: LinkEstimate, recompute_s: Callable[[int], float]) -> Choice:
    """Choose how many of the leading blocks to fetch.

    A number passes if its fetch takes less than `ADVANTAGE` of its computing. Of those that pass, the one with which
    the request is done first is taken: the fetch runs while the request waits for its turn (`recompute_s(0)`), and what
    is not fetched is computed after both. So a short prefix may pass where the whole one does not: one whose fetch ends
    within the wait costs nothing.

    Args:
        blocks: leading blocks that are there, at least 1.
        block_bytes: of one block, over all ranks.
        link: the estimates of the transfer.
        recompute_s: seconds until so many leading blocks would be computed, the wait for the turn included.
    """
    wait_s = recompute_s(0)
    best: Choice | None = None
    best_s = 0.0
    for count in _counts(blocks):
        estimate = Choice(count, link.fetch_s(count * block_bytes), recompute_s(count))
        if not estimate.fetch_s < ADVANTAGE * estimate.recompute_s:
            continue
        done_s = max(estimate.fetch_s, wait_s) - estimate.recompute_s
        if best is None or done_s <= best_s:
            best, best_s = estimate, done_s
    return best or Choice(0, link.fetch_s(blocks * block_bytes), recompute_s(blocks))


def break_even_blocks(block_bytes: int, block_s: float, link: LinkEstimate, further_blocks: int = 0) -> int | None:
    """The least number of blocks that an idle worker fetches; None: it computes any number.

    Args:
        block_bytes: of one block, over all ranks.
        block_s: seconds to compute one block.
        link: the estimates of the transfer, that of the further blocks' bytes included.
        further_blocks: that need not be computed either.
    """
    missing_s = link.fetch_s(0) - further_blocks * ADVANTAGE * block_s
    gain_s = ADVANTAGE * block_s - block_bytes / link.bytes_per_s
    if missing_s < gain_s:
        return 1
    return None if gain_s <= 0 else int(missing_s / gain_s) + 1


def _counts(blocks: int) -> list[int]:
    """Numbers from 1 to `blocks`, evenly spaced, `blocks` among them."""
    steps = min(blocks, _CANDIDATES)
    return [blocks * step // steps for step in range(1, steps + 1)]
