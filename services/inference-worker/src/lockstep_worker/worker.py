"""Connects routers with the engine: passes streams in and outputs out, and publishes the worker's state.

It runs in the event loop's thread. It never waits for a router, so a slow router delays neither the engine nor another
router.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.telemetry import log_line
from lockstep_common.trace_context import parse_traceparent
from lockstep_common.tracing import Tracing
from lockstep_engine import EngineState, EngineStatus, Output, Phase, PhaseChange
from lockstep_engine.remote_store import RemoteStore

from lockstep_worker import metrics, translate
from lockstep_worker.attempt_ranks import AttemptRanks
from lockstep_worker.engine import EngineFactory, EngineLike
from lockstep_worker.notices import Notice, RankHistory
from lockstep_worker.prefix_reports import PrefixReporter
from lockstep_worker.rank_pace import RankPaces
from lockstep_worker.router_connection import RouterConnection
from lockstep_worker.sampling_defaults import load_sampling_defaults
from lockstep_worker.settings import WorkerSettings
from lockstep_worker.streams import LiveStream, StreamTable
from lockstep_worker.tokenizer import load_tokenizer
from lockstep_worker.traces import begin_attempt

logger = logging.getLogger("lockstep.worker")


_STORE_PREFIXES_S = 2.0
"""At the end of a drain, for KV blocks that other workers may want, if streams have taken all of its time."""


class Worker:
    """One engine and the routers it serves.

    The constructor raises LockstepError for a model, a tokenizer or a split that can never be served, before it has
    started anything.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine_factory: EngineFactory,
        notify: Callable[[Notice], None] = lambda _: None,
        tracing: Tracing | None = None,
        remote_store: RemoteStore | None = None,
    ) -> None:
        self._settings = settings
        self._incarnation = time.time_ns()
        self._pid = os.getpid()
        on_outputs = self._on_outputs if tracing is None else self._on_traced_outputs
        self.engine: EngineLike = engine_factory(
            settings.engine_config(),
            on_outputs=on_outputs,
            on_change=self.publish,
            on_phases=self._on_phases,
            remote_store=remote_store,
        )
        self._tracing = tracing
        if tracing is not None:
            self.engine.on_compiled = self._on_compiled
        self.tokenizer = load_tokenizer(self.engine.model.path)
        self._default_sampling = (
            load_sampling_defaults(self.engine.model.path)
            if settings.generation_config == "auto"
            else inference_pb2.Sampling()
        )
        self._routers: dict[int, RouterConnection] = {}
        self._connections = itertools.count(1)
        self._streams = StreamTable()
        self._meter = metrics.StatusMeter(self.engine.model.name)
        self._paces = RankPaces()
        metrics.VLLM_NAMES.model = self.engine.model.name if settings.vllm_metric_names else ""
        hot_window = settings.engine_config().hot_window_with(self.engine.model.windowed)
        self._prefixes = PrefixReporter(self.engine, settings.prefix_report_bytes_per_s, hot_window)
        status = self.engine.status()
        self._history = RankHistory(status, notify)
        self._state = status.state
        self._lost = worker_pb2.LostBatch()
        """What the ranks ran when they were last lost."""
        self._epoch = status.epoch
        self._hello = self._make_hello(status)
        self._starting = True
        self._draining = False
        self._ended = False
        self._no_routers = asyncio.Event()
        self._no_routers.set()
        self.failure: LockstepError | None = None
        """The reason if the engine will never be ready again."""
        self.failed = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when `ready` may have changed, and then replaced by a new event."""
        self._status = self._frame(status=self._make_status(status))

    @property
    def ready(self) -> bool:
        """Whether a Submit is accepted now."""
        return self._state is EngineState.READY and not self._draining and self.failure is None

    # -- the engine's life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the ranks; sets `failure` if they cannot start."""
        try:
            await self.engine.start()
        except LockstepError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the engine did not start")
            self.failure = LockstepError(ErrorCode.INTERNAL, f"the engine did not start: {error!r}")
        self._starting = False
        self.publish()

    async def beat(self) -> None:
        """Every `status_interval_s`, send the status to all routers, and news of the prefix cache to those that ask."""
        while True:
            self.publish()
            self._report_ended()
            for router, report in self._prefixes.reports(time.monotonic()):
                router.outbox.put(self._frame(prefix_report=report))
            await asyncio.sleep(self._settings.status_interval_s)

    async def drain(self) -> float:
        """Accept no new streams, give running ones `drain_timeout_s` to end, then reject the rest as `draining`.

        Returns:
            Seconds of `drain_timeout_s` that are left.
        """
        self._draining = True
        ends_at = time.monotonic() + self._settings.drain_timeout_s
        logger.info("draining", extra={"streams": len(self._streams)})
        self._history.drain(len(self._streams), self._settings.drain_timeout_s)
        self.publish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._streams.idle.wait()
        if not await self.engine.store_prefixes(max(_STORE_PREFIXES_S, ends_at - time.monotonic())):
            logger.info("not all KV blocks were offered to the state server")
        handed_over = tuple(self._streams)
        for stream in handed_over:
            self._end(stream, LockstepError(ErrorCode.DRAINING, "the worker is going down"))
        logger.info("drained", extra={"handed_over": len(handed_over)})
        return max(0.0, ends_at - time.monotonic())

    async def hang_up(self, timeout_s: float) -> None:
        """End all Serve RPCs once their waiting frames are sent, or after `timeout_s`."""
        self._ended = True
        self._report_ended()
        for router in self._routers.values():
            router.outbox.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._no_routers.wait()

    # -- routers -------------------------------------------------------------------------------------------------------

    def connect(self, router_id: str) -> RouterConnection:
        """Add a router; its first frames are Hello and Status.

        Raises:
            LockstepError: OVERLOADED if there are too many routers, UNAVAILABLE if the worker is shutting down.
        """
        if self._ended:
            raise LockstepError(ErrorCode.UNAVAILABLE, "the worker ends")
        if len(self._routers) >= self._settings.max_routers:
            raise LockstepError(
                ErrorCode.OVERLOADED, f"the worker serves max_routers = {self._settings.max_routers} routers already"
            )
        router = RouterConnection(next(self._connections), router_id, self._settings.outgoing_frames)
        self.publish()
        self._routers[router.number] = router
        self._no_routers.clear()
        router.outbox.put(self._frame(hello=self._hello))
        self._put_status(router)
        logger.info("router connected", extra={"router": router_id, "connection": router.number})
        return router

    def disconnect(self, router: RouterConnection) -> None:
        """Remove a router and cancel its streams."""
        streams = self._streams.of(router)
        for stream in streams:
            self._cancel(stream)
        self._prefixes.forget(router)
        if router.outbox.overflowed.is_set():
            metrics.OVERFLOWS.inc()
        del self._routers[router.number]
        if not self._routers:
            self._no_routers.set()
        logger.info(
            "router disconnected",
            extra={"router": router.router_id, "connection": router.number, "cancelled": len(streams)},
        )

    def submit(self, router: RouterConnection, submit: worker_pb2.Submit) -> None:
        """Submit a stream to the engine, or reject it with the reason."""
        metrics.SUBMITTED.inc()
        router.received += 1
        try:
            self._admit(router, submit)
        except LockstepError as error:
            self._reject(router, submit.stream_id, submit.attempt, error)
        except Exception:
            logger.exception("submit failed", extra={"router": router.router_id})
            internal = LockstepError(ErrorCode.INTERNAL, "the worker could not take the request")
            self._reject(router, submit.stream_id, submit.attempt, internal)

    def cancel(self, router: RouterConnection, cancel: worker_pb2.Cancel) -> None:
        """Stop a stream without an answer. An unknown stream is ignored: it has just ended."""
        stream = self._streams.find(router, cancel.stream_id)
        if stream is not None and stream.attempt == cancel.attempt:
            self._cancel(stream)

    def watch_prefixes(self, router: RouterConnection, watch: worker_pb2.PrefixWatch) -> None:
        """Report to a router what the prefix cache holds, from its next heartbeat on."""
        self._prefixes.watch(router, watch.max_blocks)

    def _admit(self, router: RouterConnection, submit: worker_pb2.Submit) -> None:
        translate.check_attempt(submit)
        self._supersede(router, submit)
        trace = parse_traceparent(submit.traceparent)
        ranks = AttemptRanks(self.engine.rank_times)
        stream = LiveStream(router, submit.stream_id, submit.attempt, ranks, trace, submit.handle, submit.suspicion)
        stream.client_request_id = translate.client_request_id(submit)
        request = translate.engine_request(submit, stream.request_id, self.engine.model, router.greeted_at)
        if self._draining:
            raise LockstepError(ErrorCode.DRAINING, "the worker is going down")
        if not self.ready:
            raise LockstepError(ErrorCode.UNAVAILABLE, f"the worker's ranks are not ready ({self._state})")
        stream.spans = begin_attempt(self._tracing, trace, submit.tracestate, self.engine.rank_times)
        with nullcontext() if stream.spans is None else stream.spans.submitting():
            self.engine.submit(request)
        if submit.deadline_s > 0:
            stream.deadline = asyncio.get_running_loop().call_later(submit.deadline_s, self._expire, stream)
        self._streams.add(stream)
        # Lines of every stream are for the debug level; those of a request that moved are always there.
        self._log("stream begins", stream, logging.INFO if submit.attempt > 1 else logging.DEBUG)

    def _supersede(self, router: RouterConnection, submit: worker_pb2.Submit) -> None:
        """Cancel the live attempt of the stream, without an answer, if this one is later.

        Raises:
            LockstepError: INVALID_REQUEST, the attempt is older; or it is the live one again, which ends both.
        """
        live = self._streams.find(router, submit.stream_id)
        if live is None:
            return
        if submit.attempt < live.attempt:
            raise invalid("attempt", f"is older than the live attempt {live.attempt}")
        self._cancel(live)
        if submit.attempt == live.attempt:
            raise invalid("attempt", f"{live.attempt} was submitted twice")

    # -- the ends of streams -------------------------------------------------------------------------------------------

    def _cancel(self, stream: LiveStream, failure: LockstepError | None = None) -> None:
        if stream.spans is not None:
            stream.spans.end(failure, is_cancelled=failure is None)
        self._remove(stream)
        self.engine.cancel(stream.request_id)
        self._log("stream cancelled", stream)

    def _remove(self, stream: LiveStream) -> None:
        self._streams.remove(stream)
        stream.ranks.wait()
        stream.router.ended.append(stream.ranks.message(stream.stream_id, stream.attempt))

    def _expire(self, stream: LiveStream) -> None:
        self._end(stream, LockstepError(ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed", field="deadline_s"))

    def _end(self, stream: LiveStream, error: LockstepError) -> None:
        self._log("attempt failed", stream, logging.INFO, code=error.code)
        self._cancel(stream, error)
        self._reject(stream.router, stream.stream_id, stream.attempt, error)

    def _reject(self, router: RouterConnection, stream_id: str, attempt: int, error: LockstepError) -> None:
        metrics.REJECTED.labels(error.code).inc()
        router.outbox.put(self._frame(rejected=translate.rejected(stream_id, attempt, error)))

    def _log(self, message: str, stream: LiveStream, level: int = logging.DEBUG, **more: str | int) -> None:
        if logger.isEnabledFor(level):
            log_line(logger, level, message, stream.log_fields() | {"epoch": self._epoch} | more)

    # -- the engine's callbacks ----------------------------------------------------------------------------------------

    def _on_outputs(self, _step: int, outputs: list[Output]) -> None:
        batches: dict[RouterConnection, worker_pb2.Tokens] = {}
        ended: list[tuple[LiveStream, LockstepError | None]] = []
        emitted = 0
        for output in outputs:
            stream = self._streams.by_request(output.request_id)
            if stream is None:
                continue  # cancelled while the step ran
            if output.ids or output.finish:
                if (batch := batches.get(stream.router)) is None:
                    batch = batches[stream.router] = worker_pb2.Tokens()
                translate.add_tokens(batch, stream.stream_id, stream.attempt, stream.handle, output)
                emitted += len(output.ids)
                if stream.ranks.awaits_token or output.finish:
                    _note_times(stream, output)
            if output.finish or output.error:
                ended.append((stream, output.error))
        for router, batch in batches.items():
            router.outbox.put(self._frame(tokens=batch))
        # Not earlier: after an error above, the engine ends these streams once more, and then their routers learn it.
        for stream, error in ended:
            self._remove(stream)
            self._log("stream ends", stream)
            if error:
                self._log("attempt failed", stream, logging.INFO, code=error.code)
                self._reject(stream.router, stream.stream_id, stream.attempt, error)
        metrics.count_tokens(emitted)

    def _on_traced_outputs(self, step: int, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.by_request(output.request_id)
            if stream is not None and stream.spans is not None:
                stream.spans.on_output(output)
        self._on_outputs(step, outputs)

    def _on_phases(self, changes: list[PhaseChange]) -> None:
        batches: dict[RouterConnection, list[worker_pb2.StreamPhaseChange]] = {}
        for change in changes:
            stream = self._streams.by_request(change.request_id)
            if stream is not None:
                stream.is_running = change.phase is Phase.RUNNING
                if stream.spans is not None:
                    (stream.spans.on_running if stream.is_running else stream.spans.on_waiting)()
                (stream.ranks.run if stream.is_running else stream.ranks.wait)()
                if stream.is_running and stream.started_at is None:
                    metrics.note_start(stream)
                batch = batches.setdefault(stream.router, [])
                batch.append(translate.phase_change(stream.stream_id, stream.attempt, change.phase))
        for router, batch in batches.items():
            router.outbox.put(self._frame(phases=worker_pb2.Phases(streams=batch)))

    def _on_compiled(self, request_id: str, began_ns: int, ended_ns: int) -> None:
        stream = self._streams.by_request(request_id)
        if stream is not None and stream.spans is not None:
            stream.spans.on_compiled(began_ns, ended_ns)

    def publish(self) -> None:
        """Send the engine's status to every router, preceded by a Hello if the epoch or the model card has changed."""
        status = self.engine.status()
        self._history.observe(status)
        self._note_change(status)
        hello = self._make_hello(status)
        if status.epoch != self._epoch or hello != self._hello:
            self._epoch, self._hello = status.epoch, hello
            for router in self._routers.values():
                router.outbox.put(self._frame(hello=hello))
        self._status = self._frame(status=self._make_status(status))
        for router in self._routers.values():
            self._put_status(router)
        self._meter.observe(status, ready=self.ready, routers=len(self._routers), streams=len(self._streams))

    def _put_status(self, router: RouterConnection) -> None:
        """Send the worker's status, with what the router alone may know."""
        frame = worker_pb2.WorkerFrame()
        frame.CopyFrom(self._status)
        frame.status.received = router.received
        router.outbox.put_status(frame)

    def _report_ended(self) -> None:
        """Report to routers what the ranks did for attempts that have ended since the last heartbeat."""
        for router in self._routers.values():
            if router.ended:
                router.outbox.put(self._frame(ended_attempts=worker_pb2.EndedAttempts(attempts=router.ended)))
                router.ended.clear()

    def _note_change(self, status: EngineStatus) -> None:
        if status.state is not self._state:
            fields = {"state": str(status.state), "epoch": status.epoch, "reason": status.reason}
            logger.info("engine %s", status.state, extra=fields)
            if self._state is EngineState.READY:
                # The engine reports the loss of its ranks before it ends the requests.
                self._lost = translate.lost_batch(each.suspicion for each in self._streams if each.is_running)
        self._state = status.state
        # During the start, `start` reports failures: unlike the status it knows whether another start may help.
        if status.state is EngineState.FAILED and not self._starting and self.failure is None:
            self.failure = LockstepError(ErrorCode.UNAVAILABLE, status.reason or "the engine failed")
        if self.failure is not None and not self.failed.is_set():
            self.failed.set()
            self._history.fail(self.failure.message)
        self.changed.set()
        self.changed = asyncio.Event()

    # -- frames --------------------------------------------------------------------------------------------------------

    def _frame(
        self,
        *,
        hello: worker_pb2.Hello | None = None,
        tokens: worker_pb2.Tokens | None = None,
        status: worker_pb2.Status | None = None,
        rejected: worker_pb2.Rejected | None = None,
        phases: worker_pb2.Phases | None = None,
        prefix_report: worker_pb2.PrefixReport | None = None,
        ended_attempts: worker_pb2.EndedAttempts | None = None,
    ) -> worker_pb2.WorkerFrame:
        return worker_pb2.WorkerFrame(
            epoch=self._epoch,
            hello=hello,
            tokens=tokens,
            status=status,
            rejected=rejected,
            phases=phases,
            prefix_report=prefix_report,
            ended_attempts=ended_attempts,
        )

    def _make_hello(self, status: EngineStatus) -> worker_pb2.Hello:
        card = translate.model_card(self.engine.model, status, self._settings.tp, self.tokenizer.digest)
        card.default_sampling.CopyFrom(self._default_sampling)
        return worker_pb2.Hello(
            worker_id=self._settings.worker_id, incarnation=self._incarnation, model=card, accepts_several=True
        )

    def _make_status(self, status: EngineStatus) -> worker_pb2.Status:
        state, reason = translate.WORKER_STATES[status.state], status.reason
        if self.failure is not None:
            state, reason = worker_pb2.WORKER_STATE_FAILED, self.failure.message
        elif self._draining and status.state is not EngineState.RESTARTING:  # routers must hear that ranks were lost
            state = worker_pb2.WORKER_STATE_DRAINING
        elif status.state is EngineState.STARTING and not reason:
            reason = f"loading: {status.loading:.0%}"
        message = translate.status_message(status, state, reason, self._pid, self._paces.of(status, time.monotonic()))
        if status.state is EngineState.RESTARTING:
            message.lost.CopyFrom(self._lost)
        return message


def _note_times(stream: LiveStream, output: Output) -> None:
    """The first token since the stream began to run has come, or its end."""
    metrics.measure(stream, has_tokens=bool(output.ids), is_finished=bool(output.finish))
    if not output.finish:
        stream.ranks.note_token()
