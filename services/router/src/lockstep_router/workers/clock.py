"""A clock that counts only the time during which this process was running.

Deadlines on workers use it instead of wall time: if the router itself was stopped or starved of CPU, the workers were
not late.
"""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("lockstep.router")


class AwakeClock:
    """Seconds during which the event loop ran, counted in ticks of `tick_s`."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self._awake_s = 0.0

    def now(self) -> float:
        """Awake seconds up to the last tick."""
        return self._awake_s

    def advance(self, elapsed_s: float) -> None:
        """Count one tick that took `elapsed_s`: a late tick counts as two at most."""
        self._awake_s += min(elapsed_s, 2 * self.tick_s)

    async def run(self, on_tick: Callable[[], None]) -> None:
        """Tick until cancelled, calling `on_tick` each time.

        All deadlines depend on the ticks: if `on_tick` raises, this is logged, once until it succeeds, and they go on.
        """
        is_failing = False
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(self.tick_s)
            now = loop.time()
            self.advance(now - last)
            last = now
            try:
                on_tick()
            except Exception:
                if not is_failing:
                    logger.exception("tick failed")
                is_failing = True
            else:
                is_failing = False
