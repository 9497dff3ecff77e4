"""A snapshot of an engine and its ranks, for displays, for metrics and for callers that choose an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep_engine.group import RankGroup
from lockstep_engine.host_tier import HostUsage
from lockstep_engine.remote_tier import RemoteUsage


class EngineState(StrEnum):
    """Whether the engine takes requests, and whether it will."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class RankStatus:
    """A rank, for displays and metrics."""

    rank: int
    pid: int
    state: str
    """starting, ready or dead"""
    steps: int
    """Steps finished in this epoch."""
    forward_s: float = 0.0
    """Time of its device in the forward passes of these steps, collectives included."""
    collective_s: float = 0.0
    """The part of it in collectives: transfer, and waiting for slower ranks. On a GPU by its own clock, which
    times a part of them (`collective_clock`); without our kernels the host's time, and recorded steps count none."""
    device_bytes: int = 0
    """Memory of its GPU that it has reserved; 0: it has none."""
    clock_skew_s: tuple[float, float] = (0.0, 0.0)
    """How far its monotonic clock is from the driver's: at least, and at most (see `RankProcess`)."""


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of the engine."""

    state: EngineState
    reason: str
    epoch: int
    """Number of the rank group's current life, from 1."""
    queued: int
    running: int
    free_blocks: int
    total_blocks: int
    """Blocks of both pools, hot and cold."""
    tokens_per_s: float
    """Rate of generated tokens over the last seconds."""
    steps: int
    ranks: tuple[RankStatus, ...]
    deterministic: bool
    device: str
    dtype: str
    loading: float
    """Share of the weights read during a start, 0 to 1."""
    driver_us: float
    """Mean time before a step in which rank 0's device was idle: it waited for this process or for messages."""
    step_us: float
    """Mean time from one result to the next."""
    collective_us: float
    """Mean time a step that rank 0 spends in collectives: transfer, and waiting for other ranks."""
    cold_blocks: int = 0
    """Blocks of the cold pool: compressed KV, or copies that lack the layers with a window (see `WindowedLayers`)."""
    compressed_blocks: int = 0
    """Blocks that have been compressed in this epoch."""
    host: HostUsage = field(default_factory=HostUsage)
    """The prefix cache's second tier, in host memory."""
    remote: RemoteUsage = field(default_factory=RemoteUsage)
    """Its third tier, outside of the machine."""
    fingerprint: str = ""
    """Fingerprint of the numerics (see `canary`): engines with equal fingerprints give equal tokens; empty: unknown."""
    step_deadline_s: float = 0.0
    """The ranks count as hung when the current step takes longer; 0: no step is in flight."""
    free_seqs: int = 0
    """Number of requests that could start now."""
    queue_wait_s: float = 0.0
    """Estimate: how long one more request would wait before it runs; 0 also if nothing was measured, not even by the
    ranks' self-test."""
    queue_waits_s: Mapping[int, float] = field(default_factory=dict)
    """The same estimate for requests of each priority."""
    queue_wait_per_request_s: float = 0.0
    """Estimate: what each further request adds to it."""
    free_cold_blocks: int = 0
    """Blocks of the cold pool that can be allocated."""
    preemptions: int = 0
    """Times that a running request had to wait again because blocks were missing, over all epochs."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all requests that have begun to run, over all epochs."""
    cached_tokens: int = 0
    """Those of them that were in the prefix cache."""
    grammar_engine: str = ""
    """Name and version of what computes the masks of grammars; empty: requests may have none."""


def rank_statuses(group: RankGroup) -> tuple[RankStatus, ...]:
    """The ranks of a group as they are now."""
    times, device_bytes = group.times, group.device_bytes
    return tuple(
        RankStatus(
            each.rank,
            each.pid,
            each.state,
            times[each.rank].steps,
            forward_s=times[each.rank].forward_s,
            collective_s=times[each.rank].collective_s,
            device_bytes=device_bytes[each.rank],
            clock_skew_s=each.clock_skew_s,
        )
        for each in group.ranks
    )
