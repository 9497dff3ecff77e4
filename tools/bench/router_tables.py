"""The tables of `router.py`, from what it has measured."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from measure import table
from router_measure import MANY, SHORT_TOKENS

_RATIO = "ratio to Lockstep's, median (least to most)"

Found = dict[str, dict[str, float]]
"""Figures by their names, by the load."""

_PROCESSES = (
    "Each process has as many clients as the single one; the kernel shares them out by a hash, not evenly. With a "
    "ratio of 1 no process does work for another one, and rates grow with the cores. How far they do, no machine "
    "shows whose cores clients and backend need too."
)


def median_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: _median([each[name] for each in rounds]) for name in rounds[0]} if rounds else {}


def medians_of(rounds: Sequence[Found]) -> Found:
    """The same for each load."""
    return {load: median_of([each[load] for each in rounds]) for load in rounds[0]} if rounds else {}


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def without_nan(value: Any) -> Any:
    """The same as JSON has it."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def cost_table(costs: dict[str, list[dict[str, float]]]) -> str:
    """CPU time, and each round's ratio to Lockstep's: sides of one round ran in the same seconds."""
    titles = {
        "request_us": "a request of one token",
        "short_us": f"a stream of {SHORT_TOKENS} tokens",
        "token_us": "a streamed token",
    }
    sides = [side for side, rounds in costs.items() if rounds]
    rows: list[list[Any]] = []
    for name, title in titles.items():
        rows.append([title, *(f"{median_of(costs[side])[name]:.1f}" for side in sides)])
        rows.append([_RATIO, *(_ratios(costs, side, name) for side in sides)])
    rows.append(["a fixed loop, ms", *(f"{median_of(costs[side])['calibration_ms']:.1f}" for side in sides)])
    return table([f"CPU time of the router with {MANY} clients, µs", *sides], rows)


def full_table(costs: dict[str, list[dict[str, float]]]) -> str:
    """CPU time of a token when the worker has more than the router can send."""
    sides = [side for side, rounds in costs.items() if rounds]
    rows: list[list[Any]] = [
        ["a streamed token", *(f"{median_of(costs[side])['full_token_us']:.1f}" for side in sides)],
        [_RATIO, *(_ratios(costs, side, "full_token_us") for side in sides)],
        ["tokens per second", *(f"{median_of(costs[side])['per_s']:.0f}" for side in sides)],
        ["cores that the router had", *(f"{median_of(costs[side])['cores']:.2f}" for side in sides)],
    ]
    return table([f"CPU time of the router with tokens each ms, {MANY} streams for each process, µs", *sides], rows)


def _ratios(costs: dict[str, list[dict[str, float]]], side: str, name: str) -> str:
    if side == "lockstep":
        return ""
    ratios = [other[name] / own[name] for own, other in zip(costs["lockstep"], costs[side], strict=False)]
    known = sorted(ratio for ratio in ratios if not math.isnan(ratio))
    return f"{statistics.median(known):.2f} ({known[0]:.2f} to {known[-1]:.2f})" if known else "nan"


def step_table(steps: dict[str, list[dict[str, float]]]) -> str:
    """CPU time of a worker's step."""
    sides = [side for side, rounds in steps.items() if rounds]
    rows = [["a step", *(f"{median_of(steps[side])['step_ms']:.2f}" for side in sides)]]
    return table([f"CPU time of the router for a worker's step of {MANY} streams, ms", *sides], rows)


def process_table(costs: dict[str, list[dict[str, float]]]) -> str:
    """Several processes against one, with as many clients for each."""
    rows = []
    for side, rounds in costs.items():
        if " x" in side and rounds:
            own, found = median_of(costs["lockstep"]), median_of(rounds)
            rows.append(
                [
                    side,
                    f"{found['request_us'] / own['request_us']:.2f}",
                    f"{found['token_us'] / own['token_us']:.2f}",
                    f"{found['busiest_share']:.2f}",
                ]
            )
    header = ["processes", "CPU of a request, to one process's", "of a streamed token", "share of the busiest"]
    return f"{table(header, rows)}\n\n{_PROCESSES}" if rows else ""


def rate_tables(medians: dict[str, Found], halves: dict[str, Found]) -> str:
    """Rates, and delays next to those of clients that talk to the backend.

    Args:
        medians: of each side.
        halves: figures at half of a router's rate: of the `router`, and `direct` at the same rate.
    """
    sides = [side for side, found in medians.items() if found]
    routers = [side for side in sides if side != "direct"]
    loads = [load for load in medians["direct"] if load != "costs"]
    rows = [[load, *(f"{medians[side][load]['per_s']:.0f}" for side in sides)] for load in loads]
    parts = [table(["requests, or streamed events, per second", *sides], rows)]
    rows = [
        [f"requests, half load: {_title(name)}", *(_half_delay(halves.get(side), name) for side in routers)]
        for name in ("first_p50_ms", "first_p99_ms")
    ]
    for load in loads:
        plain = medians["direct"][load]
        for name in ("first_p50_ms", "first_p99_ms", *(["gap_p99_ms"] * load.startswith("streams"))):
            added = (_shown(medians[side][load][name] - plain[name]) for side in routers)
            rows.append([f"{load}: {_title(name)}", *added])
    parts.append(table(["added ms to the first byte, and between two", *routers], rows))
    load = medians["direct"]
    parts.append(
        f"The clients themselves need {load[f'requests, {MANY}']['client_us']:.0f} µs of CPU time for a request and "
        f"{load[f'streams, {MANY}']['client_us']:.1f} µs for a streamed token, measured without a router."
    )
    return "\n\n".join(parts)


def _title(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ")


def _half_delay(found: Found | None, name: str) -> str:
    return "none" if found is None else _shown(found["router"][name] - found["direct"][name])


def _shown(delay_ms: float) -> str:
    """A delay; none where no answer came."""
    return "none" if math.isnan(delay_ms) else f"{delay_ms:.1f}"


def memory_table(memories: dict[str, dict[str, float]]) -> str:
    """Memory of connections and streams."""
    sides = [side for side, found in memories.items() if found]
    rows = [
        ["an idle connection", *(f"{memories[side]['idle_kib']:.1f}" for side in sides)],
        ["connections still open", *(f"{memories[side]['idle_open']:.0f}" for side in sides)],
        ["a stream in progress", *(f"{memories[side]['stream_kib']:.1f}" for side in sides)],
    ]
    return table(["memory, KiB", *sides], rows) if sides else ""
