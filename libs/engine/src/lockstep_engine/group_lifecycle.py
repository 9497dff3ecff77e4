"""The life of an engine's rank group: its start, a new epoch after each fault, giving up, the end.

It decides when ranks are started and what state the engine is in. It knows nothing of requests: those end in
`fail_requests`.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine import faults
from lockstep_engine.control import Ready
from lockstep_engine.engine_status import EngineState
from lockstep_engine.group import RankGroup

logger = logging.getLogger("lockstep.engine")

_RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_MAX_STARTS = 2
"""How many groups may fail before one has become ready. After one more the engine fails."""
_MAX_RESTARTS = 6
"""How many groups in a row may fail without becoming ready. After one more the engine fails, so that its pod is
restarted."""


class GroupLifecycle:
    """Starts and restarts one rank group.

    Args:
        on_change: called when `state` or the epoch has changed.
        fail_requests: called with a reason when the ranks are lost: ends every unfinished request.
    """

    def __init__(self, on_change: Callable[[], None], fail_requests: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._fail_requests = fail_requests
        self.group: RankGroup | None = None
        self.state = EngineState.STARTING
        self.reason = ""
        self.ready: Ready | None = None
        """What the ranks said when they were ready last; None: no group was yet."""
        self._failures = 0
        self._is_held = False
        self._waits_for_release = False
        """The ranks wait for plans, and `release` enters READY."""
        self._started: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def epoch(self) -> int:
        """Number of the group's current life; 0 before the first."""
        return 0 if self.group is None else self.group.epoch

    def start(self, group: RankGroup) -> asyncio.Future[None]:
        """Start the ranks. The result is done when they are ready; it has an error if they cannot start, and another
        start would fail in the same way.
        """
        loop = asyncio.get_running_loop()
        self.group = group
        self._started = loop.create_future()
        self._restart = loop.create_task(self._run_epoch(group, 0.0))
        return self._started

    def hold(self) -> None:
        """Enter READY not before `release`, also when the ranks wait for plans."""
        self._is_held = True

    def release(self) -> None:
        """The engine has what it needs besides its ranks."""
        self._is_held = False
        if self._waits_for_release:
            self.enter_ready()

    def enter_ready(self) -> None:
        """All ranks wait for plans, and the engine has taken them up."""
        self._failures = 0
        self._waits_for_release = self._is_held
        if self._is_held:
            return
        self._enter(EngineState.READY, "")
        self._finish_start(None)

    def lose(self, reason: str) -> None:
        """The ranks are lost: end every request, so that other workers can continue them, and start the next epoch."""
        if self._closing or self.group is None:
            return
        self._waits_for_release = False
        started = self.ready is not None
        if self._failures >= (_MAX_RESTARTS if started else _MAX_STARTS):
            self._fail_requests(reason)
            self.refuse(LockstepError(ErrorCode.INTERNAL, f"the ranks do not stay up: {reason}"))
            return
        delay = _RESTART_DELAYS_S[min(self._failures, len(_RESTART_DELAYS_S) - 1)]
        # First, because the group calls again if this raises an error. Two restarts at once must not be.
        self._restart = asyncio.get_running_loop().create_task(self._run_epoch(self.group, delay))
        self._failures += 1
        self._enter(EngineState.RESTARTING if started else EngineState.STARTING, reason)
        self._fail_requests(reason)

    def refuse(self, error: LockstepError) -> None:
        """The ranks cannot start; another start would fail in the same way."""
        self._waits_for_release = False
        if self.group is not None and not self._closing:
            self._restart = asyncio.get_running_loop().create_task(self.group.kill())
        self._enter(EngineState.FAILED, error.message)
        self._finish_start(error)

    def fail_for(self, error: Exception) -> None:
        """An error has left the state of the driver inconsistent: lose the ranks and start over."""
        if self.group is not None and self.state is EngineState.READY:
            self.group.fail_for(error)
        else:  # the requests are lost already
            faults.note(error, self.epoch)

    def call_soon(self, work: Callable[..., object], *arguments: object) -> None:
        """Have the loop call something; see `guarded`."""
        asyncio.get_running_loop().call_soon(partial(self.guarded, work, *arguments))

    def guarded(self, work: Callable[..., object], *arguments: object) -> None:
        """Call what has no caller that would learn of an error: the group fails then, as if `on_result` fails."""
        try:
            work(*arguments)
        except Exception as error:
            self.fail_for(error)

    def report_change(self) -> None:
        """Report the state to the caller, whose errors do not keep the engine from entering it."""
        try:
            self._on_change()
        except Exception as error:
            faults.note(error, self.epoch)

    async def close(self) -> None:
        """Start no ranks any more. Those that run are left to the caller."""
        self._closing = True
        self._waits_for_release = False
        self.state, self.reason = EngineState.FAILED, "closed"
        self._finish_start(LockstepError(ErrorCode.CANCELLED, "the engine was closed while it started"))
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)

    async def _run_epoch(self, group: RankGroup, delay_s: float) -> None:
        try:
            await group.kill()
            if group.exits:
                extra = {"epoch": group.epoch, "reason": self.reason, "exits": group.exits}
                logger.warning("rank group lost", extra=extra)
            if group.first_exit:
                self.reason = f"{self.reason}: {group.first_exit}"
            await asyncio.sleep(delay_s)
            await group.start()
        except (LockstepError, OSError, TimeoutError) as error:
            self.lose(f"the ranks cannot be started: {str(error) or type(error).__name__}")
            return
        except Exception as error:
            self.lose(f"the ranks cannot be started: {faults.note(error, self.epoch)}")
            return
        if self.state is EngineState.RESTARTING:
            self.report_change()  # because of the new epoch

    def _finish_start(self, error: LockstepError | None) -> None:
        if self._started is not None and not self._started.done():
            if error is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(error)

    def _enter(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason
        self.report_change()
