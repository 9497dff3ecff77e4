"""The engine: schedule → plan → ranks → outputs. Services use `AsyncEngine`; scripts use `offline.Engine`.

The loop is driven by events. When a result arrives, the next plan is sent at once, and only then are the outputs passed
on, while the ranks compute. With overlap the ranks have begun another step meanwhile, so that they never wait for a
plan. This process never imports torch.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from lockstep_common.cpu_limit import usable_cpus
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.memory_limit import usable_memory
from lockstep_common.protocol import PRIORITIES

from lockstep_engine import faults
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import EngineConfig
from lockstep_engine.constraint import Constraint, MaskThreads
from lockstep_engine.control import RankSpec, Ready
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.group import RUN_ZYGOTE, GroupSettings, RankGroup
from lockstep_engine.host_tier import HostUsage
from lockstep_engine.mailbox import MAX_IN_FLIGHT, RankTimes
from lockstep_engine.model_config import ModelInfo, inspect_model
from lockstep_engine.plan import Result, message_sizes
from lockstep_engine.prefix_log import PrefixChanges
from lockstep_engine.profile_collection import check_steps
from lockstep_engine.prompt_pace import PromptPace
from lockstep_engine.queue_estimate import QueueEstimate
from lockstep_engine.remote_store import RemoteStore
from lockstep_engine.remote_tier import RemoteTier, RemoteUsage
from lockstep_engine.request import Grammar, Output, Phase, PhaseChange, Request
from lockstep_engine.scheduler import Limits, Scheduler, no_memory
from lockstep_engine.sizes import check_host_memory, collectives_segment_bytes

logger = logging.getLogger("lockstep.engine")

_RATE_WINDOW_S = 5.0
_MASK_WAIT_S = 0.0005
"""Longest time that a plan waits for the masks of grammars. A stream whose mask is late is left to the next step, so
that this is all that grammars cost other streams."""
_MASKS_ALONE_WAIT_S = 0.005
"""The same while every stream has a grammar: more of them then share a step."""
_RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_MAX_STARTS = 2
"""How many groups may fail before one has become ready. After one more the engine fails."""
_MAX_RESTARTS = 6
"""How many groups in a row may fail without becoming ready. After one more the engine fails, so that its pod is
restarted."""


class EngineState(StrEnum):
    """Whether the engine takes requests, and whether it will."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class RankStatus:
    """A rank, for displays and metrics."""

    rank: int
    pid: int
    state: str
    """starting, ready or dead"""
    steps: int
    """Steps finished in this epoch."""
    forward_s: float = 0.0
    """Time of its device in the forward passes of these steps, collectives included."""
    collective_s: float = 0.0
    """The part of it in collectives: transfer, and waiting for slower ranks. On a GPU it is the host's time in the
    calls, without collectives that are recorded."""
    device_bytes: int = 0
    """Memory of its GPU that it has reserved; 0: it has none."""


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of the engine."""

    state: EngineState
    reason: str
    epoch: int
    """Number of the rank group's current life, from 1."""
    queued: int
    running: int
    free_blocks: int
    total_blocks: int
    """Blocks of both pools, hot and cold."""
    tokens_per_s: float
    """Rate of generated tokens over the last seconds."""
    steps: int
    ranks: tuple[RankStatus, ...]
    deterministic: bool
    device: str
    dtype: str
    loading: float
    """Share of the weights read during a start, 0 to 1."""
    driver_us: float
    """Mean time before a step in which rank 0's device was idle: it waited for this process or for messages."""
    step_us: float
    """Mean time from one result to the next."""
    collective_us: float
    """Mean time a step that rank 0 spends in collectives: transfer, and waiting for other ranks."""
    cold_blocks: int = 0
    """Blocks of the cold pool, which holds compressed KV."""
    compressed_blocks: int = 0
    """Blocks that have been compressed in this epoch."""
    host: HostUsage = field(default_factory=HostUsage)
    """The prefix cache's second tier, in host memory."""
    remote: RemoteUsage = field(default_factory=RemoteUsage)
    """Its third tier, outside of the machine."""
    fingerprint: str = ""
    """Fingerprint of the numerics (see `canary`): engines with equal fingerprints give equal tokens; empty: unknown."""
    step_deadline_s: float = 0.0
    """The ranks count as hung when the current step takes longer; 0: no step is in flight."""
    free_seqs: int = 0
    """Number of requests that could start now."""
    queue_wait_s: float = 0.0
    """Estimate: how long one more request would wait before it runs; 0 also if nothing was measured, not even by the
    ranks' self-test."""
    queue_waits_s: Mapping[int, float] = field(default_factory=dict)
    """The same estimate for requests of each priority."""
    queue_wait_per_request_s: float = 0.0
    """Estimate: what each further request adds to it."""
    free_cold_blocks: int = 0
    """Blocks of the cold pool that can be allocated."""
    preemptions: int = 0
    """Times that a running request had to wait again because blocks were missing, over all epochs."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all requests that have begun to run, over all epochs."""
    cached_tokens: int = 0
    """Those of them that were in the prefix cache."""
    grammar_engine: str = ""
    """Name and version of what computes the masks of grammars; empty: requests may have none."""


class AsyncEngine:
    """The engine inside a running asyncio loop. It is not thread-safe: call its methods in that loop; it calls back in
    that loop.

    Args:
        config: the engine's settings.
        on_outputs: called once a step with its number and the outputs of its requests. When the ranks are lost it is
            called with an error output for every unfinished request.
        on_change: called when `status().state` or the epoch has changed.
        on_phases: called when requests began to run or were preempted, and when a step computed a part of a prompt.
        on_progress: called when more of the weights has been read.
        zygote: code for `python -c` that runs the zygote (see `GroupSettings`).
        remote_store: the prefix cache's third tier, which needs `host_cache_bytes`; None: there is none.

    Raises:
        LockstepError: the model cannot be served; one sentence says why.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_outputs: Callable[[int, list[Output]], None],
        on_change: Callable[[], None],
        on_phases: Callable[[list[PhaseChange]], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
        zygote: str = RUN_ZYGOTE,
        remote_store: RemoteStore | None = None,
    ) -> None:
        if remote_store is not None and not config.host_cache_bytes:
            raise invalid("host_cache_bytes", "must be above 0 with a store for KV blocks: they come and go there")
        self.config = config
        self._zygote = zygote
        self.model: ModelInfo = inspect_model(config)
        self._on_outputs = on_outputs
        self._on_change = on_change
        self._on_phases = on_phases
        self._on_progress = on_progress
        self._limits = Limits(
            max_seqs=config.max_seqs,
            max_batch_tokens=config.step_tokens,
            max_queue=config.max_queue,
            context_length=self.model.context_length,
            prefix_cache=config.prefix_cache,
            hot_window=config.hot_window,
            tenant_share=config.kv_tenant_share,
            mean_pooling=self.model.embedding is not None and self.model.embedding.pooling == "mean",
        )
        self._scheduler = Scheduler(
            self._limits, self.model.eos_ids, PoolSizes(0), shares_slots=remote_store is not None
        )
        self._group: RankGroup | None = None
        self._state = EngineState.STARTING
        self._reason = ""
        self._ready: Ready | None = None
        self._depth = 1
        self._waits_for_masks = False
        self._steps = 0
        self._failures = 0
        self._started: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._emitted: deque[tuple[float, int]] = deque()
        self._timing = _Timing()
        self._queue = QueueEstimate()
        self._closing = False
        self._pace = PromptPace()
        self._turn_s: float | None = None
        """Estimate, in this turn of the loop: until the turn of one more request comes."""
        self._remote: RemoteTier | None = None
        if remote_store is not None:
            # With the name: models whose digests are equal by their samples of the weights have different ones.
            model = f"{self.model.name}/{self.model.digest}"
            self._remote = RemoteTier(remote_store, config, model, self._scheduler, self._prompt_s, self._on_remote)
        self._masks = MaskThreads(self._on_masks_in_thread)
        self._compiler = GrammarCompiler(self.model, self._masks)
        self.on_compiled: Callable[[str, int, int], None] = lambda *_: None
        """Called with a request's id when its grammar was compiled, and when that began and ended (monotonic ns)."""
        self._compiling: dict[str, asyncio.Task[None]] = {}
        """Requests whose grammar is being compiled, by id."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the ranks; return when they are ready.

        Raises:
            LockstepError: they cannot start, and another start would fail in the same way.
        """
        check_host_memory(self.config, usable_memory())
        self._loop = loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._group = RankGroup(self._group_settings(), self)
        self._restart = loop.create_task(self._run_epoch(0.0))
        await self._compiler.load()
        if self._compiler.name:
            self._report_change()
        await self._started

    def submit(self, request: Request) -> None:
        """Queue a request. One with a grammar is queued once that is compiled; a grammar that cannot be compiled is
        reported as the request's only output.

        Raises:
            LockstepError: INVALID_REQUEST (naming the field), CONTEXT_LENGTH_EXCEEDED, RESOURCE_EXHAUSTED,
                OVERLOADED, or UNAVAILABLE while the ranks are not ready.
        """
        try:
            self._validate(request)
            if self._state is not EngineState.READY:
                raise LockstepError(ErrorCode.UNAVAILABLE, f"the engine is {self._state}", retry_after_s=1.0)
            now = time.monotonic()
            arrived_at = now if request.arrived_at is None else min(request.arrived_at, now)
            if request.sampling.grammar is None or self._scheduler.is_complete(request):
                self._enqueue(request, arrived_at, None)
            else:
                self._compile(request, request.sampling.grammar, arrived_at)
        except MemoryError:
            raise no_memory() from None

    def _compile(self, request: Request, grammar: Grammar, arrived_at: float) -> None:
        """Compile a request's grammar, then queue the request."""
        self._compiler.check(grammar)
        if request.id in self._compiling:
            raise invalid("id", f"{request.id} is in use")

        began_ns = time.monotonic_ns()

        async def work() -> None:
            try:
                constraint = await self._compiler.compile(request)
                self.on_compiled(request.id, began_ns, time.monotonic_ns())
                del self._compiling[request.id]
                self._enqueue(request, arrived_at, constraint)
            except Exception as error:
                self._compiling.pop(request.id, None)
                failed = Output(request.id, len(request.emitted_ids), (), error=self._failure_of(error))
                self._guarded(self._pass_on_last, [failed])

        self._compiling[request.id] = asyncio.get_running_loop().create_task(work())

    def _failure_of(self, error: Exception) -> LockstepError:
        """The error of a request that could not be queued after its grammar was compiled."""
        if isinstance(error, LockstepError):
            return error
        if isinstance(error, (MemoryError, RuntimeError)):  # also: no thread can be started
            return no_memory()
        return LockstepError(ErrorCode.INTERNAL, faults.note(error, self._epoch))

    def _enqueue(self, request: Request, arrived_at: float, constraint: Constraint | None) -> None:
        """Pass a request on to the scheduler.

        Raises:
            LockstepError: the request is refused.
            MemoryError: there was none before the scheduler had it.
        """
        only_output = self._scheduler.submit(request, arrived_at, constraint)
        try:
            if only_output is None:
                if self._remote is not None:
                    self._remote.begin(request)
                sampling = request.sampling
                self._queue.add(
                    request.id,
                    len(request.emitted_ids),
                    sampling.max_tokens,
                    reaches_limit=sampling.ignore_eos,
                    embeds=request.embeds,
                    priority=request.priority,
                    prompt_tokens=len(request.prompt_ids) + len(request.emitted_ids),
                    arrived_at=arrived_at,
                )
            else:
                self._call_soon(self._pass_on_last, [only_output])
            self._fill_pipeline()
            # Not at once: the caller does not know yet that its request was accepted.
            self._call_soon(self._report_phases)
        except MemoryError:
            self.cancel(request.id)
            raise no_memory() from None
        except Exception:  # the caller takes it for refused
            self.cancel(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        """Remove a request and free its blocks; it gets no further output. Unknown ids are ignored."""
        task = self._compiling.pop(request_id, None)
        if task is not None:
            task.cancel()
        if self._remote is not None:
            self._remote.cancel(request_id)
        self._scheduler.cancel(request_id)
        self._queue.drop([request_id])

    def status(self) -> EngineStatus:
        """A snapshot of the engine's state."""
        group = self._group
        ranks = () if group is None else _rank_statuses(group)
        loaded = [] if group is None else [each.loading for each in group.ranks]
        total_bytes = sum(total for _, total in loaded)
        scheduler = self._scheduler
        now, places, is_full = time.monotonic(), scheduler.running + scheduler.free_seqs, not scheduler.free_seqs
        waits = {
            priority: self._queue.waits(places=places, is_full=is_full, now=now, priority=priority)
            for priority in PRIORITIES.values()
        }
        wait_s, wait_per_request_s = waits[0]
        return EngineStatus(
            state=self._state,
            reason=self._reason,
            epoch=self._epoch,
            queued=self._scheduler.queued + len(self._compiling),
            running=self._scheduler.running,
            free_blocks=self._scheduler.blocks.free,
            total_blocks=self._scheduler.blocks.total,
            cold_blocks=self._scheduler.blocks.cold.total,
            compressed_blocks=self._scheduler.blocks.compressed,
            host=self._scheduler.blocks.host.usage,
            remote=RemoteUsage() if self._remote is None else self._remote.usage,
            free_cold_blocks=self._scheduler.blocks.cold.free,
            preemptions=self._scheduler.preemptions,
            prompt_tokens=self._scheduler.prompt_tokens,
            cached_tokens=self._scheduler.cached_tokens,
            tokens_per_s=self._rate(),
            steps=self._steps,
            ranks=ranks,
            deterministic=self._ready is not None and self._ready.deterministic,
            fingerprint="" if self._ready is None or not self._ready.deterministic else self._ready.fingerprint,
            device="" if self._ready is None else self._ready.device,
            dtype="" if self._ready is None else self._ready.dtype,
            loading=sum(done for done, _ in loaded) / total_bytes if total_bytes else 0.0,
            driver_us=self._timing.driver_us,
            step_us=self._timing.step_us,
            collective_us=self._timing.collective_us,
            step_deadline_s=0.0 if group is None else group.step_deadline_s,
            free_seqs=scheduler.free_seqs,
            queue_wait_s=wait_s,
            queue_waits_s={priority: waited_s for priority, (waited_s, _) in waits.items()},
            queue_wait_per_request_s=wait_per_request_s,
            grammar_engine=self._compiler.name,
        )

    @property
    def _epoch(self) -> int:
        return 0 if self._group is None else self._group.epoch

    def rank_times(self) -> tuple[RankTimes, ...]:
        """What each rank has done in this epoch so far; empty before the first start."""
        return () if self._group is None else self._group.times

    def view_ranks(self) -> dict[str, Any]:
        """Where the ranks are, as JSON types, for people who look for a hang. Any thread may call; it takes 0.5 s at
        most.
        """
        group = self._group
        if group is None:
            return {"state": str(self._state), "ranks": []}
        since = group.step_since
        return {
            "state": str(self._state),
            "reason": self._reason,
            "epoch": group.epoch,
            "steps_in_flight": group.in_flight,
            "step_runs_s": round(time.monotonic() - since, 3) if since else 0.0,
            "step_deadline_s": group.step_deadline_s,
            "running": self._scheduler.running,
            "queued": self._scheduler.queued,
            "ranks": [asdict(view) for view in group.view()],
            "flight_records_of_last_hang": group.flight_records,
        }

    def set_log_level(self, level: str) -> None:
        """Make the ranks log from this level on."""
        if self._group is not None:
            self._group.set_log_level(level)

    async def profile(self, steps: int) -> list[bytes]:
        """The ranks' profiles of the next steps, in the order of ranks: each is a gzip of a line of JSON with the marks
        of steps and collectives, and of torch's trace. Steps go on meanwhile, a little slower.

        Raises:
            LockstepError: INVALID_REQUEST, naming `steps`; UNAVAILABLE: there is no profile; it says why.
        """
        check_steps(steps)
        if self._group is None or self._state is not EngineState.READY:
            raise LockstepError(ErrorCode.UNAVAILABLE, f"the engine is {self._state}; profile it when it is ready")
        return await self._group.profile(steps)

    def note_prefixes(self, *, wanted: bool) -> None:
        """Begin or stop to note what `take_prefix_changes` returns."""
        self._scheduler.note_prefixes(wanted=wanted)

    def take_prefix_changes(self) -> PrefixChanges:
        """What the prefix cache has gained and lost since the last call."""
        return self._scheduler.take_prefix_changes()

    def newest_prefixes(self, limit: int) -> list[int]:
        """Keys of at most `limit` blocks of the prefix cache, those that are kept longest first."""
        return self._scheduler.newest_prefixes(limit)

    async def store_prefixes(self, timeout_s: float) -> bool:
        """Have the KV blocks of running requests stored outside of the machine, and those of the prefix cache that have
        not been yet, for the workers that continue them. To be called while the engine still runs.

        Returns:
            Whether the store was offered all of them in time.
        """
        return self._remote is None or await self._remote.store_all(timeout_s)

    async def close(self) -> None:
        """Kill the ranks and wait for them. Requests that were running get no further output."""
        self._closing = True
        self._state, self._reason = EngineState.FAILED, "closed"
        self._finish_start(LockstepError(ErrorCode.CANCELLED, "the engine was closed while it started"))
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        for task in self._compiling.values():
            task.cancel()
        self._compiling.clear()
        if self._remote is not None:
            self._remote.close()
            await self._remote.wait_closed()
        self._compiler.close()
        self._masks.close()
        if self._group is not None:
            await self._group.stop()

    # Events of the rank group (see `group.Listener`).

    def on_ready(self, blocks: PoolSizes, ready: Ready) -> None:
        """All ranks wait for plans."""
        self._scheduler.reset(blocks)
        self._ready = ready
        self._depth = 1 if self.config.overlap is False else MAX_IN_FLIGHT
        # A stream with a grammar would take part in every second step. On a GPU that costs less than waiting does.
        self._waits_for_masks = self.config.overlap is None and ready.device == "cpu"
        self._steps = 0
        self._timing = _Timing()
        self._queue.calibrate(ready.step_s, ready.token_s)
        self._pace.begin(ready.step_s, ready.token_s)
        if self._remote is not None and self._group is not None:
            ranks = [each.ready for each in self._group.ranks if each.ready is not None]
            self._remote.open(ready, ranks, blocks.host, [memoryview(each) for each in self._group.host_memory])
        if self.model.quantization is not None:
            logger.info(
                "weights are quantized; products are computed in float",
                extra={"method": self.model.quantization.method, "remarks": list(self.model.quantization.remarks)},
            )
        if self._group is not None:
            logger.info(
                "ranks are ready",
                extra={
                    "epoch": self._group.epoch,
                    "threads": self._group.threads,
                    "phases_s": self._group.ranks[0].phases_s,
                },
            )
        self._failures = 0  # not earlier: an error above counts as a failed start
        self._enter(EngineState.READY, "")
        self._finish_start(None)

    def on_result(self, result: Result) -> None:
        """A step is done: plan another one, then pass on the outputs of this one. If anything of it raises an error,
        the group fails, and with it all requests: outputs may be lost, and it is unknown which.
        """
        self._steps += 1
        self._timing.result(result)
        self._pace.done(result.step, time.monotonic())
        if self._remote is not None:
            self._remote.on_step()
        self._masks.begin_step()
        outputs = self._scheduler.update(result)
        self._fill_pipeline()
        if outputs:
            self._emitted.append((time.monotonic(), sum(len(each.ids) for each in outputs)))
            self._drop_old_counts()
            self._note_outputs(outputs)
            self._on_outputs(self._steps, outputs)
            self._scheduler.delivered()
        self._report_phases()
        with contextlib.suppress(MemoryError):  # no reason to fail: the step is done
            self._check_when_idle()

    def on_lost(self, reason: str) -> None:
        """Fail every request, so that other workers can continue them, and start the next epoch."""
        if self._closing:
            return
        started = self._ready is not None
        if self._failures >= (_MAX_RESTARTS if started else _MAX_STARTS):
            self._fail_requests(reason)
            self.on_refused(LockstepError(ErrorCode.INTERNAL, f"the ranks do not stay up: {reason}"))
            return
        delay = _RESTART_DELAYS_S[min(self._failures, len(_RESTART_DELAYS_S) - 1)]
        # First, because the group calls again if this raises an error. Two restarts at once must not be.
        self._restart = asyncio.get_running_loop().create_task(self._run_epoch(delay))
        self._failures += 1
        self._enter(EngineState.RESTARTING if started else EngineState.STARTING, reason)
        self._fail_requests(reason)

    def on_refused(self, error: LockstepError) -> None:
        """The ranks cannot start; another start would fail in the same way."""
        if self._group is not None and not self._closing:
            self._restart = asyncio.get_running_loop().create_task(self._group.kill())
        self._enter(EngineState.FAILED, error.message)
        self._finish_start(error)

    def on_progress(self) -> None:
        """A rank has read more of its weights."""
        self._on_progress()

    def _check_when_idle(self) -> None:
        """Check the block pools when no request is left, at log level debug: the check takes time for each block."""
        if logger.isEnabledFor(logging.DEBUG) and not self._scheduler.request_ids:
            try:
                self._scheduler.blocks.check()
            except AssertionError:
                logger.exception("the block pools are inconsistent")

    def _report_phases(self) -> None:
        changes = self._scheduler.take_phases()
        now = time.monotonic()
        for change in changes:
            if change.phase is Phase.RUNNING:
                self._queue.start(change.request_id, now)
        if changes:
            self._on_phases(changes)

    def _note_outputs(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.error is not None:
                self._queue.drop([output.request_id])
            elif output.finish is not None:
                self._queue.end(output.request_id, output.position + len(output.ids), now)
            elif not self._queue.has_measured:
                self._queue.progress(output.request_id, output.position + len(output.ids), now)

    def _fail_requests(self, reason: str) -> None:
        """Give every unfinished request its last output: an error that says it can be continued elsewhere."""
        lost: list[Output] = []
        try:
            # First, because the scheduler may forget them before it fails.
            lost = self._lost([*self._scheduler.unended_ids, *self._compiling], reason)
            for task in self._compiling.values():
                task.cancel()
            self._compiling.clear()
            self._queue.clear()
            if self._remote is not None:
                self._remote.close()
            self._scheduler.clear()
        except Exception as error:  # requests that are left fail the next start, and then they end
            faults.note(error, self._epoch)
        if lost:
            self._pass_on_lost(lost)

    def _lost(self, request_ids: list[str], reason: str) -> list[Output]:
        error = LockstepError(ErrorCode.WORKER_LOST, f"{self.config.label}: {reason}")
        return [Output(each, 0, (), error=error) for each in request_ids]

    def _pass_on_last(self, outputs: list[Output]) -> None:
        """Pass on the last outputs of requests that the scheduler does not have: they are not among those that end with
        the group. If the caller fails on them, each gets an error that says it can be continued elsewhere.
        """
        try:
            self._on_outputs(self._steps, outputs)
        except Exception:
            self._pass_on_lost(self._lost([each.request_id for each in outputs], "the driver failed"))
            raise

    def _pass_on_lost(self, lost: list[Output]) -> None:
        """Pass on the last outputs of lost requests: each alone, if the caller fails on them together."""
        try:
            self._on_outputs(self._steps, lost)
        except Exception as error:
            faults.note(error, self._epoch)
            for output in lost:
                with contextlib.suppress(Exception):
                    self._on_outputs(self._steps, [output])

    async def _run_epoch(self, delay_s: float) -> None:
        assert self._group is not None
        try:
            await self._group.kill()
            if self._group.exits:
                exits = self._group.exits
                logger.warning(
                    "rank group lost", extra={"epoch": self._group.epoch, "reason": self._reason, "exits": exits}
                )
            if self._group.first_exit:
                self._reason = f"{self._reason}: {self._group.first_exit}"
            await asyncio.sleep(delay_s)
            await self._group.start()
        except (LockstepError, OSError, TimeoutError) as error:
            self.on_lost(f"the ranks cannot be started: {str(error) or type(error).__name__}")
            return
        except Exception as error:
            self.on_lost(f"the ranks cannot be started: {faults.note(error, self._epoch)}")
            return
        if self._state is EngineState.RESTARTING:
            self._report_change()  # because of the new epoch

    def _finish_start(self, error: LockstepError | None) -> None:
        if self._started is not None and not self._started.done():
            if error is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(error)

    def _enter(self, state: EngineState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._report_change()

    def _report_change(self) -> None:
        """Report the state to the caller, whose errors do not keep the engine from entering it."""
        try:
            self._on_change()
        except Exception as error:
            faults.note(error, self._epoch)

    def _call_soon(self, work: Callable[..., object], *arguments: object) -> None:
        """Have the loop call something; see `_guarded`."""
        asyncio.get_running_loop().call_soon(partial(self._guarded, work, *arguments))

    def _guarded(self, work: Callable[..., object], *arguments: object) -> None:
        """Call what has no caller that would learn of an error: the group fails then, as if `on_result` fails."""
        try:
            work(*arguments)
        except Exception as error:
            self._fail_for(error)

    def _fail_for(self, error: Exception) -> None:
        """An error has left the state of the driver inconsistent: lose the ranks and start over."""
        if self._group is not None and self._state is EngineState.READY:
            self._group.fail_for(error)
        else:  # the requests are lost already
            faults.note(error, self._epoch)

    def _fill_pipeline(self) -> None:
        """Send plans until as many steps are in flight as allowed, or there is nothing to compute.

        Raises:
            MemoryError: the scheduler's state is consistent. No other error is raised.
        """
        if self._state is not EngineState.READY:
            return
        try:
            self._plan_steps()
        except MemoryError:
            raise
        except Exception as error:
            self._fail_for(error)

    def _plan_steps(self) -> None:
        assert self._group is not None
        if not self._masks.is_settled:
            self._masks.settle(_MASK_WAIT_S if self._scheduler.unconstrained else _MASKS_ALONE_WAIT_S)
        try:
            while self._group.is_live and self._group.in_flight < self._depth:
                if self._group.in_flight and self._waits_for_masks and self._scheduler.constrained:
                    break
                plan = self._scheduler.schedule()
                if plan is None:
                    break
                if self._group.in_flight == 0:
                    self._timing.plan(plan.step)
                config, is_long = self.config, plan.has_prefill or plan.loads is not None
                sent_at = time.monotonic()
                self._group.execute(plan, config.prefill_deadline_s if is_long else config.decode_deadline_s)
                if plan.loads is None and len(plan.token_ids):  # copies from host memory would count as computing
                    self._pace.planned(plan.step, plan.prompt_tokens, sent_at)
        except MemoryError:
            try:
                self._call_soon(self._pass_on_ends, self._scheduler.shed(self._group.in_flight))
            except MemoryError as error:
                self._group.fail_for(error)
        if self._group.in_flight == 0:
            self._timing.idle()

    def _group_settings(self) -> GroupSettings:
        settings = group_settings(self.config, self.model, self._zygote)
        return settings if self._remote is None else replace(settings, host_bytes=self.config.host_cache_bytes)

    def _prompt_s(self, tokens: int) -> float:
        """Estimates the seconds until so many tokens of one more prompt would be computed. The part of it that does not
        depend on `tokens` takes time for each request, and is asked for dozens of times in a turn of the loop.
        """
        pace, step_tokens = self._pace, self.config.step_tokens
        if self._turn_s is None:
            scheduler = self._scheduler
            places, is_full = scheduler.running + scheduler.free_seqs, not scheduler.free_seqs
            wait_s, _ = self._queue.waits(places=places, is_full=is_full, now=time.monotonic())
            # Not their sum: the wait for a place includes the prompts of those that came first.
            self._turn_s = max(wait_s, pace.prompt_s(scheduler.backlog, step_tokens))
            asyncio.get_running_loop().call_soon(self._forget_turn)
        return self._turn_s + pace.prompt_s(tokens, step_tokens)

    def _forget_turn(self) -> None:
        self._turn_s = None

    def _on_remote(self) -> None:
        """A request need not wait for its blocks any more, or blocks are to be copied."""
        self._guarded(self._pass_on_ends, [])

    def _on_masks_in_thread(self) -> None:
        """Masks are ready that a plan did not wait for, or a constraint has failed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._guarded, self._on_masks)

    def _on_masks(self) -> None:
        if self._masks.has_failed:
            self._masks.has_failed = False
            self._pass_on_ends(self._scheduler.end_broken())
        else:
            self._fill_pipeline()
            self._report_phases()

    def _pass_on_ends(self, ended: list[Output]) -> None:
        """Pass on the last outputs of requests that the scheduler has ended, and continue. Called from the loop and not
        at once, because the caller of `submit` may not know of its request yet.
        """
        if ended:
            self._note_outputs(ended)
            self._pass_on_last(ended)
        self._fill_pipeline()
        self._report_phases()

    def _validate(self, request: Request) -> None:
        vocab, limit = self.model.vocab_size, self.model.context_length
        request.sampling.validate(vocab)
        if not request.prompt_ids:
            raise invalid("prompt_ids", "must not be empty")
        for name in ("prompt_ids", "emitted_ids"):
            ids = getattr(request, name)
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                raise invalid(name, f"holds an id outside the vocabulary of {vocab}")
        if request.embeds:
            self._validate_embedding(request)
            return
        wanted = len(request.prompt_ids) + request.sampling.max_tokens
        if wanted > limit:
            raise LockstepError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is {request.sampling.max_tokens}: "
                f"{wanted} together, more than the context of {limit}",
                field="max_tokens",
            )

    def _validate_embedding(self, request: Request) -> None:
        length, limit = len(request.prompt_ids), self.model.context_length
        if self.model.embedding is None:
            raise invalid("embed", f"is not supported: {self.model.name} gives no embeddings")
        if request.emitted_ids:
            raise invalid("emitted_ids", "must be empty: an embedding is not continued")
        if length > limit:
            sentence = f"the prompt has {length} tokens, more than the context of {limit}"
            raise LockstepError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, sentence, field="prompt_ids")

    def _rate(self) -> float:
        self._drop_old_counts()
        return sum(count for _, count in self._emitted) / _RATE_WINDOW_S

    def _drop_old_counts(self) -> None:
        now = time.monotonic()
        while self._emitted and now - self._emitted[0][0] > _RATE_WINDOW_S:
            self._emitted.popleft()


def _rank_statuses(group: RankGroup) -> tuple[RankStatus, ...]:
    times, device_bytes = group.times, group.device_bytes
    return tuple(
        RankStatus(
            each.rank,
            each.pid,
            each.state,
            times[each.rank].steps,
            forward_s=times[each.rank].forward_s,
            collective_s=times[each.rank].collective_s,
            device_bytes=device_bytes[each.rank],
        )
        for each in group.ranks
    )


class _Timing:
    """Running means of the time of a step and of the waits in it."""

    def __init__(self) -> None:
        self.step_us = 0.0
        self.driver_us = 0.0
        self.collective_us = 0.0
        self._idle = True
        self._first_step = 0
        """First step after an idle time. Its wait for a request is not counted."""
        self._last_ns = 0

    def plan(self, step: int) -> None:
        """A plan is sent while no step is in flight."""
        if self._idle:
            self._idle, self._first_step = False, step

    def result(self, result: Result) -> None:
        now = time.perf_counter_ns()
        if result.step > self._first_step:
            self.step_us = _moving_mean(self.step_us, (now - self._last_ns) / 1000)
            self.driver_us = _moving_mean(self.driver_us, result.waited_us)
        self._last_ns = now
        self.collective_us = _moving_mean(self.collective_us, result.collective_us)

    def idle(self) -> None:
        self._idle = True


def _moving_mean(mean: float, value: float) -> float:
    return mean + 0.05 * (value - mean) if mean else value


def rank_threads(cpus: float, tp: int) -> int:
    """CPU threads of each of `tp` ranks that share `cpus`. Rounded down: with more threads than its limit a container
    is stopped for a part of every period, and each step waits for the slowest thread.
    """
    return max(1, int(cpus / tp))


def group_settings(config: EngineConfig, model: ModelInfo, zygote: str = RUN_ZYGOTE) -> GroupSettings:
    """The settings of a rank group that serves a model; the model has been inspected."""
    threads = config.threads or rank_threads(usable_cpus(), config.tp)
    spec = RankSpec(rank=0, epoch=0, config=config, model=model, threads=threads)
    plan_bytes, result_bytes = message_sizes(spec)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # libgomp's threads otherwise wait for the next step in a loop that keeps their cores from the driver. This ends
        # after some ten microseconds; the threads of a step meet sooner than that.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "3000"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        # Its stderr is a pipe that drops what does not fit; a buffered one would raise an error then.
        "PYTHONUNBUFFERED": "1",
        # By default torch keeps 2,000 collectives: more than flight_record.MAX_RECORD_BYTES.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "256"),
        # Asking the CUDA runtime would initialise it in the zygote, and a forked child could not use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    return GroupSettings(
        spec=spec,
        plan_bytes=plan_bytes,
        result_bytes=result_bytes,
        collectives_bytes=collectives_segment_bytes(spec),
        environment=environment,
        zygote=zygote,
    )
