"""One simulation: the routers, workers, network, faults and clients of a plan."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf
from random import Random

from lockstep_common.errors import ErrorCode
from lockstep_router.discovery import WorkerAddress
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.sampling import derive_seed
from lockstep_router.settings import RouterSettings
from lockstep_router.streams.journal import Journal

from simulated import checker, injector
from simulated.checker import Rules, Violation
from simulated.clients import Client, open_histories
from simulated.history import History, Kind
from simulated.inside import Inside, Streamed
from simulated.kernel import Kernel, ProcessLoop
from simulated.model import Expected
from simulated.mutation import Mutation
from simulated.network import KEEPALIVE_S, Network
from simulated.plan import Plan, Request, settings_of
from simulated.processes import RouterProcess
from simulated.state import NOBODY, StateServer
from simulated.tracks import SLACK_S, Track
from simulated.visitors import PATIENCE_S, SILENCE_S, Visitor
from simulated.wire import VANISHED_S, Exchange, Wire
from simulated.worker import STEP_DEADLINE_S, Mischief, Worker

__all__ = ["Mutation", "Outcome", "World", "summarize"]

_SETTLE_S = 150.0
"""After the last fault and the last request: by then every stream must have ended."""

_IDLE_S = 3.0
"""After the last stream, and the time for which routers wait for clients: by then nothing of any stream is held."""

_AUDIT_EVERY_S = 0.5

_STEP_MARGIN_S = 2.0
"""Time that routers give a worker after its own deadline for a step."""

_BASE_NS = 1_700_000_000 * 10**9
"""Wall time at the beginning."""

_MIRRORED_S = 0.3
"""The state server has by then what a router has, if nothing disturbs it."""

_LEFT_S = 1.0
"""A client that comes back to a stream whose router has died comes in time, if it comes so long before the end of the
stream's time.
"""

_REPEATS_S = 60.0
"""Time in which the client library finds another router and gets there what it has already."""


@dataclass(frozen=True)
class Outcome:
    """What one simulation gave."""

    seed: int
    violations: list[Violation]
    histories: list[History]
    trace_hash: str
    counts: Counter[str]
    """Ends of streams, faults, and what the routers did."""
    lines: tuple[str, ...]
    longest_silence_s: float


class _Exceptions(logging.Handler):
    """Reports exceptions that living processes have caught and logged: no fault explains one."""

    def __init__(self, inside: Inside) -> None:
        super().__init__(logging.ERROR)
        self._inside = inside

    def emit(self, record: logging.LogRecord) -> None:
        loop = asyncio.get_running_loop()
        is_dead = isinstance(loop, ProcessLoop) and loop.is_dead
        if record.exc_info is not None and not is_dead:
            self._inside.report("exception", record.name, f"{record.getMessage()}: {record.exc_info[1]!r}")


class World:
    """Everything of one simulation."""

    def __init__(self, plan: Plan, mutation: Mutation | None = None, *, keep_lines: int = 0) -> None:
        self.plan = plan
        self.mutation = mutation or Mutation()
        self.kernel = Kernel(keep_lines=keep_lines)
        self.network = Network(
            self.kernel,
            Random(f"{plan.seed}/network"),
            to_worker=self.mutation.to_worker,
            to_router=self.mutation.to_router,
        )
        self.client_loop = ProcessLoop(self.kernel, "clients", 0.0)
        self.wire = Wire(
            self.kernel,
            Random(f"{plan.seed}/wire"),
            self.client_loop,
            self.mutation.request,
            self.mutation.answer,
            self._on_unfinished,
        )
        self.inside = Inside(self)
        self.state = self._make_state() if plan.shares_state else None
        """The state server that the routers share."""
        self.owners: dict[str, RouterProcess] = {}
        """The router that has each resumable stream, or had it last."""
        self.broken: set[str] = set()
        """The names of histories whose connection broke, or could not be made."""
        self.died_at: dict[RouterProcess, float] = {}
        self.excused: set[str] = set()
        """Requests whose streams the state server could not have yet when their router died."""
        self.network.reading = self.inside.epochs
        self.window_s = settings_of(plan, "router").resume_window_s
        self.tell_s = _told_after(self.window_s, plan) if plan.shares_state else 0.0
        """The longest time until a router knows that another one has ended or taken a stream of it."""
        self.wall_offset_ns = [0] * len(plan.workers)
        self.workers: list[Worker] = []
        self.old_workers: list[Worker] = []
        """Processes that have been replaced, some of which still run."""
        self.routers: list[RouterProcess | None] = [None] * plan.routers
        self.dead_routers: list[RouterProcess] = []
        self.histories: list[History] = []
        self.counts: Counter[str] = Counter()
        self.on_idle: Callable[[], object] = lambda: None
        """Called when every stream has ended and the routers still run."""
        self._starts: Counter[str] = Counter()
        self._by_seed = {
            derive_seed(request.seed, choice): request for request in plan.requests for choice in range(request.choices)
        }
        self._open = len(plan.requests)
        """Requests that have not ended, those that have not begun included."""

    def _make_state(self) -> StateServer:
        def report(key: str, detail: str) -> None:
            self.inside.report("lower epoch", key, detail)

        return StateServer(self.kernel, Random(f"{self.plan.seed}/state/network"), self.mutation.state, report)

    # What is where.

    def addresses(self) -> frozenset[WorkerAddress]:
        return frozenset(WorkerAddress(each.target, each.worker_id) for each in self.workers)

    def start_worker(self, index: int, target: str | None = None) -> Worker:
        """Start a worker process, the first one or the next one of its pod."""
        self._starts[f"worker-{index}"] += 1
        life = self._starts[f"worker-{index}"]
        wall_ns = _BASE_NS + int(self.kernel.now * 1e9) + self.wall_offset_ns[index]
        started = Worker(
            self.kernel,
            Random(f"{self.plan.seed}/worker-{index}/{life}"),
            f"worker-{index}",
            target or f"10.0.0.{index}:50051",
            wall_ns,
            self.plan.workers[index],
            Mischief(),
            on_submit=self.inside.on_submit,
            on_struck=self.inside.on_struck,
        )
        self.network.hosts[started.target] = started
        if index < len(self.workers):
            self.old_workers.append(self.workers[index])
            self.workers[index] = started
        else:
            self.workers.append(started)
        return started

    def start_router(self, index: int) -> None:
        name = f"router-{index}"
        self._starts[name] += 1
        self.routers[index] = RouterProcess(self, index, self._starts[name])

    def rediscover(self) -> None:
        """Report the present set of workers to every router."""
        for process in self.living_routers():
            process.call(lambda process=process: process.discovery.set(self.addresses()))  # type: ignore[misc]

    def living_routers(self) -> list[RouterProcess]:
        return [each for each in self.routers if each is not None]

    def disturbed_state(self) -> StateServer:
        """The state server, which is about to have a fault."""
        assert self.state is not None
        self.state.was_disturbed = True
        return self.state

    # Who has what.

    def note_owner(self, request_id: str, process: RouterProcess) -> None:
        """Note that a router has opened or taken a resumable stream."""
        if self.owners.get(request_id, process) is not process:
            self.counts["streams taken over"] += 1
        self.owners[request_id] = process
        for exchange in self.wire.of(process.index):
            # Its head was sent before there was a stream.
            if exchange.process is process and exchange.stream_id == request_id and exchange.track is None:
                process.note_reader(exchange)

    def track_of(self, request_id: str | None) -> Track | None:
        """What the router knows of a stream that has it."""
        owner = self.owners.get(request_id or "")
        return None if owner is None else owner.tracks.by_id.get(request_id or "")

    def must_have(self, request_id: str | None, index: int) -> bool:
        """Whether a router that is asked for a stream now must find it, though another one may have it."""
        target, owner, track = self.routers[index], self.owners.get(request_id or ""), self.track_of(request_id)
        if not self.plan.keeps_streams or target is None or owner is None or track is None or self.state is None:
            return False
        now, window_s = self.kernel.now + SLACK_S, self.window_s
        if not target.listens or now - target.started_at < _LEFT_S:
            return False
        if owner is target:
            return track.must_exist(now, window_s)
        if owner.loop.is_dead:
            left_s = self.died_at[owner] + window_s - now
            return left_s > _LEFT_S and track.cancelled_at is None and self.state.has(NOBODY, track.request_id)
        return now - track.owned_at > _MIRRORED_S and track.must_exist(now, window_s)

    # The run.

    def run(self) -> Outcome:
        """Run the plan to its end.

        Raises:
            Stuck: time stands still.
        """
        with self._clocks(), self._log():
            self._begin()
            try:
                self._run()
                trace_hash = self.kernel.trace_hash
                self._stop()
            finally:
                self._bury()
        self.counts["streams that met a fault"] = sum(map(self._has_met_fault, self.histories))
        self.counts["frames of old epochs"] = self.inside.epochs.stale_frames
        self._explain_quarantines()
        violations = self.inside.violations + checker.check(self.histories, self._rules())
        return Outcome(
            self.plan.seed,
            violations,
            self.histories,
            trace_hash,
            self.counts,
            tuple(self.kernel.lines),
            max((_silence_s(each) for each in self.histories), default=0.0),
        )

    def _explain_quarantines(self) -> None:
        looked_poisonous = self.inside.looked_poisonous(settings_of(self.plan, "router").quarantine_after)
        for history in self.histories:
            if history.subject in looked_poisonous:
                history.explained.add(ErrorCode.REQUEST_QUARANTINED)

    def _has_met_fault(self, history: History) -> bool:
        """Whether its stream had several attempts, its connection broke, or an error ended it that its client has not
        asked for.
        """
        subject, choice = history.subject, history.name.rpartition(".")[2]
        if history.name in self.broken or not self.inside.moved.isdisjoint((history.name, f"{subject}.{choice}")):
            return True
        last = history.events[-1] if history.events else None
        if last is None or last.kind not in (Kind.ERROR, Kind.BROKEN):
            return False
        return last.value not in (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED)

    def _begin(self) -> None:
        for index in range(len(self.plan.workers)):
            self.start_worker(index)
        for index in range(self.plan.routers):
            self.start_router(index)
        for request in self.plan.requests:
            self.kernel.at(request.at, lambda request=request: self._start(request, 0))  # type: ignore[misc]
        for fault in self.plan.faults:
            self.kernel.at(fault.at, lambda fault=fault: injector.inject(self, fault))  # type: ignore[misc]
        self.kernel.after(_AUDIT_EVERY_S, self._audit)

    def _run(self) -> None:
        self.kernel.run_until(lambda: not self._open, self.plan.window_s + _SETTLE_S)
        calm_at = max((fault.at + fault.seconds for fault in self.plan.faults), default=0.0)
        # Streams that were left run on for a window, and their answers are kept for another one.
        calm_s = VANISHED_S + (2 if self.state is None else 4) * self.window_s + _IDLE_S
        self.kernel.run_for(max(0.0, calm_at - self.kernel.now) + calm_s)
        # A worker learns of the end of a half-open connection by its keepalive.
        self.kernel.run_until(self._is_idle, self.kernel.now + KEEPALIVE_S)
        self.inside.check_idle()
        self.on_idle()

    @contextmanager
    def _clocks(self) -> Iterator[None]:
        """Let `time.time` give what the wall clock of the running process's machine shows, and let work take no time:
        how long routers work on a body decides when they begin the next one, and real times differ in each run.
        """
        wall, thread, performance = time.time, time.thread_time, time.perf_counter

        def show_wall() -> float:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return wall()
            offset_s = loop.wall_offset_s if isinstance(loop, ProcessLoop) else 0.0
            return _BASE_NS / 1e9 + self.kernel.now + offset_s

        time.time = show_wall
        time.thread_time = lambda: 0.0
        time.perf_counter = lambda: self.kernel.now
        try:
            yield
        finally:
            time.time, time.thread_time, time.perf_counter = wall, thread, performance

    @contextmanager
    def _log(self) -> Iterator[None]:
        """Report the exceptions that routers log. Their warnings about faults are dropped: they show nothing here."""
        logger, handler = logging.getLogger("lockstep"), _Exceptions(self.inside)
        level, propagates = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates

    def _audit(self) -> None:
        self.kernel.after(_AUDIT_EVERY_S, self._audit)
        self.inside.audit()

    def _is_idle(self) -> bool:
        return not any(worker.live for worker in (*self.workers, *self.old_workers) if worker.is_listening)

    def _note_end(self) -> None:
        self._open -= 1

    def _start(self, request: Request, tries: int) -> None:
        living = self.living_routers()
        if not living:
            self.kernel.after(0.2, lambda: self._start(request, tries))
            return
        # Most clients know which routers are ready.
        ready = [each for each in living if not each.is_leaving]
        candidates = ready if ready and request.lottery * 1e3 % 1 < 0.9 else living
        process = candidates[int(request.lottery * len(candidates))]
        self.kernel.trace("request", request.name, process.name)
        if request.visit is not None:
            visitor = Visitor(self, request, process.index, self._note_end)
            self.client_loop.spawn(visitor.run())
            return
        self._start_direct(request, tries, process)

    def _start_direct(self, request: Request, tries: int, process: RouterProcess) -> None:
        histories = open_histories(request, f"{request.name}#{tries}", self.kernel.now)
        self.histories += histories
        client = Client(self.kernel, request, histories, self._on_prepared, self._note_end)
        client.process = process
        process.clients.append(client)
        if process.is_leaving:
            client.explain(ErrorCode.DRAINING)

        def begin() -> None:
            if process.loop.is_dead:
                return
            if process.router is None or process.has_left:
                client.lose_connection()
                return
            client.task = asyncio.ensure_future(client.converse(process.router))
            # A task that is cancelled before its first step runs none of its code.
            client.task.add_done_callback(lambda _: client.leave())

        def leave() -> None:
            if client.task is not None:
                client.task.cancel()

        process.call(begin)
        if request.leaves_after_s is not None:
            self.kernel.after(request.leaves_after_s, lambda: process.call(leave))

    def open_readers(self, request: Request, suffix: str) -> list[History]:
        """The histories of one more reader of a resumable stream."""
        histories = open_histories(request, f"{request.name}{suffix}#0", self.kernel.now)
        visit = request.visit
        assert visit is not None
        patience_s = 2 * SILENCE_S + PATIENCE_S + (_REPEATS_S if visit.kind == "library" else 0.0)
        for history in histories:
            history.patience_s = patience_s
        self.histories += histories
        return histories

    # Streams.

    def _on_prepared(self, client: Client, prepared: Prepared) -> None:
        """Note the streams of a client that reads them without HTTP."""
        self._mutate(prepared)
        assert client.process is not None
        for journal, history in zip(prepared.journals, client.histories, strict=True):
            history.stream_id = journal.stream_id
            self._add(journal, history.name, history.expected, client.request, client.process, history)

    def on_prepared(self, process: RouterProcess, prepared: Prepared) -> None:
        """Note the streams of a request over HTTP."""
        request = self._by_seed.get(prepared.journals[0].sampling.seed)
        if request is None or request.visit is None:
            return
        self._mutate(prepared)
        for journal, history in zip(prepared.journals, open_histories(request, request.name, 0.0), strict=True):
            self._add(journal, history.name, history.expected, request, process, None)

    def on_continued(self, process: RouterProcess, prepared: Prepared) -> None:
        """Note that resumable streams which had failed go on. They keep their age, by the wall clock."""
        self._mutate(prepared)
        for journal in prepared.journals:
            self.inside.epochs.add(process.loop, journal)
            stream = self.inside.streams[journal.stream_id]
            if stream.process is not process:
                stream.process, stream.taken_at = process, self.kernel.now
            if self.state is not None:
                # What its clients have got before does not count: the state server may know less of it, its end too.
                stream.delivered, stream.finished_at = 0, None
            age_s = max(0.0, time.time() - stream.created)
            stream.arrived_at = self._arrival(process, journal) - age_s

    def _arrival(self, process: RouterProcess, journal: Journal) -> float:
        now = process.loop.time()
        return self.kernel.now - (now - (journal.arrived_at or now))

    def _add(
        self,
        journal: Journal,
        name: str,
        expected: Expected,
        request: Request,
        process: RouterProcess,
        history: History | None,
    ) -> None:
        arrived_at = self._arrival(process, journal)
        self.inside.epochs.add(process.loop, journal)
        self.inside.streams[journal.stream_id] = Streamed(
            name,
            journal.stream_id,
            expected,
            bool(request.stops),
            arrived_at,
            int(time.time()),
            process,
            request.name,
            history,
        )
        self.kernel.trace("stream", name, journal.stream_id)

    def stream_of(self, process: RouterProcess, request_id: str, index: int) -> Streamed | None:
        """A choice of a resumable stream."""
        track = process.tracks.by_id.get(request_id)
        return None if track is None else self.inside.streams.get(track.stream_ids[index])

    def _mutate(self, prepared: Prepared) -> None:
        if self.mutation.journal is not Journal:
            prepared.journals[:] = [self._mutated(each) for each in prepared.journals]

    def _mutated(self, journal: Journal) -> Journal:
        given = [each.name for each in fields(journal) if each.init]
        return self.mutation.journal(**{name: getattr(journal, name) for name in given})

    def kill_router(self, index: int) -> None:
        """End a router process at once. Its clients' connections break, and some clients ask again."""
        process = self.routers[index]
        assert process is not None
        self.routers[index] = None
        self.dead_routers.append(process)
        self.died_at[process] = self.kernel.now
        for track in process.tracks.by_id.values():
            if self.kernel.now - track.owned_at < _MIRRORED_S:
                self.excused.add(self.inside.streams[track.stream_ids[0]].subject)
        process.loop.kill()
        for connection in self.network.of(process.name):
            connection.end_by_router()
        for exchange in self.wire.of(index):
            exchange.die()
        for client in process.clients:
            if not client.is_done:
                client.lose_connection()
                if client.request.retries:
                    self._retry(client)

    def drain_router(self, index: int, *, then_s: float) -> None:
        """Let a router process drain and end, as on SIGTERM, and start the next one some time after that."""
        process = self.routers[index]
        assert process is not None
        for client in process.clients:
            client.explain(ErrorCode.DRAINING)

        def end() -> None:
            if self.routers[index] is not process:
                return
            self.kernel.trace("drained", process.name)
            self.routers[index] = None
            self.dead_routers.append(process)
            self.kernel.after(0.1, lambda: self.inside.check_left(process))
            self.kernel.after(then_s, lambda: self.start_router(index))

        process.on_end(end)
        process.drain()

    def on_drained(self, process: RouterProcess) -> None:
        """The drain is over: what has no end is cut off."""
        self.inside.check_drained(process)
        for client in process.clients:
            if not client.is_done:
                client.lose_connection()
                if client.task is not None:
                    client.task.cancel()
        for exchange in self.wire.of(process.index):
            exchange.cut_off()

    def _on_unfinished(self, exchange: Exchange) -> None:
        self.inside.report("broken off", exchange.subject, "its router ended the answer before its end")

    def _retry(self, client: Client) -> None:
        self._open += 1
        tries = int(client.histories[0].name.partition("#")[2].partition(".")[0]) + 1
        self.kernel.after(0.1, lambda: self._start(client.request, tries))

    def _stop(self) -> None:
        living = self.living_routers()
        for process in living:
            process.leave()
        if not self.kernel.run_until(lambda: all(each.has_left for each in living), self.kernel.now + 5):
            self.inside.report("leak", "router", "does not end")
        for process in living:
            self.inside.check_left(process)
        if self.client_loop.pending or self.client_loop.complaints:
            detail = f"{len(self.client_loop.pending)} tasks, {self.client_loop.complaints[:1]}"
            self.inside.report("leak", "clients", detail)

    def _bury(self) -> None:
        for process in (*self.living_routers(), *self.dead_routers):
            process.loop.bury()
        self.client_loop.bury()
        if self.state is not None:
            self.state.loop.bury()

    def _rules(self) -> Rules:
        settings = settings_of(self.plan, "router")
        frozen_s = max((each.loop.frozen_s for each in (*self.living_routers(), *self.dead_routers)), default=0.0)
        allowed = {ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.WORKER_LOST}
        if self.plan.has_sanctuary:
            allowed = set()
        return Rules(longest_silence(settings, self.plan) + frozen_s, 0.2 + frozen_s, frozenset(allowed))


def _told_after(window_s: float, plan: Plan) -> float:
    """A router learns it from its next write. A stream that has nothing new is written to keep it from expiring: after
    a third of its time to live, as seen by a task that looks every second.
    """
    if not plan.keeps_streams:
        return inf  # the state server may have forgotten who has it
    return 1.5 * window_s / 3 + 1.0 + _MIRRORED_S


def longest_silence(settings: RouterSettings, plan: Plan) -> float:
    """How long a stream may be silent, apart from the time that its router is frozen."""
    deadlines_s = (
        settings.heartbeat_timeout_s
        + settings.connect_timeout_s
        + settings.first_token_deadline_s
        + settings.inter_token_deadline_s
        + STEP_DEADLINE_S
        + _STEP_MARGIN_S
    )
    # A stream that has no worker, or no turn, gets an error after the longest wait. If it loses a worker that ran it,
    # the wait begins again, after the deadlines of that worker.
    return deadlines_s if plan.has_sanctuary else 2 * settings.max_queue_wait_s + deadlines_s


def _silence_s(history: History) -> float:
    times = [history.arrived_at, *(event.at for event in history.events)]
    longest = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    return longest - history.paused_s


def summarize(outcome: Outcome) -> Counter[str]:
    """Ends of streams by their kind, with the counts of the world."""
    ends: Counter[str] = Counter(outcome.counts)
    for history in outcome.histories:
        last = history.events[-1] if history.events else None
        ends[f"{last.kind} {last.value}" if last is not None and last.kind is not Kind.TEXT else "none"] += 1
    return ends
