"""One Chrome trace of all ranks, for https://ui.perfetto.dev: a process for each rank, on one clock."""

import gzip
import json
from typing import Any

from lockstep_tools.profile.parts import RankProfile

_STEPS, _COLLECTIVES = 1, 2
"""Threads of the ranks' own marks; those of torch's events are numbered after them."""
_ARGUMENTS = frozenset({"stream", "device", "correlation", "grid", "block"})
"""Of torch's events, what is kept."""


def merged(profiles: list[RankProfile]) -> bytes:
    """The trace, as a gzip of JSON."""
    origin = min((step.began for each in profiles for step in each.steps), default=0)
    events: list[dict[str, Any]] = []
    for profile in profiles:
        events += _named(profile)
        events += _marks(profile, origin)
        events += _of_torch(profile, origin)
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6, mtime=0)


def _named(profile: RankProfile) -> list[dict[str, Any]]:
    pid = profile.rank
    name = f"rank {profile.rank} (pid {profile.pid}, {profile.device})"
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        {"ph": "M", "pid": pid, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}},
        {"ph": "M", "pid": pid, "tid": _COLLECTIVES, "name": "thread_name", "args": {"name": "collectives"}},
    ]


def _marks(profile: RankProfile, origin: int) -> list[dict[str, Any]]:
    steps = [
        _event(profile.rank, _STEPS, f"step {each.number}", each.began - origin, each.ended - each.began)
        | {"args": {"sequences": each.sequences, "tokens": each.tokens}}
        for each in profile.steps
    ]
    collectives = [
        _event(profile.rank, _COLLECTIVES, each.name, each.began - origin, each.ended - each.began)
        | {"args": {"number": number}}
        for number, each in enumerate(profile.collectives)
    ]
    return steps + collectives


def _of_torch(profile: RankProfile, origin: int) -> list[dict[str, Any]]:
    threads: dict[Any, int] = {}
    found = []
    for each in profile.events:
        place = (each.get("pid"), each.get("tid"))
        thread = threads.setdefault(place, _COLLECTIVES + 1 + len(threads))
        if each["ph"] == "M":
            continue
        event = _event(
            profile.rank, thread, str(each["name"]), float(each["ts"]) * 1000 - origin, float(each["dur"]) * 1000
        )
        arguments = {key: value for key, value in (each.get("args") or {}).items() if key in _ARGUMENTS}
        found.append(event | {"cat": str(each.get("cat", ""))} | ({"args": arguments} if arguments else {}))
    names = {
        thread: "torch" if pid == profile.pid else f"torch, device {pid} stream {tid}"
        for (pid, tid), thread in threads.items()
    }
    return [
        {"ph": "M", "pid": profile.rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        for thread, name in names.items()
    ] + found


def _event(rank: int, thread: int, name: str, began_ns: float, length_ns: float) -> dict[str, Any]:
    began, length = round(began_ns / 1000, 3), round(length_ns / 1000, 3)
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": began, "dur": length}
