"""The states of several processes of one router as one: what the console shows of a router with `processes`."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep_router.history import MAX_MOVES, MAX_STREAMS

_ADDED = ("requests", "streams", "max_streams", "failovers", "sessions")
_USED = ("streams", "requests", "tokens")


def joined(
    bodies: Mapping[int, dict[str, Any]], router_id: str, processes: int, *, has_others: bool = False
) -> dict[str, Any]:
    """One state.

    Workers are as the first process sees them. Sessions that have streams on two processes count twice. Limits are each
    process's own, so a tenant's use is that of the process where it is nearest to its limit.

    Args:
        bodies: the states by the number of the process; at least one.
        router_id: the router's name, without a process's number.
        processes: of the router, also those that do not answer.
        has_others: whether process 0, which alone does so, asks other routers.
    """
    first = bodies[min(bodies)]
    rows: dict[str, dict[str, Any]] = {}
    for body in bodies.values():
        for row in body["tenants"]["rows"]:
            known = rows.setdefault(row["name"], row)
            if known is not row:
                rows[row["name"]] = known | {name: max(known[name], row[name], key=_use) for name in _USED}
    others = first["others"]
    if has_others and 0 not in bodies:
        others = {"problem": "the process that asks them does not answer", "rows": []}
    elif others is not None:  # the process knows itself by another name
        rows_of_others = [row for row in others["rows"] if row["facts"] is None or row["facts"]["id"] != router_id]
        others = others | {"rows": rows_of_others}
    return first | {
        "others": others,
        "router": joined_router([body["router"] for body in bodies.values()], router_id),
        "processes": processes,
        "moves": _newest(bodies, "moves", "at", MAX_MOVES),
        "streams": _newest(bodies, "streams", "arrived_at", MAX_STREAMS),
        "tenants": first["tenants"] | {"rows": list(rows.values())},
    }


def joined_router(routers: Sequence[dict[str, Any]], router_id: str) -> dict[str, Any]:
    """The facts about all processes, as those of one router."""
    first = routers[0]
    resumable = {name: sum(each["resumable"][name] for each in routers) for name in first["resumable"]}
    added = {name: sum(each[name] for each in routers) for name in _ADDED}
    return first | {"id": router_id, "resumable": resumable} | added


def _use(limit: dict[str, Any]) -> int:
    return int(limit["used"])


def _newest(bodies: Mapping[int, dict[str, Any]], name: str, by: str, limit: int) -> list[dict[str, Any]]:
    entries = [entry | {"key": f"{number}.{entry['key']}"} for number, body in bodies.items() for entry in body[name]]
    return sorted(entries, key=lambda entry: -float(entry[by]))[:limit]
