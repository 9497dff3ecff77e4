"""The engine: schedule → plan → ranks → outputs. Services use `AsyncEngine`; scripts use `offline.Engine`.

The loop is driven by events. When a result arrives, the next plan is sent at once, and only then are the outputs passed
on, while the ranks compute. With overlap the ranks have begun another step meanwhile, so that they never wait for a
plan. This process never imports torch.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.memory_limit import usable_memory

from lockstep_engine import faults
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.compilations import Compilations
from lockstep_engine.config import EngineConfig
from lockstep_engine.constraint import Constraint, MaskThreads
from lockstep_engine.control import Ready
from lockstep_engine.deliveries import Deliveries
from lockstep_engine.engine_status import EngineState, EngineStatus, rank_statuses
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.group import RankGroup
from lockstep_engine.group_lifecycle import GroupLifecycle
from lockstep_engine.group_settings import RUN_ZYGOTE, GroupSettings, group_settings
from lockstep_engine.limits import Limits
from lockstep_engine.mailbox import RankTimes
from lockstep_engine.model_config import ModelInfo, inspect_model
from lockstep_engine.pipeline import Pipeline
from lockstep_engine.plan import Result
from lockstep_engine.prefix_log import PrefixChanges
from lockstep_engine.profile_collection import check_steps
from lockstep_engine.remote_store import RemoteStore
from lockstep_engine.remote_tier import RemoteTier, RemoteUsage
from lockstep_engine.request import Output, PhaseChange, Request
from lockstep_engine.request_check import check_request
from lockstep_engine.scheduler import Scheduler, no_memory
from lockstep_engine.sizes import check_host_memory
from lockstep_engine.step_timing import TokenRate
from lockstep_engine.wait_estimates import WaitEstimates

logger = logging.getLogger("lockstep.engine")


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
        self._on_phases = on_phases
        self._on_progress = on_progress
        self._limits = Limits(
            max_seqs=config.max_seqs,
            max_batch_tokens=config.step_tokens,
            max_queue=config.max_queue,
            context_length=self.model.context_length,
            prefix_cache=config.prefix_cache,
            hot_window=config.hot_window_with(self.model.windowed),
            window=self.model.window,
            copies=self.model.windowed is not None and config.hot_window is None,
            tenant_share=config.kv_tenant_share,
            mean_pooling=self.model.embedding is not None and self.model.embedding.pooling == "mean",
        )
        self._scheduler = Scheduler(
            self._limits, self.model.eos_ids, PoolSizes(0), shares_slots=remote_store is not None
        )
        self._deliveries = Deliveries(on_outputs, config.label, lambda: self._epoch)
        self._lifecycle = GroupLifecycle(on_change, self._fail_requests)
        self._rate = TokenRate()
        self._waits = WaitEstimates(self._scheduler.sequences, config.step_tokens)
        self._remote: RemoteTier | None = None
        if remote_store is not None:
            # With the name: models whose digests are equal by their samples of the weights have different ones.
            model = f"{self.model.name}/{self.model.digest}"
            self._remote = RemoteTier(
                remote_store,
                config,
                model,
                self._scheduler,
                self._waits.prompt_s,
                self._on_remote,
                self.model.windowed,
            )
        self._masks = MaskThreads(self._on_masks_in_thread)
        self._pipeline = Pipeline(
            config, self._scheduler, self._lifecycle, self._masks, self._waits.pace, self._pass_on_ends
        )
        self._compiler = GrammarCompiler(self.model, self._masks)
        self.on_compiled: Callable[[str, int, int], None] = lambda *_: None
        """Called with a request's id when its grammar was compiled, and when that began and ended (monotonic ns)."""
        self._compilations = Compilations(self._compiler, self._note_compiled, self._enqueue, self._fail_uncompiled)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the ranks; return when they are ready.

        Raises:
            LockstepError: they cannot start, and another start would fail in the same way.
        """
        check_host_memory(self.config, usable_memory())
        self._loop = asyncio.get_running_loop()
        # Ready without a name of the compiler means that it takes no grammars: requests with one are refused for good.
        self._lifecycle.hold()
        started = self._lifecycle.start(RankGroup(self._group_settings(), self))
        await self._compiler.load()
        if self._compiler.name:
            self._lifecycle.report_change()
        self._lifecycle.release()
        await started

    def submit(self, request: Request) -> None:
        """Queue a request. One with a grammar is queued once that is compiled; a grammar that cannot be compiled is
        reported as the request's only output.

        Raises:
            LockstepError: INVALID_REQUEST (naming the field), CONTEXT_LENGTH_EXCEEDED, RESOURCE_EXHAUSTED,
                OVERLOADED, or UNAVAILABLE while the ranks are not ready.
        """
        try:
            check_request(request, self.model)
            if self._lifecycle.state is not EngineState.READY:
                raise LockstepError(ErrorCode.UNAVAILABLE, f"the engine is {self._lifecycle.state}", retry_after_s=1.0)
            now = time.monotonic()
            arrived_at = now if request.arrived_at is None else min(request.arrived_at, now)
            if request.sampling.grammar is None or self._scheduler.is_complete(request):
                self._enqueue(request, arrived_at, None)
            else:
                # They keep their prompts, so they need a bound of their own. Requests without a grammar do not count
                # them: a grammar that takes seconds to compile must not keep those out.
                self._scheduler.check_queue(len(self._compilations.request_ids))
                self._compilations.begin(request, request.sampling.grammar, arrived_at)
        except MemoryError:
            raise no_memory() from None

    def _note_compiled(self, request_id: str, began_ns: int, ended_ns: int) -> None:
        self.on_compiled(request_id, began_ns, ended_ns)

    def _fail_uncompiled(self, request: Request, error: Exception) -> None:
        """End a request that could not be queued, or whose grammar could not be compiled."""
        failed = Output(request.id, len(request.emitted_ids), (), error=self._failure_of(error))
        self._lifecycle.guarded(self._deliveries.pass_on_last, [failed])

    def _failure_of(self, error: Exception) -> LockstepError:
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
                self._waits.add(request, arrived_at)
            else:
                self._lifecycle.call_soon(self._deliveries.pass_on_last, [only_output])
            self._pipeline.fill()
            # Not at once: the caller does not know yet that its request was accepted.
            self._lifecycle.call_soon(self._report_phases)
        except MemoryError:
            self.cancel(request.id)
            raise no_memory() from None
        except Exception:  # the caller takes it for refused
            self.cancel(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        """Remove a request and free its blocks; it gets no further output. Unknown ids are ignored."""
        self._compilations.cancel(request_id)
        if self._remote is not None:
            self._remote.cancel(request_id)
        self._scheduler.cancel(request_id)
        self._waits.queue.drop([request_id])

    def status(self) -> EngineStatus:
        """A snapshot of the engine's state."""
        group, ready = self._lifecycle.group, self._lifecycle.ready
        sequences, blocks = self._scheduler.sequences, self._scheduler.blocks
        ranks = () if group is None else rank_statuses(group)
        loaded = [] if group is None else [each.loading for each in group.ranks]
        total_bytes = sum(total for _, total in loaded)
        waits = self._waits.waits()
        wait_s, wait_per_request_s = waits[0]
        return EngineStatus(
            state=self._lifecycle.state,
            reason=self._lifecycle.reason,
            epoch=self._epoch,
            queued=len(sequences.waiting) + len(self._compilations.request_ids),
            running=len(sequences.running),
            free_blocks=blocks.free,
            total_blocks=blocks.total,
            cold_blocks=blocks.cold.total,
            compressed_blocks=blocks.compressed,
            host=blocks.host.usage,
            remote=RemoteUsage() if self._remote is None else self._remote.usage,
            free_cold_blocks=blocks.cold.free,
            preemptions=sequences.preemptions,
            prompt_tokens=sequences.prompt_tokens,
            cached_tokens=sequences.cached_tokens,
            tokens_per_s=self._rate.per_s(),
            steps=self._deliveries.steps,
            ranks=ranks,
            deterministic=ready is not None and ready.deterministic,
            fingerprint="" if ready is None or not ready.deterministic else ready.fingerprint,
            device="" if ready is None else ready.device,
            dtype="" if ready is None else ready.dtype,
            loading=sum(done for done, _ in loaded) / total_bytes if total_bytes else 0.0,
            driver_us=self._pipeline.timing.driver_us,
            step_us=self._pipeline.timing.step_us,
            collective_us=self._pipeline.timing.collective_us,
            step_deadline_s=0.0 if group is None else group.step_deadline_s,
            free_seqs=sequences.free_seqs,
            queue_wait_s=wait_s,
            queue_waits_s={priority: waited_s for priority, (waited_s, _) in waits.items()},
            queue_wait_per_request_s=wait_per_request_s,
            grammar_engine=self._compiler.name,
        )

    @property
    def _epoch(self) -> int:
        return self._lifecycle.epoch

    def rank_times(self) -> tuple[RankTimes, ...]:
        """What each rank has done in this epoch so far; empty before the first start."""
        group = self._lifecycle.group
        return () if group is None else group.times

    def view_ranks(self) -> dict[str, Any]:
        """Where the ranks are, as JSON types, for people who search for the cause of a hang. Any thread may call; it
        takes 0.5 s at most.
        """
        group = self._lifecycle.group
        if group is None:
            return {"state": str(self._lifecycle.state), "ranks": []}
        since = group.step_since
        return {
            "state": str(self._lifecycle.state),
            "reason": self._lifecycle.reason,
            "epoch": group.epoch,
            "steps_in_flight": group.in_flight,
            "step_runs_s": round(time.monotonic() - since, 3) if since else 0.0,
            "step_deadline_s": group.step_deadline_s,
            "running": len(self._scheduler.sequences.running),
            "queued": len(self._scheduler.sequences.waiting),
            "ranks": [asdict(view) for view in group.view()],
            "flight_records_of_last_hang": group.flight_records,
        }

    def set_log_level(self, level: str) -> None:
        """Make the ranks log from this level on."""
        if self._lifecycle.group is not None:
            self._lifecycle.group.set_log_level(level)

    async def profile(self, steps: int) -> list[bytes]:
        """The ranks' profiles of the next steps, in the order of ranks: each is a gzip of a line of JSON with the marks
        of steps and collectives, and of torch's trace. Steps go on meanwhile, a little slower.

        Raises:
            LockstepError: INVALID_REQUEST, naming `steps`; UNAVAILABLE: there is no profile; it says why.
        """
        check_steps(steps)
        group, state = self._lifecycle.group, self._lifecycle.state
        if group is None or state is not EngineState.READY:
            raise LockstepError(ErrorCode.UNAVAILABLE, f"the engine is {state}; profile it when it is ready")
        return await group.profile(steps)

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
        await self._lifecycle.close()
        self._compilations.clear()
        if self._remote is not None:
            self._remote.close()
            await self._remote.wait_closed()
        self._compiler.close()
        self._masks.close()
        if self._lifecycle.group is not None:
            await self._lifecycle.group.stop()

    # Events of the rank group (see `group.Listener`).

    def on_ready(self, blocks: PoolSizes, ready: Ready) -> None:
        """All ranks wait for plans."""
        self._scheduler.reset(blocks)
        self._lifecycle.ready = ready
        self._pipeline.begin(ready.device)
        self._deliveries.steps = 0
        self._waits.calibrate(ready.step_s, ready.token_s)
        group = self._lifecycle.group
        if self._remote is not None and group is not None:
            ranks = [each.ready for each in group.ranks if each.ready is not None]
            self._remote.open(ready, ranks, blocks.host, [memoryview(each) for each in group.host_memory])
        if self.model.quantization is not None:
            logger.info(
                "weights are quantized",
                extra={"method": self.model.quantization.method, "remarks": list(self.model.quantization.remarks)},
            )
        if group is not None:
            extra = {
                "epoch": group.epoch,
                "threads": group.threads,
                "phases_s": group.phases_s | group.ranks[0].phases_s,
            }
            logger.info("ranks are ready", extra=extra)
        self._lifecycle.enter_ready()  # not earlier: an error above counts as a failed start

    def on_result(self, result: Result) -> None:
        """A step is done: plan another one, then pass on the outputs of this one. If anything of it raises an error,
        the group fails, and with it all requests: outputs may be lost, and it is unknown which.
        """
        self._report_phases()  # of requests submitted since the last report: before their first outputs
        self._deliveries.steps += 1
        self._pipeline.done(result)
        if self._remote is not None:
            self._remote.on_step()
        self._masks.begin_step()
        outputs = self._scheduler.update(result)
        self._pipeline.fill()
        if outputs:
            self._rate.add(sum(len(each.ids) for each in outputs))
            self._waits.note_outputs(outputs)
            self._deliveries.pass_on(outputs)
            self._scheduler.sequences.delivered()
        self._report_phases()
        with contextlib.suppress(MemoryError):  # no reason to fail: the step is done
            self._check_when_idle()

    def on_lost(self, reason: str) -> None:
        """Fail every request, so that other workers can continue them, and start the next epoch."""
        self._lifecycle.lose(reason)

    def on_refused(self, error: LockstepError) -> None:
        """The ranks cannot start; another start would fail in the same way."""
        self._lifecycle.refuse(error)

    def on_progress(self) -> None:
        """A rank has read more of its weights."""
        self._on_progress()

    def _check_when_idle(self) -> None:
        """Check the block pools when no request is left, at log level debug: the check takes time for each block."""
        if logger.isEnabledFor(logging.DEBUG) and not self._scheduler.sequences.by_id:
            try:
                self._scheduler.blocks.check()
            except AssertionError:
                logger.exception("the block pools are inconsistent")

    def _report_phases(self) -> None:
        changes = self._scheduler.sequences.take_phases()
        if changes:
            self._waits.note_phases(changes)
            self._on_phases(changes)

    def _fail_requests(self, reason: str) -> None:
        """Give every unfinished request its last output: an error that says it can be continued elsewhere."""
        lost: list[Output] = []
        try:
            # First, because the scheduler may forget them before it fails.
            lost = self._deliveries.lost(
                [*self._scheduler.sequences.unended_ids, *self._compilations.request_ids], reason
            )
            self._compilations.clear()
            self._waits.queue.clear()
            if self._remote is not None:
                self._remote.close()
            self._scheduler.clear()
        except Exception as error:  # requests that are left fail the next start, and then they end
            faults.note(error, self._epoch)
        if lost:
            self._deliveries.pass_on_lost(lost)

    def _group_settings(self) -> GroupSettings:
        settings = group_settings(self.config, self.model, self._zygote)
        return settings if self._remote is None else replace(settings, host_bytes=self.config.host_cache_bytes)

    def _on_remote(self) -> None:
        """A request need not wait for its blocks any more, or there are blocks to copy."""
        self._lifecycle.guarded(self._pass_on_ends, [])

    def _on_masks_in_thread(self) -> None:
        """Masks are ready that a plan did not wait for, or a constraint has failed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._lifecycle.guarded, self._on_masks)

    def _on_masks(self) -> None:
        if self._masks.has_failed:
            self._masks.has_failed = False
            self._pass_on_ends(self._scheduler.end_broken())
        else:
            self._pipeline.fill()
            self._report_phases()

    def _pass_on_ends(self, ended: list[Output]) -> None:
        """Pass on the last outputs of requests that the scheduler has ended, and continue. Called from the loop and not
        at once, because the caller of `submit` may not know of its request yet.
        """
        if ended:
            self._waits.note_outputs(ended)
            self._deliveries.pass_on_last(ended)
        self._pipeline.fill()
        self._report_phases()
