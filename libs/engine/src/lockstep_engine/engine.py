"""The engine: schedule → plan → ranks → outputs. This is what services use; `offline.Engine` is for ten lines of
Python.

The loop is driven by events: a result arrives, a plan leaves at once, then the result's outputs are handed on while the
ranks compute. With overlap that plan is the one after the step which they have begun meanwhile, so that they never wait
for it. This process never imports torch.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.group import GroupSettings, RankGroup
from lockstep_engine.mailbox import MAX_IN_FLIGHT
from lockstep_engine.model_config import ModelInfo, inspect_model
from lockstep_engine.plan import PoolSizes, RankSpec, Ready, Result
from lockstep_engine.request import Output, Request
from lockstep_engine.scheduler import Limits, Scheduler, no_memory
from lockstep_engine.sizes import collectives_segment_bytes, message_sizes

logger = logging.getLogger("lockstep.engine")

_RATE_WINDOW_S = 5.0
_RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_MAX_STARTS = 2
"""Groups that may die before the first was ever ready; one more and the engine fails."""
_MAX_RESTARTS = 6
"""Losses without a ready group in between; one more and the engine fails, so that its pod starts anew."""


class EngineState(StrEnum):
    """What the engine can do now."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class RankStatus:
    """A rank, for people and metrics."""

    rank: int
    pid: int
    state: str
    """starting, ready or dead"""
    steps: int
    """Finished in this epoch."""


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of the engine."""

    state: EngineState
    reason: str
    epoch: int
    """One life of the rank group."""
    queued: int
    running: int
    free_blocks: int
    total_blocks: int
    """Of both pools."""
    tokens_per_s: float
    """Generated, over the last seconds."""
    steps: int
    ranks: tuple[RankStatus, ...]
    block_size: int
    deterministic: bool
    device: str
    dtype: str
    loading: float
    """Share of the weights read during a start, 0 to 1."""
    driver_us: float
    """Mean time before the last steps in which rank 0's device had nothing to do: it waited for this process, or for
    the messages between them."""
    step_us: float
    """Mean time of the last steps, from result to result."""
    collective_us: float
    """Mean time that rank 0 spent in collectives in the last steps: transfer, and waiting for the others."""
    cold_blocks: int = 0
    """Of all blocks, those that hold compressed KV."""
    compressed_blocks: int = 0
    """Blocks that were made cold in this epoch."""


class AsyncEngine:
    """The engine inside a running asyncio loop. Not thread-safe: everything is called in, and calls back from, that
    loop.

    Args:
        config: what to run.
        on_outputs: called once a step with its number and every request's output. When the ranks are lost it is
            called with an error output for every live request.
        on_change: called when `status().state` or the epoch has changed.
        on_progress: called when more of the weights has been read.

    Raises:
        LockstepError: the model cannot be served; one sentence says why.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_outputs: Callable[[int, list[Output]], None],
        on_change: Callable[[], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.model: ModelInfo = inspect_model(config)
        self._on_outputs = on_outputs
        self._on_change = on_change
        self._on_progress = on_progress
        self._limits = Limits(
            max_seqs=config.max_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_queue=config.max_queue,
            context_length=self.model.context_length,
            prefix_cache=config.prefix_cache,
            hot_window=config.hot_window,
            tenant_share=config.kv_tenant_share,
        )
        self._scheduler = Scheduler(self._limits, self.model.eos_ids, PoolSizes(0))
        self._group: RankGroup | None = None
        self._state = EngineState.STARTING
        self._reason = ""
        self._ready: Ready | None = None
        self._depth = 1
        self._steps = 0
        self._failures = 0
        self._started: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._emitted: deque[tuple[float, int]] = deque()
        self._timing = _Timing()
        self._closing = False

    async def start(self) -> None:
        """Spawn the ranks; return when they are ready.

        Raises:
            LockstepError: they cannot start, and trying again cannot help.
        """
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._group = RankGroup(_group_settings(self.config, self.model), self)
        self._restart = loop.create_task(self._run_epoch(0.0))
        await self._started

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            LockstepError: INVALID_REQUEST (naming the field), CONTEXT_LENGTH_EXCEEDED, RESOURCE_EXHAUSTED,
                OVERLOADED, or UNAVAILABLE while the ranks are not ready.
        """
        try:
            self._validate(request)
            if self._state is not EngineState.READY:
                raise LockstepError(ErrorCode.UNAVAILABLE, f"the engine is {self._state}", retry_after_s=1.0)
            only_output = self._scheduler.submit(request)
        except MemoryError:
            raise no_memory() from None
        try:
            if only_output is not None:
                asyncio.get_running_loop().call_soon(self._on_outputs, self._steps, [only_output])
            self._kick()
        except MemoryError:
            self._scheduler.cancel(request.id)
            raise no_memory() from None

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its blocks; it gets no further output. Unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    def status(self) -> EngineStatus:
        """How the engine is."""
        group = self._group
        steps = [] if group is None else group.steps
        ranks = (
            ()
            if group is None
            else tuple(RankStatus(each.rank, each.pid, each.state, steps[each.rank]) for each in group.ranks)
        )
        loaded = [] if group is None else [each.loading for each in group.ranks]
        total = sum(whole for _, whole in loaded)
        return EngineStatus(
            state=self._state,
            reason=self._reason,
            epoch=0 if group is None else group.epoch,
            queued=self._scheduler.queued,
            running=self._scheduler.running,
            free_blocks=self._scheduler.blocks.free,
            total_blocks=self._scheduler.blocks.total,
            cold_blocks=self._scheduler.blocks.cold.total,
            compressed_blocks=self._scheduler.blocks.compressed,
            tokens_per_s=self._rate(),
            steps=self._steps,
            ranks=ranks,
            block_size=BLOCK_SIZE,
            deterministic=self._ready is not None and self._ready.deterministic,
            device="" if self._ready is None else self._ready.device,
            dtype="" if self._ready is None else self._ready.dtype,
            loading=sum(done for done, _ in loaded) / total if total else 0.0,
            driver_us=self._timing.driver_us,
            step_us=self._timing.step_us,
            collective_us=self._timing.collective_us,
        )

    async def close(self) -> None:
        """Kill the ranks and wait for them. Requests that were running get no further output."""
        self._closing = True
        self._state, self._reason = EngineState.FAILED, "closed"
        self._settle(LockstepError(ErrorCode.CANCELLED, "the engine was closed while it started"))
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._group is not None:
            await self._group.stop()

    # What the rank group tells.

    def on_ready(self, blocks: PoolSizes, ready: Ready) -> None:
        """All ranks wait for plans."""
        self._scheduler.reset(blocks)
        self._ready = ready
        self._failures = 0
        overlap = ready.device.startswith("cuda") if self.config.overlap is None else self.config.overlap
        self._depth = MAX_IN_FLIGHT if overlap else 1
        self._steps = 0
        self._timing = _Timing()
        if self._group is not None:
            logger.info(
                "ranks are ready", extra={"epoch": self._group.epoch, "phases_s": self._group.ranks[0].phases_s}
            )
        self._enter(EngineState.READY, "")
        self._settle(None)

    def on_result(self, result: Result) -> None:
        """A step is done: plan another one, then hand on what this one gave."""
        self._steps += 1
        self._timing.result(result)
        outputs = self._scheduler.update(result)
        self._kick()
        if outputs:
            self._emitted.append((time.monotonic(), sum(len(each.ids) for each in outputs)))
            self._forget_old()
            self._on_outputs(self._steps, outputs)
            self._scheduler.delivered()

    def on_lost(self, reason: str) -> None:
        """Fail every request (another worker can go on with them) and start the next epoch."""
        if self._closing:
            return
        started = self._ready is not None
        if self._failures >= (_MAX_RESTARTS if started else _MAX_STARTS):
            self._fail_requests(reason)
            self.on_refused(LockstepError(ErrorCode.INTERNAL, f"the ranks do not stay up: {reason}"))
            return
        delay = _RESTART_DELAYS_S[min(self._failures, len(_RESTART_DELAYS_S) - 1)]
        self._failures += 1
        self._enter(EngineState.RESTARTING if started else EngineState.STARTING, reason)
        self._restart = asyncio.get_running_loop().create_task(self._run_epoch(delay))
        self._fail_requests(reason)

    def on_refused(self, error: LockstepError) -> None:
        """The ranks cannot start, now or later."""
        if self._group is not None and not self._closing:
            self._restart = asyncio.get_running_loop().create_task(self._group.kill())
        self._enter(EngineState.FAILED, error.message)
        self._settle(error)

    def on_progress(self) -> None:
        """A rank has read more of its weights."""
        self._on_progress()

    def _fail_requests(self, reason: str) -> None:
        """Every live request gets its last output: an error that says it can be continued elsewhere."""
        error = LockstepError(ErrorCode.WORKER_LOST, f"{self.config.label}: {reason}")
        lost = [Output(each, 0, (), error=error) for each in self._scheduler.clear()]
        if lost:
            self._on_outputs(self._steps, lost)

    async def _run_epoch(self, delay_s: float) -> None:
        assert self._group is not None
        try:
            await self._group.kill()
            if self._group.last_deaths:
                deaths = self._group.last_deaths
                logger.warning(
                    "rank group lost", extra={"epoch": self._group.epoch, "reason": self._reason, "ends": deaths}
                )
            if self._group.death:
                self._reason = f"{self._reason}: {self._group.death}"
            await asyncio.sleep(delay_s)
            await self._group.start()
        except (LockstepError, OSError, TimeoutError) as error:
            self.on_lost(f"ranks cannot be started: {str(error) or type(error).__name__}")
            return
        if self._state is EngineState.RESTARTING:
            self._on_change()  # the epoch is a new one

    def _settle(self, error: LockstepError | None) -> None:
        if self._started is not None and not self._started.done():
            if error is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(error)

    def _enter(self, state: EngineState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._on_change()

    def _kick(self) -> None:
        """Have as many steps in flight as may be, as far as there is something to do."""
        if self._state is not EngineState.READY:
            return
        assert self._group is not None
        try:
            while self._group.is_live and self._group.in_flight < self._depth:
                plan = self._scheduler.schedule()
                if plan is None:
                    break
                prefills = len(plan.token_ids) > len(plan.slots)
                if self._group.in_flight == 0:
                    self._timing.plan(plan.step)
                self._group.execute(plan, self.config.prefill_deadline_s if prefills else self.config.decode_deadline_s)
        except MemoryError:
            try:
                asyncio.get_running_loop().call_soon(self._go_on, self._scheduler.shed(self._group.in_flight))
            except MemoryError:
                self._group.give_up()
        if self._group.in_flight == 0:
            self._timing.idle()

    def _go_on(self, ended: list[Output]) -> None:
        """After a plan that there was no memory for. Not at once: a caller may not know its request yet."""
        if ended:
            self._on_outputs(self._steps, ended)
        self._kick()

    def _validate(self, request: Request) -> None:
        vocab, limit = self.model.vocab_size, self.model.context_length
        request.sampling.validate(vocab)
        if not request.prompt_ids:
            raise LockstepError(ErrorCode.INVALID_REQUEST, "prompt_ids must not be empty", field="prompt_ids")
        for field in ("prompt_ids", "emitted_ids"):
            ids = getattr(request, field)
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                raise LockstepError(
                    ErrorCode.INVALID_REQUEST, f"{field} holds an id outside the vocabulary of {vocab}", field=field
                )
        wanted = len(request.prompt_ids) + request.sampling.max_tokens
        if wanted > limit:
            raise LockstepError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is {request.sampling.max_tokens}: "
                f"{wanted} together, more than the context of {limit}",
                field="max_tokens",
            )

    def _rate(self) -> float:
        self._forget_old()
        return sum(count for _, count in self._emitted) / _RATE_WINDOW_S

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._emitted and now - self._emitted[0][0] > _RATE_WINDOW_S:
            self._emitted.popleft()


class _Timing:
    """Running means of a step's length and of what it waited for."""

    def __init__(self) -> None:
        self.step_us = 0.0
        self.driver_us = 0.0
        self.collective_us = 0.0
        self._idle = True
        self._first_step = 0
        """The first one after a time without work: what it waited for was a request."""
        self._last_ns = 0

    def plan(self, step: int) -> None:
        """A plan leaves while no step is in flight."""
        if self._idle:
            self._idle, self._first_step = False, step

    def result(self, result: Result) -> None:
        now = time.perf_counter_ns()
        if result.step > self._first_step:
            self.step_us = _follow(self.step_us, (now - self._last_ns) / 1000)
            self.driver_us = _follow(self.driver_us, result.waited_us)
        self._last_ns = now
        self.collective_us = _follow(self.collective_us, result.collective_us)

    def idle(self) -> None:
        self._idle = True


def _follow(mean: float, value: float) -> float:
    return mean + 0.05 * (value - mean) if mean else value


def _group_settings(config: EngineConfig, model: ModelInfo) -> GroupSettings:
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.tp)
    spec = RankSpec(
        rank=0,
        tp=config.tp,
        label=config.label,
        epoch=0,
        model=str(model.path),
        device=config.device,
        dtype=config.dtype,
        max_seqs=config.max_seqs,
        max_batch_tokens=config.max_batch_tokens,
        context_length=model.context_length,
        kv_memory_bytes=config.kv_memory_bytes,
        deterministic=config.deterministic,
        threads=threads,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        start_timeout_s=config.start_timeout_s,
        hot_window=config.hot_window,
        compressed_layers=list(config.kv_compressed_layers) or None,
        collectives=config.collectives,
        cuda_graphs=config.cuda_graphs,
    )
    plan_bytes, result_bytes = message_sizes(spec)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        # Asking the CUDA runtime would initialise it in the zygote, and a forked child could not use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if config.deterministic is not False:
        # Products whose rows have the same bits whatever their number: MKL's strict conditional numerical
        # reproducibility.
        environment["MKL_CBWR"] = os.environ.get("MKL_CBWR", "AUTO,STRICT")
    return GroupSettings(
        spec=spec,
        plan_bytes=plan_bytes,
        result_bytes=result_bytes,
        collectives_bytes=collectives_segment_bytes(config, spec),
        environment=environment,
    )
