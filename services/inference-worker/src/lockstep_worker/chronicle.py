"""What happens to a worker's ranks, told as notices: lost and why, ready again and after how long, failed, draining.

It reads nothing but the engine's status, so no notice holds anything of a request.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_engine import EngineState, EngineStatus

_CHANGING = re.compile(r"pid \d+|\d+\.\d+ s|\d+ running")
"""What makes the sentences of two like happenings differ."""


@dataclass(frozen=True)
class Notice:
    """One thing that happened, for people who look at the pod."""

    reason: str
    """In CamelCase, one of a few."""
    message: str
    is_warning: bool = False

    @property
    def key(self) -> str:
        """Equal for things that happen again and again."""
        return f"{self.reason}: {_CHANGING.sub('', self.message)}"


class Chronicle:
    """Follows the statuses of one engine.

    Args:
        status: the first one.
        tell: called with each notice; must not wait.
    """

    def __init__(self, status: EngineStatus, tell: Callable[[Notice], None]) -> None:
        self._tell = tell
        self._state = status.state
        self._epoch = status.epoch
        self._was_ready = False
        self._away_since = time.monotonic()

    def observe(self, status: EngineStatus) -> None:
        """Take the status as it is now."""
        if status.epoch > self._epoch and status.reason and status.state is not EngineState.FAILED:
            # Told with the next epoch: how a rank has ended is known when it has been buried.
            self._tell(Notice("RankLost", f"{status.reason}; the ranks are started again", is_warning=True))
        self._epoch = status.epoch
        if status.state is not self._state:
            before, self._state = self._state, status.state
            self._note_change(before, status)

    def fail(self, reason: str) -> None:
        """The worker ends because its ranks can't be had."""
        self._tell(Notice("RanksFailed", reason, is_warning=True))

    def drain(self, streams: int, timeout_s: float) -> None:
        """The worker takes nothing new and goes."""
        what = f"{streams} running streams have {timeout_s:g} s to end" if streams else "nothing runs"
        self._tell(Notice("Draining", f"no new requests are taken; {what}"))

    def _note_change(self, before: EngineState, status: EngineStatus) -> None:
        if status.state is EngineState.READY:
            again = " again" if self._was_ready else ""
            self._was_ready = True
            seconds = time.monotonic() - self._away_since
            self._tell(Notice("RanksReady", f"the ranks are ready{again} after {seconds:.1f} s"))
        elif before is EngineState.READY:
            self._away_since = time.monotonic()
