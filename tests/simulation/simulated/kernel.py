"""Virtual time: events of the simulated machines and the event loops of the simulated processes, in one order.

Nothing waits: when nothing is left to do at a moment, the clock jumps to the next event or timer. Equal inputs give
equal orders, whatever the machine does: there are no threads, no real clock, no file descriptors, no hashes.
"""

import asyncio
import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

_MAX_TURNS = 100_000
"""Turns of loops without progress of time, after which the simulation is stuck."""


class Stuck(Exception):
    """The simulation cannot go on: nothing is left to happen, or time stands still."""


class Event:
    """Something that happens at a moment unless it is cancelled before."""

    __slots__ = ("action", "at", "number")

    def __init__(self, at: float, number: int, action: Callable[[], None]) -> None:
        self.at = at
        self.number = number
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None

    def __lt__(self, other: "Event") -> bool:
        return (self.at, self.number) < (other.at, other.number)


class Kernel:
    """The clock, and everything that is going to happen."""

    def __init__(self, *, keep_lines: int = 0) -> None:
        self.now = 0.0
        self.loops: list[ProcessLoop] = []
        self._events: list[Event] = []
        self._numbers = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=keep_lines)
        """The end of the trace."""

    def at(self, when: float, action: Callable[[], None]) -> Event:
        """Let something happen at a moment; events of one moment happen in the order in which they were added."""
        self._numbers += 1
        event = Event(max(when, self.now), self._numbers, action)
        heapq.heappush(self._events, event)
        return event

    def again(self, event: Event, delay_s: float) -> None:
        """Let an event that has just happened happen again."""
        self._numbers += 1
        event.at, event.number = self.now + delay_s, self._numbers
        heapq.heappush(self._events, event)

    def after(self, delay_s: float, action: Callable[[], None]) -> Event:
        return self.at(self.now + delay_s, action)

    def trace(self, *facts: object) -> None:
        """Add a line to the trace."""
        line = f"{self.now:.6f} {' '.join(map(str, facts))}"
        self._hash.update(line.encode() + b"\n")
        self.lines.append(line)

    @property
    def trace_hash(self) -> str:
        """Equal for equal runs."""
        return self._hash.hexdigest()

    def run_until(self, is_done: Callable[[], bool], limit: float) -> bool:
        """Run until the condition holds; False if the moment `limit` comes first."""
        while not is_done():
            self._run_ready_loops()
            if is_done():
                return True
            at = self._next_at()
            if at is None:
                raise Stuck("nothing is left to happen")
            if at > limit:
                self.now = max(self.now, limit)
                return False
            self.now = max(self.now, at)
            self._run_events()
        return True

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, self.now + seconds)

    def _run_ready_loops(self) -> None:
        for _ in range(_MAX_TURNS):
            ready = [loop for loop in self.loops if loop.is_ready(self.now)]
            if not ready:
                return
            for loop in ready:
                loop.turn()
        raise Stuck("callbacks call each other without an end")

    def _run_events(self) -> None:
        while self._events and self._events[0].at <= self.now:
            event = heapq.heappop(self._events)
            if event.action is not None:
                event.action()

    def _next_at(self) -> float | None:
        while self._events and self._events[0].action is None:
            heapq.heappop(self._events)
        times = [at for loop in self.loops if (at := loop.next_at()) is not None]
        if self._events:
            times.append(self._events[0].at)
        return min(times, default=None)


class ProcessLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process. Its clock began at another moment than those of other processes.

    `freeze` stops the process as SIGSTOP does: its timers are late afterwards. `kill` ends it as SIGKILL does: none of
    its code runs any more.
    """

    def __init__(self, kernel: Kernel, name: str, clock_offset: float) -> None:
        super().__init__()
        self.name = name
        self._kernel = kernel
        self._offset = clock_offset
        self._selector = self  # type: ignore[assignment]  # what the base class asks for events of files
        self._frozen_until = 0.0
        self.frozen_s = 0.0
        """Seconds that it was frozen, in all."""
        self.wall_offset_s = 0.0
        """How far the wall clock of its machine is off."""
        self.is_dead = False
        self.complaints: list[str] = []
        """Unhandled exceptions."""
        self.set_exception_handler(self._complain)
        kernel.loops.append(self)

    def time(self) -> float:
        return self._kernel.now + self._offset

    def select(self, _timeout: float | None) -> list[Any]:
        """No file is ever ready."""
        return []

    def _process_events(self, _events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Run it at once: a simulated process has no threads."""
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    @property
    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, in no particular order."""
        return [task for task in asyncio.all_tasks(self) if not task.done()]

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task from outside."""
        return self.create_task(work)

    @property
    def is_frozen(self) -> bool:
        return self._kernel.now < self._frozen_until

    @property
    def thawed_at(self) -> float:
        """When it was last continued, or will be."""
        return self._frozen_until

    def freeze(self, seconds: float) -> None:
        until = self._kernel.now + seconds
        self.frozen_s += max(0.0, until - max(self._frozen_until, self._kernel.now))
        self._frozen_until = max(self._frozen_until, until)

    def kill(self) -> None:
        self.is_dead = True
        self._kernel.loops.remove(self)

    def is_ready(self, now: float) -> bool:
        """Whether a turn would do something now."""
        at = self.next_at()
        return at is not None and at <= now

    def next_at(self) -> float | None:
        """When its next turn is due; None: never, unless something happens."""
        at = None
        if self._ready:
            at = self._kernel.now
        elif self._scheduled:
            # At least the current moment: differences of clocks are rounded.
            at = max(self._kernel.now, self._scheduled[0]._when - self._offset)
        return None if at is None else max(at, self._frozen_until)

    def turn(self) -> None:
        """Run what is due."""
        self.stop()
        self.run_forever()

    def bury(self) -> None:
        """Cancel what is left and let it end, so that nothing of it runs when memory is freed."""
        self.is_dead = True
        for _ in range(100):
            if not self.pending:
                break
            for task in self.pending:
                task.cancel()
            for _ in range(20):
                self.turn()
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")
