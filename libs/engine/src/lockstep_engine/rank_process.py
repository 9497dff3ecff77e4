"""The supervisor's view of its ranks, and what holds for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lockstep_engine.blocks import PoolSizes
from lockstep_engine.control import Ready


@dataclass
class RankProcess:
    """The supervisor's view of a rank."""

    rank: int
    pid: int = 0
    state: str = "starting"
    """starting, ready or dead"""
    blocks: PoolSizes | None = None
    loading: tuple[int, int] = (0, 0)
    """Bytes of weights read so far, and in total."""
    phases_s: dict[str, float] = field(default_factory=dict)
    ready: Ready | None = None
    """Its message when it became ready."""
    loaded_at_s: float = 0.0
    """On the driver's monotonic clock: when `Loaded` had come from it, and when it was sent `AllocateBlocks`."""
    allocated_at_s: float = 0.0

    @property
    def clock_skew_s(self) -> tuple[float, float]:
        """How far its monotonic clock is from the driver's: at least, and at most. Both are 0 while it is not known.

        A message cannot come before it was sent: one each way bounds the difference of the clocks, as in NTP (RFC 5905,
        section 8). The bounds are as far apart as the two messages took.
        """
        if self.ready is None or not self.ready.loaded_at_s:
            return 0.0, 0.0
        low = self.ready.loaded_at_s - self.loaded_at_s
        high = self.ready.allocated_at_s - self.allocated_at_s
        return max(0.0, low, -high), max(abs(low), abs(high))


def common_ready(ranks: Sequence[RankProcess], last: Ready) -> Ready:
    """The message for the group: it is deterministic only if each rank is and all have the same fingerprint, and it has
    the pace of the slowest.
    """
    all_ready = [each.ready for each in ranks if each.ready is not None]
    slowest = max(all_ready, key=lambda ready: ready.step_s + ready.token_s)
    common = msgspec.structs.replace(last, step_s=slowest.step_s, token_s=slowest.token_s)
    if len({(ready.deterministic, ready.fingerprint) for ready in all_ready}) == 1:
        return common
    return msgspec.structs.replace(common, deterministic=False, fingerprint="")


def common_blocks(ranks: Sequence[RankProcess]) -> PoolSizes:
    """Sizes of pools that each of the ranks that have loaded can hold."""
    known = [each.blocks for each in ranks if each.blocks is not None]
    return PoolSizes(min(each.hot for each in known), min(each.cold for each in known), known[0].host)
