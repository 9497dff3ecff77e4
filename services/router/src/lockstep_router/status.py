"""The body of `/status`, which `lockstep status` shows: router, models, workers and ranks, as one JSON object."""

import os
from collections.abc import Sequence
from typing import Any

from lockstep_api.v1 import worker_pb2

from lockstep_router.router import Router
from lockstep_router.workers import Link

_RANK_STATES = {
    worker_pb2.RANK_STATE_STARTING: "starting",
    worker_pb2.RANK_STATE_READY: "ready",
    worker_pb2.RANK_STATE_DEAD: "dead",
}

SLOW_RANK_RATIO = 1.25
"""Compute of the slowest rank over that of the fastest from which on it is named, as by the alert LockstepSlowRank."""


def status_body(router: Router) -> dict[str, Any]:
    """The state of the router and of everything that it knows."""
    return {
        "router": {
            "id": router.settings.router_id,
            "pid": os.getpid(),
            "uptime_s": round(router.uptime_s, 3),
            "streams": router.streams,
            "failovers": router.failovers,
            "draining": router.draining,
            "exact_failover": router.settings.exact_failover,
            "resumable": {
                "running": router.runs.running,
                "detached": router.runs.detached,
                "kept": router.journals.kept,
                "bytes": router.journals.size_bytes,
            },
            "state": state_server_body(router),
            "suspects": dict(router.workers.suspects.counts),
        },
        "discovery": {
            "kind": router.settings.discovery,
            "workers": len(router.workers.report.workers),
            "age_s": round(router.workers.report.age_s(), 3),
            "problem": router.workers.report.problem,
        },
        "models": [
            {
                "name": card.name,
                "digest": card.digest,
                "architecture": card.architecture,
                "dtype": card.dtype,
                "context_length": card.context_length,
                "ready_workers": len(router.workers.ready(card.name)),
                "policy": router.settings.policy_of(card.name),
                "load_imbalance": round(router.workers.imbalances.get(card.name, 1.0), 3),
            }
            for card in router.workers.models.values()
        ],
        "workers": [worker_body(link, router.workers.clock.now()) for link in router.workers.links],
    }


def state_server_body(router: Router) -> dict[str, Any] | None:
    """How the journals are mirrored; None: they are not."""
    if router.mirrored is None:
        return None
    client, mirror = router.mirrored.client, router.mirrored.mirror
    return {
        "server": client.target,
        "reachable": not client.mirror.is_open,
        "used_by_requests": not client.requests.is_open,
        "streams": len(mirror.entries),
        "lag_s": round(mirror.lag_s, 3),
    }


def worker_body(link: Link, now: float) -> dict[str, Any]:
    """What is known of one worker."""
    status = link.status
    silence_s = link.silence_s()
    return {
        "id": link.worker_id,
        "target": link.target,
        "state": link.state.value,
        "reason": status.reason or link.problem,
        "epoch": link.epoch,
        "incarnation": link.incarnation,
        "fingerprint": link.fingerprint,
        "pid": status.pid,
        "streams": link.streams,
        "queued": status.queued,
        "running": status.running,
        "free_blocks": status.free_blocks,
        "total_blocks": status.total_blocks,
        "queue_wait_s": round(link.queue_wait_s, 3),
        "tokens_per_s": round(status.tokens_per_s, 1),
        "steps": status.steps,
        "last_seen_s": None if silence_s is None else round(silence_s, 3),
        "model": link.card.name if link.card is not None else "",
        "tp": link.card.tp if link.card is not None else 0,
        "health": link.health.describe(now),
        "prefixes": link.prefixes.describe(),
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "state": _RANK_STATES.get(rank.state, "unknown"),
                "steps": rank.steps,
                "compute_s": round(rank.compute_s, 6),
                "collective_s": round(rank.collective_s, 6),
            }
            for rank in status.ranks
        ],
        "slow_rank": slow_rank(status.ranks),
    }


def slow_rank(ranks: Sequence[worker_pb2.RankHealth]) -> int | None:
    """The rank that the others wait for: over the last seconds it computed a quarter longer a step than another one,
    and waited less in collectives. None: the ranks are balanced, no step was run, or the worker does not report them.
    """
    if len(ranks) < 2 or not all(rank.compute_s > 0 for rank in ranks):
        return None
    slowest = max(ranks, key=lambda rank: rank.compute_s)
    fastest = min(ranks, key=lambda rank: rank.compute_s)
    is_slow = slowest.compute_s > SLOW_RANK_RATIO * fastest.compute_s and slowest.collective_s < fastest.collective_s
    return slowest.rank if is_slow else None
