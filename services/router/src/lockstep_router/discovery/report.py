"""The report of a discovery: the set of worker addresses, and the problem if the set cannot be read.

The report sets metrics, logs a problem once, and calls its owner when the set changes. It never connects to a worker.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_router import metrics

logger = logging.getLogger("lockstep.router")


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's target and its id. The same target with another id is another address."""

    target: str
    """gRPC target: unix:/path or host:port, an IPv6 host in brackets."""
    worker_id: str | None = None
    """The id that the worker at the target must have; None: any id."""
    alternates: tuple[str, ...] = field(default=(), compare=False)
    """Further targets of the same worker, such as its address of the other family. They are no part of its identity."""


class Report:
    """The last set of worker addresses, and whether discovery works now.

    Args:
        on_change: called with the new set whenever it differs from the last one, and when it becomes known that there
            is no worker.
    """

    def __init__(self, on_change: Callable[[frozenset[WorkerAddress]], None]) -> None:
        self.workers: frozenset[WorkerAddress] = frozenset()
        self.problem = ""
        """Why the set cannot be read now. The last set stays in use."""
        self._on_change = on_change
        self._updated_at = time.monotonic()
        self._is_static = False
        self._is_answered = False
        metrics.DISCOVERED.set(0)
        metrics.DISCOVERY_AGE_SECONDS.set_function(self.age_s)

    def age_s(self) -> float:
        """Seconds since the last complete answer or, before the first one, since the start; 0 for a static set."""
        return 0.0 if self._is_static else time.monotonic() - self._updated_at

    def set_static(self, workers: frozenset[WorkerAddress]) -> None:
        """Report a set that never changes."""
        self._is_static = True
        self.update(workers)

    @property
    def lists_none(self) -> bool:
        """Whether discovery has answered that there is no worker, and has not failed since; never for a static set."""
        return self._is_answered and not self.workers and not self._is_static

    def update(self, workers: frozenset[WorkerAddress]) -> None:
        """Report the complete set."""
        self._updated_at = time.monotonic()
        is_news = not self._is_answered and not workers and not self.workers
        self._is_answered = True
        self.update_partially(workers)
        if is_news:  # the set is as before, but now it is known
            self._on_change(workers)

    def update_partially(self, workers: frozenset[WorkerAddress]) -> None:
        """Report a set that may be incomplete or out of date: it is used, but does not reset `age_s`."""
        metrics.DISCOVERED.set(len(workers))
        if _targets(workers) != _targets(self.workers):
            logger.info("discovered workers changed", extra={"targets": sorted(each.target for each in workers)})
            self.workers = workers
            self._on_change(workers)

    def succeed(self) -> None:
        """Report that the discovery works."""
        if self.problem:
            logger.info("discovery works again")
            self.problem = ""

    def fail(self, problem: str) -> None:
        """Report that the set cannot be read now. The first failure of several in a row is logged."""
        metrics.DISCOVERY_ERRORS.inc()
        self._is_answered = False
        if not self.problem:
            logger.warning(
                "discovery fails: the workers known so far are kept",
                extra={"problem": problem, "workers": len(self.workers)},
            )
        self.problem = problem


def _targets(workers: frozenset[WorkerAddress]) -> set[tuple[object, ...]]:
    return {(each.target, each.worker_id, each.alternates) for each in workers}


class Discovery(Protocol):
    """A source of worker addresses."""

    async def run(self, report: Report) -> None:
        """Report the complete set at once and after every change, and every failure to read it, until cancelled.

        It retries without end. Addresses that can no longer be read are still reported as they were last read.
        """
