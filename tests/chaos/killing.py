"""Kills random ranks and workers at random moments: one fault at a time, never the last worker that can serve."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_tools.load.generator import Moment, Traffic
from lockstep_tools.serving.status import READY
from machine import kill, wait_for
from system import Json, System

RANK, WORKER = "rank", "worker"

_LONGEST_PAUSE_S = 1.5
_AGAIN = 0.25
"""Probability that a victim may be a worker that has not recovered from the last kill."""
_RECOVERY_S = 60.0


@dataclass(frozen=True)
class Kill:
    """A process that was killed under load."""

    kind: str
    victim: str
    at: Moment
    streams: int
    """Number of streams that ran on its worker."""


class Killer:
    """Makes the random choices; the same seed makes the same choices, at other times."""

    def __init__(self, system: System, traffic: Traffic, seed: int, log: Callable[[str], None]) -> None:
        self._system = system
        self._traffic = traffic
        self._random = random.Random(seed)
        self._log = log
        self.kills: list[Kill] = []

    async def run(self, count: int) -> None:
        """Kill so many processes, with random pauses."""
        while len(self.kills) < count:
            await asyncio.sleep(self._random.uniform(0.0, _LONGEST_PAUSE_S))
            again = self._random.random() < _AGAIN
            await asyncio.to_thread(self._kill, again=again)

    def _kill(self, *, again: bool) -> None:
        kind = self._random.choice((RANK, RANK, WORKER))  # as many of each as there are
        choice = self._random.random()
        while True:
            worker = self._victim(choice, again=again)
            ranks = [rank for rank in worker["ranks"] if rank["state"] != "dead"]
            rank = ranks[int(choice * len(ranks))] if kind == RANK and ranks else None
            pid = worker["pid"] if rank is None else rank["pid"]
            if kill(pid):
                break
            time.sleep(0.05)  # it died by the last kill, and the router does not know it yet
        name = worker["id"] if rank is None else f"{worker['id']}/{rank['rank']}"
        made = Kill(
            WORKER if rank is None else RANK,
            name,
            self._traffic.note_moment(f"killed {name}"),
            streams=worker["running"],
        )
        self.kills.append(made)
        self._log(f"killed {made.kind} {name} (pid {pid}, {worker['state']}) under {made.streams} streams")

    def _victim(self, choice: float, *, again: bool) -> Json:
        """A worker that runs streams while another one is ready; waits until there is one.

        Sometimes a worker that is recovering, to kill it during its recovery.
        """

        def find() -> Json | None:
            workers = self._system.workers()
            ready = [worker for worker in workers.values() if worker["state"] == READY]
            if len(ready) == len(workers):
                # The router may have ejected the other one, which for minutes gets no streams after several failures.
                busy = [worker for worker in ready if worker["running"]]
                return busy[int(choice * len(busy))] if busy else None
            down = [worker for worker in workers.values() if worker["state"] != READY and worker["pid"]]
            return down[0] if again and ready and down else None

        worker = wait_for(find, "another worker is ready", _RECOVERY_S)
        assert worker is not None
        return worker


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
