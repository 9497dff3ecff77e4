"""Notices for operators about a worker's ranks: lost and why, ready and after how long, failed, draining.

Notices are made from the engine's status only, so none contains data of a request. `pod_events` posts them.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import import_module

from lockstep_engine import EngineState, EngineStatus

from lockstep_worker import metrics
from lockstep_worker.settings import WorkerSettings

logger = logging.getLogger("lockstep.worker")

_VARIABLE_PARTS = re.compile(r"pid \d+|\d+\.\d+ s|\d+ running")
"""The parts in which the messages of two similar notices differ."""

FLUSH_TIMEOUT_S = 2.0
"""For the notices that are still queued when a worker ends."""


@dataclass(frozen=True)
class Notice:
    """One event in the life of the ranks or of the worker."""

    reason: str
    """Event reason in CamelCase, e.g. `RankLost`."""
    message: str
    is_warning: bool = False

    @property
    def key(self) -> str:
        """The notice without its variable parts: equal for notices that differ only in pids, durations and counts."""
        return f"{self.reason}: {_VARIABLE_PARTS.sub('', self.message)}"


class RankHistory:
    """Compares the statuses of one engine, each with the one before it, and makes notices of the differences.

    Args:
        status: the engine's first status.
        notify: called with each notice; must not block.
    """

    def __init__(self, status: EngineStatus, notify: Callable[[Notice], None]) -> None:
        self._notify = notify
        self._state = status.state
        self._epoch = status.epoch
        self._was_ready = False
        self._unready_since = time.monotonic()

    def observe(self, status: EngineStatus) -> None:
        """Compare a new status with the last one."""
        if status.epoch > self._epoch and status.reason and status.state is not EngineState.FAILED:
            # Noted only when the epoch rises: by then the reason includes the rank's exit status.
            self._notify(Notice("RankLost", f"{status.reason}; the ranks are started again", is_warning=True))
        self._epoch = status.epoch
        if status.state is not self._state:
            before, self._state = self._state, status.state
            self._note_change(before, status)

    def fail(self, reason: str) -> None:
        """Note that the worker ends because its ranks cannot run."""
        self._notify(Notice("RanksFailed", reason, is_warning=True))

    def drain(self, streams: int, timeout_s: float) -> None:
        """Note that the worker accepts no new streams and will end."""
        what = f"{streams} running streams have {timeout_s:g} s to end" if streams else "nothing runs"
        self._notify(Notice("Draining", f"no new requests are taken; {what}"))

    def _note_change(self, before: EngineState, status: EngineStatus) -> None:
        if status.state is EngineState.READY:
            again = " again" if self._was_ready else ""
            self._was_ready = True
            seconds = time.monotonic() - self._unready_since
            self._notify(Notice("RanksReady", f"the ranks are ready{again} after {seconds:.1f} s"))
        elif before is EngineState.READY:
            self._unready_since = time.monotonic()


class NoticeQueue:
    """A bounded queue with one reader. Putting never waits; a full queue drops its oldest notice."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._notices: deque[Notice] = deque()
        self._closed = False
        self._wake = asyncio.Event()

    def put(self, notice: Notice) -> None:
        """Append a notice."""
        if len(self._notices) >= self._limit:
            self._notices.popleft()
            metrics.EVENTS.labels("dropped").inc()
        self._notices.append(notice)
        self._wake.set()

    def close(self) -> None:
        """Make `notices` end after the notices that are queued now."""
        self._closed = True
        self._wake.set()

    async def notices(self) -> AsyncIterator[Notice]:
        """Remove and yield notices, waiting for more until the queue is closed."""
        while True:
            while self._notices:
                yield self._notices.popleft()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


@contextlib.asynccontextmanager
async def posting(settings: WorkerSettings) -> AsyncIterator[Callable[[Notice], None]]:
    """Post notices as Events of the pod that the settings name; yields the function that queues one.

    On leaving, queued notices have two seconds to be posted.
    """
    queue = NoticeQueue()
    task = asyncio.create_task(_post(settings, queue))
    try:
        yield queue.put
    finally:
        queue.close()
        await asyncio.wait({task}, timeout=FLUSH_TIMEOUT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _post(settings: WorkerSettings, queue: NoticeQueue) -> None:
    try:
        # In a thread: importing the Kubernetes client takes 0.3 s, and probes must be answered meanwhile.
        pod_events = await asyncio.to_thread(import_module, "lockstep_worker.pod_events")
        await pod_events.PodEvents(settings.pod_name, settings.pod_namespace, settings.pod_uid).run(queue)
    except Exception:
        logger.exception("no more Events will be posted")
