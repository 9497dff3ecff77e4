"""Ejects a worker that fails streams which other workers complete, and tries it again later with one stream.

A breaker counts faults of the server only. A lost stream is evidence against the worker when it has made progress on
another one; without that witness the stream itself may be the cause. Refusals, clients that leave or read slowly, and
invalid requests are no faults.

The rules compare a worker with the others and work from two workers on: Envoy's success rate needs five. A fault on
every worker ejects none.
"""

import math
import random
from collections.abc import Iterable
from enum import StrEnum

from lockstep_router.workers.health.limits import HealthLimits

_HALF_LIFE_S = 30.0
"""Half-life of counted successes and faults."""

_DEATHS_HALF_LIFE_S = 120.0
"""Half-life of counted deaths: a worker is back seconds after each and serves well until the next."""

_MIN_SHARE = 0.2
"""Share of faults above which a worker is ejected though some streams succeed in between."""

_VOLUME = 2
"""That rule needs this many times `eject_after` faults."""

_WORSE = 3.0
"""A worker is ejected only if its share of faults is this many times that of the others."""

_JITTER = 0.25
"""Ejections are longer by a random share up to this one, so that routers do not probe at the same time."""

_FORGIVEN_AFTER = 3.0
"""Without an ejection for this many times the length of the last one, the next one is short again."""


class BreakerState(StrEnum):
    """Closed: streams pass. Open: ejected. Half open: one stream at a time passes, as a probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Decayed:
    """A count in which each event loses half of its weight with each half-life."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._value = 0.0
        self._at = 0.0

    def add(self, now: float) -> None:
        """Count one event."""
        self._value, self._at = self.at(now) + 1.0, now

    def at(self, now: float) -> float:
        """The count now."""
        return self._value * math.exp2((self._at - now) / self._half_life_s)

    def clear(self) -> None:
        """Set it to 0."""
        self._value = 0.0


class Breaker:
    """The breaker of one worker. Times are those of one clock, in seconds."""

    def __init__(self, limits: HealthLimits, rng: random.Random) -> None:
        self._limits = limits
        self._random = rng
        self.state = BreakerState.CLOSED
        self.in_a_row = 0
        """Faults since the last success. Of faults without a witness, one for each session."""
        self.until = 0.0
        """End of the ejection, while open."""
        self.ejections = 0
        """In a row; the next one is as many doublings long."""
        self.cause = ""
        """Of the last ejection, in words."""
        self._length_s = 0.0
        self._successes, self._faults = Decayed(_HALF_LIFE_S), Decayed(_HALF_LIFE_S)
        self._deaths = Decayed(_DEATHS_HALF_LIFE_S)
        self._sessions: set[str] = set()
        self._probe: str | None = None
        self._idle_since = 0.0
        """Half open: since when a probe could have come, and none has."""

    # Events.

    def note_sent(self, stream_id: str) -> None:
        """Note that a stream was sent: the probe, if the breaker is half open."""
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = stream_id

    def note_over(self, stream_id: str) -> None:
        """Note that an attempt has ended, however: the next stream may be the probe."""
        if self._probe == stream_id:
            self._probe = None

    def is_probe(self, stream_id: str) -> bool:
        """Whether a stream is the probe."""
        return self._probe == stream_id

    def note_success(self, stream_id: str, now: float) -> bool:
        """Note that a stream makes progress or is complete; True if that closes the breaker."""
        self._successes.add(now)
        if self.state is BreakerState.CLOSED:
            self._forget_row()
        elif self.is_probe(stream_id):
            self._close()
            self.until = now  # beginning of the time after which it is forgiven
            return True
        return False

    def note_fault(self, now: float) -> None:
        """Note a fault with a witness: a lost stream made progress on another worker."""
        self.in_a_row += 1
        self._faults.add(now)

    def note_internal(self, session: str, now: float) -> None:
        """Note an internal error that ended a stream: nothing shows that another worker would have done better.

        In a row, each session counts once, so that one client alone cannot eject a worker.
        """
        self._faults.add(now)
        if session not in self._sessions and len(self._sessions) < max(1, self._limits.eject_after):
            self._sessions.add(session)
            self.in_a_row += 1

    def note_death(self, now: float) -> None:
        """Note that the worker, or one life of its ranks, was lost while it served."""
        self._deaths.add(now)
        self.note_fault(now)

    def _forget_row(self) -> None:
        self.in_a_row = 0
        self._sessions.clear()

    # Decisions.

    @property
    def is_ejected(self) -> bool:
        """Whether new streams go elsewhere."""
        return self.state is BreakerState.OPEN or (self.state is BreakerState.HALF_OPEN and self._probe is not None)

    def fault_share(self, now: float) -> float:
        """Faults as a share of faults and successes of late; 0 if there was neither."""
        faults, successes = self._faults.at(now), self._successes.at(now)
        return faults / (faults + successes) if faults + successes > 0.01 else 0.0

    def verdict(self, others: Iterable["Breaker"], now: float) -> str:
        """Why the worker should be ejected, in words; empty if it should not.

        Args:
            others: the breakers of the model's other workers.
            now: the time.
        """
        after = self._limits.eject_after
        if not after or self.state is not BreakerState.CLOSED:
            return ""
        others = list(others)
        is_worse = self.fault_share(now) > _WORSE * max((other.fault_share(now) for other in others), default=0.0)
        if is_worse and self.in_a_row >= after:
            return f"{self.in_a_row} faults in a row"
        if is_worse and self._faults.at(now) >= _VOLUME * after and self.fault_share(now) >= _MIN_SHARE:
            return f"{self.fault_share(now):.0%} of its streams fail"
        deaths = self._deaths.at(now)
        # Half a death less, since the first ones have lost some of their weight.
        if deaths > max(after - 0.5, _WORSE * max((other._deaths.at(now) for other in others), default=0.0)):
            return f"it died about {deaths:.0f} times in {_DEATHS_HALF_LIFE_S:.0f} s"
        return ""

    def eject(self, cause: str, now: float) -> None:
        """Open the breaker: the first time for `eject_initial_s`, then for twice as long each time."""
        if self.state is BreakerState.CLOSED and now - self.until > _FORGIVEN_AFTER * self._length_s:
            self.ejections = 0
        length_s = min(self._limits.eject_initial_s * 2.0 ** min(self.ejections, 30), self._limits.eject_max_s)
        self._length_s = length_s * self._random.uniform(1.0, 1.0 + _JITTER)
        self.ejections += 1
        self.state = BreakerState.OPEN
        self.until = now + self._length_s
        self.cause = cause
        self._probe = None
        self._forget_row()

    def tick(self, now: float, *, is_ready: bool = True) -> BreakerState | None:
        """Change the state as time passes; the new state if it does.

        A half-open breaker closes without a probe, too: a router that has no streams for the worker would call it
        ejected without end. Time in which no probe could come does not count.

        Args:
            now: the time.
            is_ready: whether the worker takes streams.
        """
        if self.state is BreakerState.OPEN and now >= self.until:
            self.state, self._idle_since = BreakerState.HALF_OPEN, now
            return self.state
        if self.state is BreakerState.HALF_OPEN:
            if self._probe is not None or not is_ready:
                self._idle_since = now
            elif now - self._idle_since > _FORGIVEN_AFTER * self._length_s:
                self._close()
                self.ejections = 0
                return self.state
        return None

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._probe = None
        self._forget_row()
        self._faults.clear()
        self._deaths.clear()


def may_eject(breaker: Breaker, ready: Iterable[Breaker], known: int, ejected: int, limits: HealthLimits) -> bool:
    """Whether a worker may be ejected now.

    Args:
        breaker: the worker's.
        ready: those of the model's ready workers.
        known: number of the model's workers.
        ejected: how many of these are ejected, half open ones included.
        limits: the settings.
    """
    others = any(other is not breaker and other.state is BreakerState.CLOSED for other in ready)
    return others and ejected < max(1, math.floor(limits.eject_share * known))
