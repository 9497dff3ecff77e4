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
