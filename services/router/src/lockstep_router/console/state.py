"""What the console's page shows: one JSON object with the router, its workers, and its newest moves and streams.

On the management port it is for operators, and has all tenants. On the public port a tenant sees its own limits,
streams and moves, and of the workers what explains them: no addresses and no process ids. Nowhere are texts, token ids,
keys, or whole ids of streams, which would be enough to read the answer of a client without a key.
"""

import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from lockstep_router.console.others import OtherRouters
from lockstep_router.history import AttemptRecord, Move, RankWork, StreamRecord
from lockstep_router.router import Router
from lockstep_router.status import state_server_body, worker_body
from lockstep_router.tenants import Tenant

FORMAT = 1
"""Grows when a field changes its meaning; the page shows it if it does not know it."""
MAX_TENANTS = 200
ID_CHARS = 8
_KEPT_S = 0.5
"""Viewers together cause one new state in this time."""
_PRIVATE_OF_WORKERS = ("target", "pid", "incarnation", "reason")


class ConsoleState:
    """The state of a router, for any number of viewers.

    Args:
        router: the router.
        clock: gives seconds, for how long a state is kept.
        others: the other routers, for operators; None: they are not shown.
    """

    def __init__(
        self, router: Router, clock: Callable[[], float] = time.monotonic, others: OtherRouters | None = None
    ) -> None:
        self._router = router
        self._others = others
        self._clock = clock
        self._made_at = float("-inf")
        self._body: dict[str, Any] = {}
        self._version = _version()

    def on_management(self) -> dict[str, Any]:
        """What operators see."""
        shown = {name: _without_owner(value) for name, value in self._current().items()}
        return shown | {"others": None if self._others is None else self._others.body()}

    def of_router(self) -> dict[str, Any]:
        """The facts about this router, for other routers too."""
        router, settings = self._router, self._router.settings
        return {
            "id": settings.router_id,
            "version": self._version,
            "uptime_s": round(router.uptime_s, 1),
            "state": "draining" if router.draining else "leaving" if router.leaving else "serving",
            "unready": router.unready or "",
            "requests": router.requests,
            "streams": router.streams,
            "max_streams": settings.max_streams,
            "failovers": router.failovers,
            "sessions": router.workers.history.sessions,
            "exact_failover": settings.exact_failover,
            "resumable": {
                "running": router.runs.running,
                "detached": router.runs.detached,
                "kept": router.journals.kept,
            },
        }

    def on_public(self, tenant: str) -> dict[str, Any]:
        """What the clients of a tenant see; those of a router without keys are one tenant without a name."""
        body, keys = self._current(), self._router.keys
        has_keys = keys is not None

        def own(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [entry for entry in entries if not has_keys or entry["owner"] == tenant]

        workers = [_public_worker(worker, number) for number, worker in enumerate(body["workers"], 1)]
        # Not from the state, which has the busiest tenants only.
        rows = [] if keys is None else [self._row(each) for each in keys.tenants if each.name == tenant]
        tenants = body["tenants"] | {"rows": rows, "count": len(rows)}
        shown = body | {"port": "public", "chat": True, "workers": workers, "tenants": tenants}
        shown |= {"moves": own(body["moves"]), "streams": own(body["streams"])}
        if has_keys:  # its operator's, not the tenants'
            shown |= {"state_server": None, "links": []}
        return {name: _without_owner(value) for name, value in shown.items()}

    def _current(self) -> dict[str, Any]:
        now = self._clock()
        if now - self._made_at >= _KEPT_S:
            self._body, self._made_at = self._make(), now
        return self._body

    def _make(self) -> dict[str, Any]:
        router = self._router
        workers, settings, history = router.workers, router.settings, router.workers.history
        loop_now = router.loop_time
        # The page shows the time of day, and records have the event loop's.
        shift_s = time.time() - loop_now
        server = state_server_body(router)
        return {
            "format": FORMAT,
            "now": round(time.time(), 3),
            "port": "management",
            "chat": False,
            "router": self.of_router(),
            "processes": 1,
            "others": None,
            "state_server": server and {name: server[name] for name in ("reachable", "streams", "lag_s")},
            "models": [
                {
                    "name": card.name,
                    "context_length": card.context_length,
                    "ready_workers": len(workers.ready(card.name)),
                    "policy": settings.policy_of(card.name),
                }
                for card in workers.models.values()
            ],
            "workers": [worker_body(link, workers.clock.now()) for link in workers.links],
            "moves": [_move(move, shift_s) for move in reversed(history.moves)],
            "streams": [_stream(stream, shift_s) for stream in reversed(history.streams)],
            "tenants": self._tenants(),
            "links": [{"name": "Dashboards", "url": settings.dashboard_url}] if settings.dashboard_url else [],
        }

    def _tenants(self) -> dict[str, Any]:
        keys, limits = self._router.keys, self._router.limits
        tenants = [] if keys is None else keys.tenants
        # The busiest first, since there may be more than are shown.
        shown = sorted(tenants, key=lambda tenant: -limits.streams_of(tenant))[:MAX_TENANTS]

        return {"keys": keys is not None, "count": len(tenants), "rows": [self._row(tenant) for tenant in shown]}

    def _row(self, tenant: Tenant) -> dict[str, Any]:
        limits = self._router.limits
        return {
            "name": tenant.name,
            "priority": tenant.priority,
            "streams": {"used": limits.streams_of(tenant), "limit": tenant.concurrent_streams},
            "requests": {"used": limits.used(tenant, "requests"), "limit": tenant.requests_per_minute},
            "tokens": {"used": limits.used(tenant, "tokens"), "limit": tenant.tokens_per_minute},
        }


def _public_worker(worker: dict[str, Any], number: int) -> dict[str, Any]:
    shown = {name: value for name, value in worker.items() if name not in _PRIVATE_OF_WORKERS}
    ranks = [{name: value for name, value in rank.items() if name != "pid"} for rank in worker["ranks"]]
    health = worker["health"] | {"ejected_because": ""}
    return shown | {"reason": "", "health": health, "ranks": ranks, "id": worker["id"] or f"unknown worker {number}"}


def _without_owner(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{name: each for name, each in entry.items() if name != "owner"} for entry in value]


def short_id(stream_id: str) -> str:
    """The beginning of a stream's id: enough to recognise it, too little to ask for it."""
    return stream_id[:ID_CHARS]


def _move(move: Move, shift_s: float) -> dict[str, Any]:
    return {
        "key": str(move.number),
        "owner": move.tenant,
        "stream": short_id(move.stream_id),
        "run": short_id(move.run_id),
        "at": _at(move.at, shift_s),
        "from": move.from_worker,
        "to": move.to_worker,
        "reason": move.reason,
        "gap_s": None if move.gap_s is None else round(move.gap_s, 4),
        "tokens": move.tokens,
        "ended": move.ended,
    }


def _stream(stream: StreamRecord, shift_s: float) -> dict[str, Any]:
    return {
        "key": str(stream.number),
        "owner": stream.tenant,
        "stream": short_id(stream.stream_id),
        "run": short_id(stream.run_id),
        "model": stream.model,
        "arrived_at": _at(stream.arrived_at, shift_s),
        "ended_at": _at(stream.ended_at, shift_s),
        "outcome": stream.outcome,
        "prompt_tokens": stream.prompt_tokens,
        "max_tokens": stream.max_tokens,
        "tokens": stream.tokens,
        "attempts": [_attempt(attempt, shift_s) for attempt in stream.attempts],
        "attempts_left_out": stream.attempts_left_out,
    }


def _attempt(attempt: AttemptRecord, shift_s: float) -> dict[str, Any]:
    return {
        "worker": attempt.worker,
        "epoch": attempt.epoch,
        "chosen_at": _at(attempt.chosen_at, shift_s),
        "started_at": _at(attempt.started_at, shift_s),
        "first_token_at": _at(attempt.first_token_at, shift_s),
        "ended_at": _at(attempt.ended_at, shift_s),
        "outcome": attempt.outcome,
        "tokens": attempt.tokens,
        "ranks": {"prefill": _works(attempt.prefill), "decode": _works(attempt.decode)},
    }


def _works(ranks: tuple[RankWork, ...]) -> list[dict[str, Any]]:
    """What each rank did. The rank that the others wait for has the least in collectives: the rest of theirs is
    waiting.
    """
    transfer_s = min((each.collective_s for each in ranks), default=0.0)
    return [
        {
            "steps": each.steps,
            "compute_s": round(each.compute_s, 6),
            "transfer_s": round(transfer_s, 6),
            "peer_wait_s": round(each.collective_s - transfer_s, 6),
            "idle_s": round(each.idle_s, 6),
        }
        for each in ranks
    ]


def _at(at: float | None, shift_s: float) -> float | None:
    return None if at is None else round(at + shift_s, 4)


def _version() -> str:
    try:
        return metadata.version("lockstep-router")
    except metadata.PackageNotFoundError:  # in an image, whose sources are no installed package
        return ""
