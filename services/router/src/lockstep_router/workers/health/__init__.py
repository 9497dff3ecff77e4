"""The health of workers: what makes new streams avoid a worker that is connected and ready.

Detectors are small, have no clock and no task of their own, and are fed with events and times. Nothing here ends a
running stream: that is the deadlines' part.
"""

from lockstep_router.workers.health.ejection import Breaker, BreakerState
from lockstep_router.workers.health.health import Health
from lockstep_router.workers.health.limits import HealthLimits
from lockstep_router.workers.health.suspicion import Suspicion
from lockstep_router.workers.health.watch import HealthWatch

__all__ = ["Breaker", "BreakerState", "Health", "HealthLimits", "HealthWatch", "Suspicion"]
