"""One simulation: the routers, workers, network, faults and clients of a plan, and the checks that look inside."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from random import Random

from lockstep_common.errors import ErrorCode
from lockstep_router.discovery import Report, WorkerAddress
from lockstep_router.generation.preparation import Prepared
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.streams.journal import Journal

from simulated import checker, injector
from simulated.checker import Rules, Violation
from simulated.clients import TENANT, Client, open_histories
from simulated.history import History, Kind
from simulated.kernel import Kernel, ProcessLoop
from simulated.network import KEEPALIVE_S, Network
from simulated.plan import Plan, Request, settings_of
from simulated.worker import STEP_DEADLINE_S, Live, Mischief, Worker

_SETTLE_S = 90.0
"""After the last fault and the last request: by then every stream must have ended."""

_IDLE_S = 3.0
"""After the last stream: by then routers and workers must hold nothing of any stream."""

_AUDIT_EVERY_S = 0.5

STOPS_WITHIN_S = 0.5
"""After a stream's end, or the begin of a later attempt: workers that can be reached must have stopped by then."""

_STEP_MARGIN_S = 2.0
"""Time that routers give a worker after its own deadline for a step."""

_BASE_NS = 1_700_000_000 * 10**9
"""Wall time at the beginning."""


@dataclass(frozen=True)
class Mutation:
    """A change of the product or of the transport that the checks must find. The default changes nothing."""

    journal: type[Journal] = Journal
    to_worker: Callable[[object], list[object]] = lambda frame: [frame]
    to_router: Callable[[object], list[object]] = lambda frame: [frame]
    router: type[Router] = Router
    settings: dict[str, object] = field(default_factory=dict)


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


class ScriptedDiscovery:
    """A discovery that reports what it is told."""

    def __init__(self, addresses: frozenset[WorkerAddress]) -> None:
        self.addresses = addresses
        self.report: Report | None = None

    async def run(self, report: Report) -> None:
        self.report = report
        report.update(self.addresses)
        await asyncio.Event().wait()

    def set(self, addresses: frozenset[WorkerAddress]) -> None:
        self.addresses = addresses
        if self.report is not None:
            self.report.update(addresses)


class RouterProcess:
    """One router process with its event loop."""

    def __init__(self, world: "World", index: int, life: int) -> None:
        self.index = index
        self.name = f"router-{index}"
        rng = Random(f"{world.plan.seed}/{self.name}/{life}")
        self.loop = ProcessLoop(world.kernel, self.name, clock_offset=float(rng.randrange(1, 1 << 20)))
        self.discovery = ScriptedDiscovery(world.addresses())
        self.router: Router | None = None
        self.clients: list[Client] = []
        self._leaving: asyncio.Event = asyncio.Event()
        self._serving = self.loop.spawn(self._serve(world, rng))

    async def _serve(self, world: "World", rng: Random) -> None:
        settings = settings_of(world.plan, self.name).model_copy(update=world.mutation.settings)
        dial = world.network.dial
        async with world.mutation.router(
            settings, self.discovery, lambda target, _: dial(self.loop, target), rng
        ) as router:
            self.router = router
            await self._leaving.wait()

    def call(self, action: Callable[[], object]) -> None:
        """Run something in the process."""
        self.loop.call_soon(action)

    def leave(self) -> None:
        self.loop.call_soon(self._leaving.set)

    @property
    def has_left(self) -> bool:
        return self._serving.done()


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
        self.wall_offset_ns = [0] * len(plan.workers)
        self.workers: list[Worker] = []
        self.old_workers: list[Worker] = []
        """Processes that have been replaced, some of which still run."""
        self.routers: list[RouterProcess | None] = [None] * plan.routers
        self.dead_routers: list[RouterProcess] = []
        self.histories: list[History] = []
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self.on_idle: Callable[[], object] = lambda: None
        """Called when every stream has ended and the routers still run."""
        self._starts: Counter[str] = Counter()
        self._streams: dict[str, History] = {}
        """By stream id."""
        self._newest: dict[str, tuple[int, float]] = {}
        """The newest attempt of each stream that any worker got, and when."""
        self._open = len(plan.requests)
        """Requests that have not ended, those that have not begun included."""

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
            on_submit=self._on_submit,
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
        """Tell every router the present set of workers."""
        for process in self.living_routers():
            process.call(lambda process=process: process.discovery.set(self.addresses()))  # type: ignore[misc]

    def living_routers(self) -> list[RouterProcess]:
        return [each for each in self.routers if each is not None]

    # The run.

    def run(self) -> Outcome:
        """Run the plan to its end.

        Raises:
            Stuck: time stands still.
        """
        for index in range(len(self.plan.workers)):
            self.start_worker(index)
        for index in range(self.plan.routers):
            self.start_router(index)
        for request in self.plan.requests:
            self.kernel.at(request.at, lambda request=request: self._start(request, 0))  # type: ignore[misc]
        for fault in self.plan.faults:
            self.kernel.at(fault.at, lambda fault=fault: injector.inject(self, fault))  # type: ignore[misc]
        self.kernel.after(_AUDIT_EVERY_S, self._audit)
        try:
            self.kernel.run_until(lambda: not self._open, self.plan.window_s + _SETTLE_S)
            calm_at = max((fault.at + fault.seconds for fault in self.plan.faults), default=0.0)
            self.kernel.run_for(max(0.0, calm_at - self.kernel.now) + _IDLE_S)
            # A worker learns of the end of a half-open connection by its keepalive.
            self.kernel.run_until(self._is_idle, self.kernel.now + KEEPALIVE_S)
            self._check_idle()
            self.on_idle()
            trace_hash = self.kernel.trace_hash
            self._stop()
        finally:
            self._bury()
        self.violations += checker.check(self.histories, self._rules())
        return Outcome(
            self.plan.seed,
            self.violations,
            self.histories,
            trace_hash,
            self.counts,
            tuple(self.kernel.lines),
            max((_silence_s(each) for each in self.histories), default=0.0),
        )

    def _note_end(self) -> None:
        self._open -= 1

    def _start(self, request: Request, tries: int) -> None:
        living = self.living_routers()
        if not living:
            self.kernel.after(0.2, lambda: self._start(request, tries))
            return
        process = living[int(request.lottery * len(living))]
        histories = open_histories(request, f"{request.name}#{tries}", self.kernel.now)
        for history in histories:
            history.router = process.name
        self.histories += histories
        client = Client(self.kernel, request, histories, self._on_prepared, self._note_end)
        process.clients.append(client)
        self.kernel.trace("request", request.name, process.name)
        task: list[asyncio.Task[None]] = []

        def begin() -> None:
            if process.loop.is_dead:
                return
            assert process.router is not None
            task.append(asyncio.ensure_future(client.converse(process.router)))
            # A task that is cancelled before its first step runs none of its code.
            task[0].add_done_callback(lambda _: client.leave())

        def leave() -> None:
            task[0].cancel()

        process.call(begin)
        if request.leaves_after_s is not None:
            self.kernel.after(request.leaves_after_s, lambda: process.call(leave))

    def _on_prepared(self, prepared: Prepared, histories: list[History]) -> None:
        if self.mutation.journal is not Journal:
            prepared.journals[:] = [self._mutated(each) for each in prepared.journals]
        for journal, history in zip(prepared.journals, histories, strict=True):
            history.stream_id = journal.stream_id
            self._streams[journal.stream_id] = history
            self.kernel.trace("stream", history.name, journal.stream_id)

    def _mutated(self, journal: Journal) -> Journal:
        given = [each.name for each in fields(journal) if each.init]
        return self.mutation.journal(**{name: getattr(journal, name) for name in given})

    def kill_router(self, index: int) -> None:
        """End a router process at once. Its clients' connections break, and some clients ask again."""
        process = self.routers[index]
        assert process is not None
        self.routers[index] = None
        self.dead_routers.append(process)
        process.loop.kill()
        for connection in self.network.of(process.name):
            connection.end_by_router()
        for client in process.clients:
            if not client.is_done:
                client.lose_connection()
                if client.request.retries:
                    self._retry(client)

    def _retry(self, client: Client) -> None:
        self._open += 1
        tries = int(client.histories[0].name.partition("#")[2].partition(".")[0]) + 1
        self.kernel.after(0.1, lambda: self._start(client.request, tries))

    # What must hold inside.

    def _report(self, kind: str, subject: str, detail: str) -> None:
        if not any((each.kind, each.subject) == (kind, subject) for each in self.violations):
            self.violations.append(Violation(kind, subject, detail, self.kernel.now))

    def _on_submit(self, live: Live, worker: Worker) -> None:
        submit, connection = live.submit, live.connection
        self.kernel.trace("submit", worker.worker_id, submit.stream_id, submit.attempt, len(submit.emitted_ids))
        self.counts["attempts"] += 1
        self.counts["resumed"] += submit.attempt > 1
        history = self._streams.get(submit.stream_id)
        if history is None:
            self._report("unknown stream", worker.worker_id, submit.stream_id)
            return
        newest, _ = self._newest.get(submit.stream_id, (0, 0.0))
        if submit.attempt > newest:
            self._newest[submit.stream_id] = (submit.attempt, self.kernel.now)
        emitted = tuple(submit.emitted_ids)
        if not history.has_stops and emitted != history.expected.ids[: len(emitted)]:
            self._report("wrong tokens", history.name, f"attempt {submit.attempt} continues other tokens")
        delivered = max((event.tokens for event in history.events), default=0)
        # A Submit may arrive after that of a later attempt.
        if len(emitted) < delivered and submit.attempt >= newest:
            self._report(
                "begins again", history.name, f"attempt {submit.attempt} has {len(emitted)} of {delivered} tokens"
            )
        hello_took_s = worker.connections[connection] - connection.hello_sent_at
        drift_s = abs(live.arrived_at - history.arrived_at)
        slack_s = hello_took_s + 0.1 + sum(each.loop.frozen_s for each in self.living_routers())
        if drift_s > slack_s:
            self._report("seniority", history.name, f"its arrival is {drift_s:.2f} s off on {worker.worker_id}")

    def _audit(self) -> None:
        """Find streams that workers compute for nobody."""
        self.kernel.after(_AUDIT_EVERY_S, self._audit)
        for worker in (*self.workers, *self.old_workers):
            if worker.is_listening and not worker.is_stopped:
                for live in worker.live.values():
                    self._audit_stream(worker, live)

    def _audit_stream(self, worker: Worker, live: Live) -> None:
        history, submit = self._streams[live.submit.stream_id], live.submit
        newest, newest_at = self._newest[submit.stream_id]
        unwanted_at = newest_at if submit.attempt < newest else history.ended_at
        if unwanted_at is None:
            return
        router = live.connection.router
        up = self.network.path(router, worker.target)
        process = self.routers[int(router.partition("-")[2])]
        is_frozen = process is not None and process.loop.is_frozen
        if up.is_cut or up.jitter_s > STOPS_WITHIN_S / 10 or is_frozen or not live.connection.can_reach_worker:
            return
        since = max(unwanted_at, up.healed_at, worker.thawed_at, process.loop.thawed_at if process is not None else 0.0)
        if self.kernel.now - since > STOPS_WITHIN_S:
            detail = f"{worker.worker_id} runs attempt {submit.attempt} of {submit.stream_id} for nobody"
            self._report("runs on", history.name, detail)

    def _is_idle(self) -> bool:
        return not any(worker.live for worker in (*self.workers, *self.old_workers) if worker.is_listening)

    def _check_idle(self) -> None:
        for process in self.living_routers():
            router, name = process.router, process.name
            assert router is not None
            counts = router.workers.suspects.counts
            held = {
                "requests": router.requests,
                "streams": router.streams,
                "attempts": sum(link.has_streams for link in router.workers.links),
                "suspected": counts["suspected"],
                "tried": counts["tried"],
                "tenant's streams": router.limits.streams_of(TENANT),
            }
            for what, number in held.items():
                if number:
                    self._report("leak", name, f"{number} {what} after the last stream")
            tasks = len(process.loop.pending)
            most = 3 + 3 * len(router.workers.links)
            if tasks > most:
                self._report("leak", name, f"{tasks} tasks with {len(router.workers.links)} links")
            for complaint in process.loop.complaints:
                self._report("exception", name, complaint)
        for worker in (*self.workers, *self.old_workers):
            if worker.is_listening and worker.live:
                self._report("leak", worker.worker_id, f"{len(worker.live)} streams after the last stream")

    def _stop(self) -> None:
        for process in self.living_routers():
            process.leave()
        if not self.kernel.run_until(lambda: all(each.has_left for each in self.living_routers()), self.kernel.now + 5):
            self._report("leak", "router", "does not end")
        for process in self.living_routers():
            if process.loop.pending:
                self._report("leak", process.name, f"{len(process.loop.pending)} tasks after its end")

    def _bury(self) -> None:
        for process in (*self.living_routers(), *self.dead_routers):
            process.loop.bury()

    def _rules(self) -> Rules:
        settings = settings_of(self.plan, "router")
        frozen_s = max((each.loop.frozen_s for each in (*self.living_routers(), *self.dead_routers)), default=0.0)
        allowed = {ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.WORKER_LOST}
        if self.plan.has_sanctuary:
            allowed = set()
        poisoned = frozenset(history.router for history in self.histories if history.is_poison)
        return Rules(longest_silence(settings, self.plan) + frozen_s, 0.2 + frozen_s, frozenset(allowed), poisoned)


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
