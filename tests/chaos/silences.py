"""How long a stream that moved was silent, and the prefill that it needed on the worker that continued it.

The client's history has the silence; the prefill is the router's record of the attempt that ended it: from the moment
when its worker began to run it to its first token. The rest is finding the fault, choosing a worker, and waiting there.
A killed process is found when the kernel closes its sockets, which it does after it has freed the process's memory;
that time is reported by itself.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
from killing import percentile
from lockstep_tools.load.generator import Moment
from lockstep_tools.load.history import History
from machine import wait_for

_WITHIN_S = 2.0
"""A silence that the fault has caused begins at most so much later: what was on its way still arrives."""


@dataclass(frozen=True)
class Silence:
    """Of one stream that moved. Times are in seconds."""

    silence_s: float
    prefill_s: float
    prefill_tokens: int
    """Of its prompt and its answer so far."""
    reason: str
    """Why it left its worker, as the router has it."""
    calm_s: float
    """Its longest silence before the fault."""
    death_s: float
    """How long the kernel took to end the killed process; 0: none was killed."""

    @property
    def rest_s(self) -> float:
        """The silence without the prefill. A client that read the token before late has a shorter one."""
        return max(0.0, self.silence_s - self.prefill_s)


def longest_gap_between_s(history: History, first: Moment, last: Moment) -> float:
    """The longest silence that ended between two moments, so that it has nothing of a fault at the second one."""
    spoken = history.spoken
    gaps = (after.at_s - before.at_s for before, after in pairwise(spoken) if first.at_s < after.at_s <= last.at_s)
    return max(gaps, default=0.0)


def newest_records(management_url: str, since: float, count: int) -> dict[int, dict[str, Any]]:
    """The router's records of the streams that arrived since then, by `max_tokens`, when so many have ended.

    Args:
        management_url: the router's.
        since: on the wall clock.
        count: of the streams, each with its own `max_tokens`.
    """

    def ended() -> dict[int, dict[str, Any]]:
        state = httpx.get(f"{management_url}/console/state", timeout=30, trust_env=False).raise_for_status().json()
        new = [each for each in state["streams"] if each["arrived_at"] >= since and each["ended_at"] is not None]
        return {each["max_tokens"]: each for each in new} if len(new) == count else {}

    return wait_for(ended, "the router has recorded the ends of all streams", every_s=0.1)


def silences(
    histories: Sequence[History], records: dict[int, dict[str, Any]], calm: Moment, fault: Moment, death_s: float
) -> list[Silence]:
    """Of those streams that moved once."""
    found = []
    for history in histories:
        record = records[history.request.body["max_tokens"]]
        if len(record["attempts"]) != 2:  # it did not move, or twice
            continue
        left, last = record["attempts"]
        found.append(
            Silence(
                history.longest_gap_s(fault.at_s, fault.at_s + _WITHIN_S),
                last["first_token_at"] - last["started_at"],
                record["prompt_tokens"] + left["tokens"],
                left["outcome"],
                longest_gap_between_s(history, calm, fault),
                death_s,
            )
        )
    return found


def described(found: Sequence[Silence]) -> str:
    """`silence p50 51, p99 80; prefill …`, in milliseconds."""
    parts = {
        "silence": [each.silence_s for each in found],
        "prefill": [each.prefill_s for each in found],
        "silence without it": [each.rest_s for each in found],
        "end of a killed process": [each.death_s for each in found],
        "calm before": [each.calm_s for each in found],
    }
    texts = [
        f"{name} p50 {1e3 * percentile(values, 0.5):.0f}, p99 {1e3 * percentile(values, 0.99):.0f}"
        for name, values in parts.items()
    ]
    return f"{len(found)} streams moved with up to {max(each.prefill_tokens for each in found)} tokens; in ms: " + (
        "; ".join(texts)
    )


def wall_clock() -> float:
    """Now, as the router's records have it, which are rounded."""
    return time.time() - 0.001
