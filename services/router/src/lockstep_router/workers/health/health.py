"""The health of one worker: its detectors, and what they say together."""

import random
from typing import Any

from lockstep_api.v1 import worker_pb2

from lockstep_router.workers.health.ejection import Breaker, BreakerState
from lockstep_router.workers.health.limits import HealthLimits
from lockstep_router.workers.health.pace import Pace, size_class
from lockstep_router.workers.health.slowness import Slowness
from lockstep_router.workers.health.step_meter import StepMeter
from lockstep_router.workers.health.suspicion import Suspicion

_STEP_FLOOR_S = 0.002
_FIRST_TOKEN_FLOOR_S = 0.1
"""Twice the awake clock's resolution. Clients do not notice shorter times."""

_STALLED_SHARE = 0.3
"""A step that has taken this share of its own deadline is late: 1.5 s for a decode step by default."""

PROOF_TOKENS = 32
"""Tokens of one attempt, or its end, that show that worker and stream are well."""


class Health:
    """The detectors of one worker. Times are those of the awake clock, in seconds."""

    def __init__(self, limits: HealthLimits, tick_s: float, rng: random.Random | None = None) -> None:
        rng = rng or random.Random()
        self.suspicion = Suspicion(limits.suspicion_phi, tick_s, limits.heartbeat_timeout_s)
        self.breaker = Breaker(limits, rng)
        self.slowness = Slowness(limits.slow_factor, rng)
        self.steps = Pace(_STEP_FLOOR_S)
        self.first_tokens = Pace(_FIRST_TOKEN_FLOOR_S)
        self.is_stalled = False
        """Whether the current step takes much longer than its deadline leads to expect."""
        self.is_hotspot = False
        """Whether requests queue here while another worker has room."""
        self._detects_stalls = limits.suspicion_phi > 0
        self._meter = StepMeter()
        self._was_suspected = False
        self._running = 0
        self._step_began_at: float | None = None

    @property
    def is_suspected(self) -> bool:
        """Whether it may have died or hang: its heartbeats or its current step are late."""
        return self.suspicion.is_suspected or self.is_stalled

    @property
    def problems(self) -> list[str]:
        """The names of its problems, for logs, metrics and the status."""
        named = {
            "suspected": self.is_suspected,
            "ejected": self.breaker.state is not BreakerState.CLOSED,
            "slow": self.slowness.is_impaired,
            "hotspot": self.is_hotspot,
        }
        return [name for name, holds in named.items() if holds]

    # Events.

    def note_connection(self, now: float) -> None:
        """Note that a connection begins or ends."""
        self.suspicion.begin(now)
        self.note_epoch()

    def note_epoch(self) -> None:
        """Note that a life of the worker's ranks begins."""
        self._meter.reset()
        self._step_began_at = None
        self.is_stalled = False

    def note_status(self, status: worker_pb2.Status, now: float) -> None:
        """Take a heartbeat."""
        self.suspicion.note_heartbeat(now)
        self._running = status.running
        if not status.step_deadline_s:
            self._step_began_at = None
        elif self._step_began_at is None:
            self._step_began_at = now
        if (sample := self._meter.note(status, now)) is not None:
            size, step_s = sample
            self.steps.note((size,), step_s, now, is_usual=not self.slowness.is_impaired)

    def note_prompt(self) -> None:
        """Note that the worker computes a part of a prompt, or is about to."""
        self._meter.note_prompt()

    def note_first_token(self, prompt_tokens: int, time_s: float, now: float) -> None:
        """Note the first token of an attempt.

        Args:
            prompt_tokens: tokens that the worker had to compute before.
            time_s: since the worker began to run the stream, its queue not included.
            now: the time.
        """
        bucket = (size_class(prompt_tokens), size_class(self._running))
        self.first_tokens.note(bucket, time_s, now, is_usual=not self.slowness.is_impaired)

    def check(self, now: float, stepped_at: float, step_deadline_s: float) -> bool:
        """Check heartbeats and the current step; True if `is_suspected` has changed since the last call, at every tick.

        Args:
            now: the time.
            stepped_at: when the last step was finished.
            step_deadline_s: the worker's deadline for the current step; 0: there is none.
        """
        self.suspicion.check(now)
        self.is_stalled = (
            self._detects_stalls
            and self._step_began_at is not None
            and now - max(stepped_at, self._step_began_at) > _STALLED_SHARE * step_deadline_s > 0
        )
        before, self._was_suspected = self._was_suspected, self.is_suspected
        return self._was_suspected != before

    def describe(self, now: float) -> dict[str, Any]:
        """The detectors' values, for the status."""
        breaker, ratio = self.breaker, self.slowness.ratio
        return {
            "problems": self.problems,
            "phi": round(self.suspicion.phi(now), 1),
            "faults_in_a_row": breaker.in_a_row,
            "fault_share": round(breaker.fault_share(now), 3),
            "breaker": breaker.state.value,
            "ejected_for_s": round(max(0.0, breaker.until - now), 1) if breaker.state is BreakerState.OPEN else 0.0,
            "ejected_because": breaker.cause if breaker.state is not BreakerState.CLOSED else "",
            "slowness": None if ratio is None else round(ratio, 2),
        }
