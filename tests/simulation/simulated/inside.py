"""The checks that look inside routers and workers: what they run, for whom, and what they hold at the end."""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep_router.journals.mirror import MIRROR_CALLS

from simulated.checker import Violation
from simulated.clients import TENANT
from simulated.epochs import Epochs
from simulated.history import History
from simulated.kernel import ProcessLoop
from simulated.model import Expected
from simulated.network import JITTER_S
from simulated.worker import Live, Worker

if TYPE_CHECKING:
    from simulated.processes import RouterProcess
    from simulated.world import World

STOPS_WITHIN_S = 0.5
"""After a stream's end, or the begin of a later attempt: workers that can be reached must have stopped by then."""


@dataclass
class Streamed:
    """One stream in one router process."""

    name: str
    stream_id: str
    expected: Expected
    has_stops: bool
    arrived_at: float
    created: int
    """When it arrived, by the wall clock of the router's machine."""
    process: "RouterProcess"
    subject: str
    history: History | None = None
    """Of its only reader; None: it is resumable."""
    delivered: int = 0
    """Tokens that a reader of the resumable stream has got."""
    taken_at: float = 0.0
    """When its router has taken it from another one."""
    finished_at: float | None = None
    """When a reader of it got its finish."""

    @property
    def got(self) -> int:
        """Tokens that a client has got."""
        history = self.history
        return self.delivered if history is None else max((event.tokens for event in history.events), default=0)

    def unwanted_at(self, window_s: float, tell_s: float) -> float | None:
        """When the last client that wanted it went, or will have to be given up; None: a client wants it.

        Args:
            window_s: for how long it goes on without a client.
            tell_s: the time in which its router learns of a cancel.
        """
        if self.history is not None:
            return self.history.ended_at
        process, times = self.process, []
        if self.finished_at is not None:
            times.append(self.finished_at)
        track = process.tracks.of_stream(self.stream_id)
        if track is not None:
            if track.sealed_at is not None:
                times.append(track.sealed_at)
            if track.cancelled_at is not None:
                times.append(track.cancelled_at + tell_s)
        left_at = process.tracks.left_at.get(self.subject)
        if left_at is not None and not process.has_reader(self.subject):
            times.append(left_at + window_s)
        return min(times, default=None)


class Inside:
    """All streams of all routers, and what is wrong with how they run."""

    def __init__(self, world: "World") -> None:
        self.violations: list[Violation] = []
        self.streams: dict[str, Streamed] = {}
        """By stream id."""
        self.moved: set[str] = set()
        """The names of streams that a worker got in a later attempt."""
        self._struck: dict[str, set[tuple[str, int, int]]] = {}
        """By stream id: the lives of workers that faults took it away from."""
        self.epochs = Epochs(self._on_lower_epoch)
        self._world = world
        self._newest: dict[tuple[ProcessLoop, str], tuple[int, float]] = {}
        """The newest attempt of each router at each stream that any worker got, and when."""

    def report(self, kind: str, subject: str, detail: str) -> None:
        """Note a violation, each kind once for each subject."""
        if not any((each.kind, each.subject) == (kind, subject) for each in self.violations):
            self.violations.append(Violation(kind, subject, detail, self._world.kernel.now))

    def _on_lower_epoch(self, stream_id: str, detail: str) -> None:
        self.report("lower epoch", self.streams[stream_id].name, detail)

    # Streams on workers.

    def on_submit(self, live: Live, worker: Worker) -> None:
        """Check what a worker has to continue."""
        world, submit, connection = self._world, live.submit, live.connection
        world.kernel.trace("submit", worker.worker_id, submit.stream_id, submit.attempt, len(submit.emitted_ids))
        world.counts["attempts"] += 1
        world.counts["resumed"] += submit.attempt > 1
        stream = self.streams.get(submit.stream_id)
        if stream is None:
            self.report("unknown stream", worker.worker_id, submit.stream_id)
            return
        if submit.attempt > 1:
            self.moved.add(stream.name)
        own = connection.loop, submit.stream_id
        newest, _ = self._newest.get(own, (0, 0.0))
        if submit.attempt > newest:
            self._newest[own] = (submit.attempt, world.kernel.now)
        emitted = tuple(submit.emitted_ids)
        if not stream.has_stops and emitted != stream.expected.ids[: len(emitted)]:
            self.report("wrong tokens", stream.name, f"attempt {submit.attempt} continues other tokens")
        if stream.process.loop is not connection.loop:
            return  # its router does not know yet that another one has taken it
        # A Submit may arrive after that of a later attempt.
        if len(emitted) < stream.got and submit.attempt >= newest:
            self.report(
                "begins again", stream.name, f"attempt {submit.attempt} has {len(emitted)} of {stream.got} tokens"
            )
        hello_took_s = worker.connections[connection] - connection.hello_sent_at
        arrived_at = stream.arrived_at if stream.history is None else stream.history.arrived_at
        drift_s = abs(live.arrived_at - arrived_at)
        slack_s = hello_took_s + 0.1 + sum(each.loop.frozen_s for each in world.living_routers())
        if drift_s > slack_s:
            self.report("seniority", stream.name, f"its arrival is {drift_s:.2f} s off on {worker.worker_id}")

    def on_struck(self, live: Live, worker: Worker) -> None:
        """Note that a fault has hit a stream's worker, or the path from it."""
        life = worker.worker_id, worker.incarnation, worker.epoch
        self._struck.setdefault(live.submit.stream_id, set()).add(life)

    def looked_poisonous(self, after: int) -> set[str]:
        """The requests that lost so many workers by faults: routers cannot tell them from one that kills workers."""
        return {self.streams[each].subject for each, lives in self._struck.items() if len(lives) >= after}

    def audit(self) -> None:
        """Find streams that workers compute without a client, and those whose workers are silent."""
        for worker in (*self._world.workers, *self._world.old_workers):
            for live in worker.live.values():
                if worker.is_stopped or self._is_silent(worker, live):
                    self.on_struck(live, worker)
                if worker.is_listening and not worker.is_stopped:
                    self._audit_stream(worker, live)

    def _is_silent(self, worker: Worker, live: Live) -> bool:
        """Whether a fault keeps from a router, or delays, what its worker sends."""
        down = self._world.network.path(worker.target, live.connection.router)
        return down.is_cut or down.jitter_s > JITTER_S

    def _audit_stream(self, worker: Worker, live: Live) -> None:
        world, submit = self._world, live.submit
        stream = self.streams.get(submit.stream_id)
        if stream is None:
            return  # it was reported when it came
        newest, newest_at = self._newest[live.connection.loop, submit.stream_id]
        if submit.attempt < newest:
            unwanted_at: float | None = newest_at
        elif stream.process.loop is not live.connection.loop:
            unwanted_at = stream.taken_at + world.tell_s
        else:
            unwanted_at = stream.unwanted_at(world.window_s, world.tell_s)
        if unwanted_at is None:
            return
        router = live.connection.router
        up = world.network.path(router, worker.target)
        process = world.routers[int(router.partition("-")[2])]
        is_frozen = process is not None and process.loop.is_frozen
        if up.is_cut or up.jitter_s > STOPS_WITHIN_S / 10 or is_frozen or not live.connection.can_reach_worker:
            return
        since = max(unwanted_at, up.healed_at, worker.thawed_at, process.loop.thawed_at if process is not None else 0.0)
        if world.kernel.now - since > STOPS_WITHIN_S:
            detail = f"{worker.worker_id} runs attempt {submit.attempt} of {submit.stream_id} without a client"
            self.report("runs on", stream.name, detail)

    # The end.

    def check_idle(self) -> None:
        """Find what routers and workers hold after the last stream."""
        for process in self._world.living_routers():
            self._check_router(process)
        state = self._world.state
        if state is not None and state.used_bytes:
            self.report("leak", "state", f"{state.used_bytes} bytes after the last stream")
        for worker in (*self._world.workers, *self._world.old_workers):
            if worker.is_listening and worker.live:
                self.report("leak", worker.worker_id, f"{len(worker.live)} streams after the last stream")

    def _check_router(self, process: "RouterProcess") -> None:
        router, name = process.router, process.name
        if router is None:
            self.report("exception", name, "the router did not start")
            return
        counts, front = router.workers.suspects.counts, process.front
        assert front is not None
        held = {
            "requests": router.requests,
            "streams": router.streams,
            "attempts": sum(link.has_streams for link in router.workers.links),
            "suspected": counts["suspected"],
            "tried": counts["tried"],
            "tenant's streams": router.limits.streams_of(TENANT),
            "resumable requests": router.runs.running,
            "readings": router.runs.readings,
            "requests without a client": router.runs.detached,
            "kept streams": router.journals.kept,
            "bytes of journals": router.journals.size_bytes,
            "idempotency keys": sum(now(front.find(scope)) is not None for scope in process.tracks.scopes),
            "mirrored streams": 0 if process.mirrored is None else len(process.mirrored.mirror.entries),
        }
        for what, number in held.items():
            if number:
                self.report("leak", name, f"{number} {what} after the last stream")
        tasks = len(process.loop.pending)
        most = 3 + 3 * len(router.workers.links) + (0 if process.mirrored is None else MIRROR_CALLS)
        if tasks > most:
            self.report("leak", name, f"{tasks} tasks with {len(router.workers.links)} links")
        self.check_complaints(process)

    def check_complaints(self, process: "RouterProcess") -> None:
        """Report the unhandled exceptions."""
        for complaint in process.loop.complaints:
            self.report("exception", process.name, complaint)

    def check_drained(self, process: "RouterProcess") -> None:
        """Find clients that a drain has left without an end of their streams."""
        world = self._world
        for client in process.clients:
            # A client that pauses for a second has no time to get the error.
            if not client.is_done and not client.request.pause_s:
                self.report("cut by the drain", client.histories[0].name, "its stream has got no end")
        for exchange in world.wire.of(process.index):
            # A router that goes on when its drain is over ends at once, with requests that came while it was stopped.
            if exchange.process is process and exchange.is_waiting and not exchange.had_no_turn:
                self.report("cut by the drain", exchange.subject, "its answer has got no end")

    def check_left(self, process: "RouterProcess") -> None:
        """Find what a router process has left when it ends."""
        # A client of the simulation that pauses for a second may sleep longer than a drain.
        sleeping = {client.task for client in process.clients if client.request.pause_s}
        if left := set(process.loop.pending) - sleeping:
            self.report("leak", process.name, f"{len(left)} tasks after its end")
        if process.failure is not None:
            self.report("exception", process.name, repr(process.failure))
        self.check_complaints(process)


def now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine of a store in memory, which waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    work.close()
    raise AssertionError("the store has waited")
