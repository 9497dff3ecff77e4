"""Compares the workers of each model once a second: which are ejected, slow, or hotspots.

It logs every change and sets the metrics. It never touches a stream.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from lockstep_api.v1 import worker_pb2

from lockstep_router import metrics
from lockstep_router.workers.health.ejection import BreakerState, may_eject
from lockstep_router.workers.health.health import Health
from lockstep_router.workers.health.hotspots import Hotspots, Load
from lockstep_router.workers.health.limits import HealthLimits

logger = logging.getLogger("lockstep.router")

PROBLEMS = ("suspected", "ejected", "slow", "hotspot")
for _problem in PROBLEMS:
    metrics.IMPAIRMENTS.labels(_problem)  # from 0


class Watched(Protocol):
    """A worker, as far as its health is concerned."""

    @property
    def worker_id(self) -> str: ...  # noqa: D102
    @property
    def target(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> str:
        """The name of its model; empty if it is not known."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes new streams."""

    @property
    def status(self) -> worker_pb2.Status: ...  # noqa: D102
    @property
    def health(self) -> Health: ...  # noqa: D102


class HealthWatch:
    """The comparison of all workers of one router."""

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._hotspots: dict[str, Hotspots[Watched]] = {}
        self._models: Collection[str] = ()

    def check(self, workers: Iterable[Watched], now: float) -> None:
        """Judge all workers. Called once a second.

        Args:
            workers: all of the router.
            now: the awake clock's time.
        """
        by_model: dict[str, list[Watched]] = defaultdict(list)
        for worker in workers:
            if worker.model:
                by_model[worker.model].append(worker)
        self._hotspots = {model: self._hotspots.get(model) or Hotspots() for model in by_model}
        for model, group in by_model.items():
            for worker in group:
                changed = worker.health.breaker.tick(now, is_ready=worker.is_ready)
                if changed is BreakerState.HALF_OPEN:
                    logger.info("ejected worker may be probed by one stream", extra=_named(worker))
                elif changed is BreakerState.CLOSED:
                    logger.info("ejected worker is used again: no stream came to probe it", extra=_named(worker))
                self.consider(worker, group, now)
            ready = [worker for worker in group if worker.is_ready]
            self._judge_slowness(ready, now)
            self._find_hotspots(model, group, ready, now)
            self._measure(model, group)
        for model in set(self._models) - by_model.keys():
            for problem in PROBLEMS:
                metrics.IMPAIRED_WORKERS.remove(model, problem)
        self._models = tuple(by_model)

    def consider(self, worker: Watched, group: Sequence[Watched], now: float) -> None:
        """Eject a worker if its breaker says so and enough others are left.

        Args:
            worker: the worker.
            group: all workers of its model.
            now: the awake clock's time.
        """
        breaker = worker.health.breaker
        cause = breaker.verdict((each.health.breaker for each in group if each is not worker), now)
        if not cause:
            return
        ready = [each.health.breaker for each in group if each.is_ready]
        ejected = sum(each.health.breaker.state is not BreakerState.CLOSED for each in group)
        if may_eject(breaker, ready, len(group), ejected, self._limits):
            breaker.eject(cause, now)
            note_ejected(worker, now)

    def _judge_slowness(self, ready: Sequence[Watched], now: float) -> None:
        steps = [worker.health.steps.medians(now) for worker in ready]
        firsts = [worker.health.first_tokens.medians(now) for worker in ready]
        for index, worker in enumerate(ready):
            health = worker.health
            ratios = [
                own.ratio([*all_[:index], *all_[index + 1 :]], now, with_bounds=not health.slowness.is_slow)
                for all_, own in ((steps, health.steps), (firsts, health.first_tokens))
            ]
            was_slow, was_tried = health.slowness.is_slow, health.slowness.is_on_trial
            if health.slowness.judge(max((each for each in ratios if each is not None), default=None), now):
                # What was measured long ago must not decide.
                health.steps.forget()
                health.first_tokens.forget()
            if (health.slowness.is_slow, health.slowness.is_on_trial) != (was_slow, was_tried):
                _note_slow(worker)

    def _find_hotspots(self, model: str, group: Sequence[Watched], ready: Sequence[Watched], now: float) -> None:
        able = [worker for worker in ready if not (worker.health.is_suspected or worker.health.breaker.is_ejected)]
        loads = {worker: Load(worker.status.queued, worker.status.free_seqs) for worker in able}
        hot = self._hotspots[model].find(loads, now)
        for worker in group:
            if worker.health.is_hotspot != (worker in hot):
                worker.health.is_hotspot = worker in hot
                if worker in hot:
                    metrics.IMPAIRMENTS.labels("hotspot").inc()
                    extra = _named(worker) | {"queued": worker.status.queued}
                    logger.info("worker is a hotspot: requests queue there while others are idle", extra=extra)
                else:
                    logger.info("worker is no longer a hotspot", extra=_named(worker))

    def _measure(self, model: str, group: Iterable[Watched]) -> None:
        problems = [problem for worker in group for problem in worker.health.problems]
        for problem in PROBLEMS:
            metrics.IMPAIRED_WORKERS.labels(model, problem).set(problems.count(problem))


def note_suspicion(worker: Watched, now: float) -> None:
    """Log that a worker became suspected or no longer is."""
    health = worker.health
    if not health.is_suspected:
        logger.info("worker is no longer suspected", extra=_named(worker))
        return
    metrics.IMPAIRMENTS.labels("suspected").inc()
    cause = "its current step is late" if health.is_stalled else "its heartbeats are late"
    extra = _named(worker) | {"cause": cause, "phi": round(health.suspicion.phi(now), 1)}
    logger.info("worker is suspected: new streams avoid it", extra=extra)


def note_ejected(worker: Watched, now: float) -> None:
    """Log that a worker was ejected."""
    metrics.IMPAIRMENTS.labels("ejected").inc()
    breaker = worker.health.breaker
    extra = _named(worker) | {"cause": breaker.cause, "for_s": round(breaker.until - now, 1)}
    logger.warning("worker is ejected: new streams avoid it", extra=extra)


def note_closed(worker: Watched) -> None:
    """Log that an ejected worker is used again."""
    logger.info("ejected worker serves well: it is used again", extra=_named(worker))


def _note_slow(worker: Watched) -> None:
    slowness = worker.health.slowness
    extra = _named(worker) | {"times_slower": None if slowness.ratio is None else round(slowness.ratio, 1)}
    if slowness.is_slow:
        metrics.IMPAIRMENTS.labels("slow").inc()
        logger.warning("worker is slow: new streams avoid it while others have room", extra=extra)
    elif slowness.is_on_trial:
        logger.info("slow worker is tried by one stream at a time", extra=extra)
    else:
        logger.info("worker is no longer slow", extra=extra)


def _named(worker: Watched) -> dict[str, Any]:
    return {"worker": worker.worker_id, "target": worker.target, "model": worker.model}
