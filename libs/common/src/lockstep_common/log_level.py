"""The level of a running process's log: the one of its settings, or another one that an operator has set for a while.

A change ends by itself, so that no process is left at level debug. Only the logger `lockstep` has the level: the
audit log keeps its own.
"""

import logging
import threading
import time
from collections.abc import Callable

LEVELS = ("debug", "info", "warning", "error")

DEFAULT_CHANGE_S = 600.0
MAX_CHANGE_S = 86_400.0


class LogLevel:
    """The level now. Any thread may change it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configured = "info"
        self._level = self._configured
        self._ends_at = 0.0
        self._timer: threading.Timer | None = None
        self._listeners: list[Callable[[str], None]] = []

    @property
    def level(self) -> str:
        """The least level that is logged."""
        return self._level

    @property
    def left_s(self) -> float | None:
        """Seconds until the level of the settings is back; None: it is in force."""
        return None if self._timer is None else max(0.0, self._ends_at - time.monotonic())

    def configure(self, level: str) -> None:
        """Set the level of the settings, and end a change."""
        with self._lock:
            self._configured = level
            self._stop_timer()
            self._apply(level)

    def change(self, level: str, for_s: float) -> None:
        """Set another level for so many seconds; the level of the settings ends a change at once.

        Raises:
            ValueError: there is no such level, or the time is not in (0, `MAX_CHANGE_S`].
        """
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}")
        if not 0 < for_s <= MAX_CHANGE_S:
            raise ValueError(f"for_s must be above 0 and at most {MAX_CHANGE_S:.0f}")
        with self._lock:
            self._stop_timer()
            if level != self._configured:
                self._ends_at = time.monotonic() + for_s
                self._timer = timer = threading.Timer(for_s, lambda: self._end(timer))
                timer.name, timer.daemon = "log level", True
                timer.start()
            self._apply(level)

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with each new level, in the thread that changes it."""
        with self._lock:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[str], None]) -> None:
        """End `subscribe`."""
        with self._lock:
            self._listeners.remove(listener)

    def _end(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:
                self._timer = None
                self._apply(self._configured)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _apply(self, level: str) -> None:
        self._level = level
        logging.getLogger("lockstep").setLevel(level.upper())
        for listener in self._listeners:
            listener(level)


LOG_LEVEL = LogLevel()
"""Of this process."""
