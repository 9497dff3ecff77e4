"""What a discovery has to say: measured, logged once, handed on when it is news."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep_router import metrics

if TYPE_CHECKING:
    from lockstep_router.discovery.found import Found

logger = logging.getLogger("lockstep.router")


class Report:
    """The workers as they were last found, and whether they can be found now."""

    def __init__(self, on_found: Callable[[frozenset["Found"]], None]) -> None:
        self.workers: frozenset[Found] = frozenset()
        self.problem = ""
        """Why the workers cannot be found now; those found last stay."""
        self._on_found = on_found
        self._found_at = time.monotonic()
        self._settled = False
        metrics.DISCOVERED.set(0)
        metrics.DISCOVERY_AGE_SECONDS.set_function(self.age_s)

    def age_s(self) -> float:
        """Since the workers were last found or, before, since the start; 0 for those that never change."""
        return 0.0 if self._settled else time.monotonic() - self._found_at

    def settle(self, workers: frozenset["Found"]) -> None:
        """These are all workers and always will be."""
        self._settled = True
        self.found(workers)

    def found(self, workers: frozenset["Found"]) -> None:
        """These are all workers."""
        self._found_at = time.monotonic()
        self.suppose(workers)

    def suppose(self, workers: frozenset["Found"]) -> None:
        """These are all workers as far as a stand-in knows: taken, but the search goes on."""
        metrics.DISCOVERED.set(len(workers))
        if workers != self.workers:
            logger.info("workers found", extra={"targets": sorted(found.target for found in workers)})
            self.workers = workers
            self._on_found(workers)

    def working(self) -> None:
        """Nothing stands in the way (any more)."""
        if self.problem:
            logger.info("discovery works again")
            self.problem = ""

    def failed(self, problem: str) -> None:
        """The workers cannot be found just now. Said once however long it lasts."""
        metrics.DISCOVERY_ERRORS.inc()
        if not self.problem:
            logger.warning(
                "discovery fails: the workers known so far are kept",
                extra={"problem": problem, "workers": len(self.workers)},
            )
        self.problem = problem
