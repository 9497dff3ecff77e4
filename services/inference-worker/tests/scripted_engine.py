"""An engine without a model: same interface and promises as the real one, but steps, faults and timing are scripted.

The token at position p of a request is a function of its prompt and p alone, so that a resumed stream can be compared
with an unbroken one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.prefix_keys import BLOCK_TOKENS, prefix_keys
from lockstep_engine import (
    EmbeddingInfo,
    EngineConfig,
    EngineState,
    EngineStatus,
    FinishReason,
    Logprobs,
    Output,
    Phase,
    PhaseChange,
    PrefixChanges,
    RankStatus,
    RankTimes,
    Request,
    TokenLogprob,
)
from lockstep_engine.config import WindowedLayers
from lockstep_engine.remote_store import RemoteStore
from lockstep_worker.engine import OnChange, OnOutputs, OnPhases

VOCAB_SIZE = 1000
CONTEXT_LENGTH = 256
TOTAL_BLOCKS = 64


def token_at(prompt_ids: Sequence[int], position: int) -> int:
    """The token that the scripted model gives at a position."""
    return (sum(prompt_ids) * 31 + position) % VOCAB_SIZE


def _logprobs(request: Request, position: int) -> tuple[Logprobs, ...]:
    """The token's own log probability and those of the next ids, if wanted."""
    wanted = request.sampling.logprobs
    if wanted is None:
        return ()
    token = token_at(request.prompt_ids, position)
    likely = tuple(TokenLogprob((token + n) % VOCAB_SIZE, -0.5 - n) for n in range(max(1, wanted)))
    return (Logprobs(likely[0], likely[:wanted]),)


@dataclass(frozen=True)
class ScriptedModel:
    path: Path
    name: str
    digest: str = "d" * 64
    architecture: str = "ScriptedForCausalLM"
    dtype: str = "float32"
    context_length: int = CONTEXT_LENGTH
    vocab_size: int = VOCAB_SIZE
    created: int = 1_700_000_000
    embedding: EmbeddingInfo | None = field(default_factory=lambda: EmbeddingInfo("mean", 4, (2,)))
    windowed: WindowedLayers | None = None


@dataclass
class Script:
    """How the engines made by it behave. It is an EngineFactory; `engine` is the last engine it made."""

    ready_at_once: bool = True
    """False: `start` waits for `finish_start`."""
    step_s: float | None = None
    """Steps come by themselves at this interval; by `step` alone when None."""
    construct_error: LockstepError | None = None
    start_error: LockstepError | None = None
    engine: "ScriptedEngine" = field(init=False)

    def __call__(
        self,
        config: EngineConfig,
        *,
        on_outputs: OnOutputs,
        on_change: OnChange,
        on_phases: OnPhases = lambda _: None,
        remote_store: RemoteStore | None = None,
    ) -> "ScriptedEngine":
        if self.construct_error is not None:
            raise self.construct_error
        self.engine = ScriptedEngine(self, config, on_outputs, on_change, on_phases)
        self.engine.remote_store = remote_store
        return self.engine


class ScriptedEngine:
    def __init__(
        self, script: Script, config: EngineConfig, on_outputs: OnOutputs, on_change: OnChange, on_phases: OnPhases
    ) -> None:
        self.model = ScriptedModel(path=Path(config.model), name=config.name or Path(config.model).name)
        self.config = config
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.submit_error: Exception | None = None
        self.close_error: Exception | None = None
        self.never_closes = False
        self.closed = False
        self._script = script
        self._on_outputs = on_outputs
        self._on_change = on_change
        self._on_phases = on_phases
        self.queue_wait = (0.0, 0.0)
        self.grammar_engine = ""
        self.step_deadline_s = 0.0
        self.remote_store: RemoteStore | None = None
        self.stored_prefixes_of: list[str] | None = None
        """The requests that ran when the prefix cache was to be stored."""
        self._state = EngineState.STARTING
        self._reason = ""
        self._epoch = 1
        self._steps = 0
        self.notes_prefixes = False
        self.log_levels: list[str] = []
        """Given to the ranks."""
        self.snapshots = 0
        """How often all blocks were listed."""
        self._cached: dict[int, None] = {}
        self._changes = PrefixChanges()
        self._may_start = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._script.start_error is not None:
            self._turn(EngineState.FAILED, self._script.start_error.message)
            raise self._script.start_error
        if not self._script.ready_at_once:
            await self._may_start.wait()
        self._turn(EngineState.READY)
        if self._script.step_s is not None:
            self._ticker = asyncio.create_task(self._tick(self._script.step_s))

    def finish_start(self) -> None:
        self._may_start.set()

    def submit(self, request: Request) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        assert request.id not in self.requests, "the engine never sees an id twice"
        assert all(0 <= token < VOCAB_SIZE for token in request.prompt_ids + request.emitted_ids)
        if len(request.emitted_ids) >= request.sampling.max_tokens:
            nothing_left = Output(request.id, len(request.emitted_ids), (), finish=FinishReason.LENGTH)
            asyncio.get_running_loop().call_soon(self._on_outputs, self._steps, [nothing_left])
            return
        self.requests[request.id] = request
        self.emitted[request.id] = len(request.emitted_ids)
        self.change_phase(request.id, Phase.RUNNING)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._forget(request_id)

    def status(self) -> EngineStatus:
        rank_state = {EngineState.STARTING: "starting", EngineState.READY: "ready"}.get(self._state, "dead")
        return EngineStatus(
            state=self._state,
            reason=self._reason,
            epoch=self._epoch,
            queued=0,
            running=len(self.requests),
            free_blocks=TOTAL_BLOCKS - len(self.requests),
            total_blocks=TOTAL_BLOCKS,
            tokens_per_s=12.5,
            steps=self._steps,
            ranks=tuple(
                RankStatus(
                    rank,
                    1000 * self._epoch + rank,
                    rank_state,
                    self._steps,
                    forward_s=0.5 * self._steps,
                    collective_s=0.125 * self._steps / (1 + rank),
                    device_bytes=4096,
                )
                for rank in range(self.config.tp)
            ),
            cold_blocks=16,
            free_cold_blocks=12,
            preemptions=3,
            prompt_tokens=100,
            cached_tokens=48,
            deterministic=True,
            device="cpu",
            dtype="float32",
            loading=0.5 if self._state is EngineState.STARTING else 1.0,
            driver_us=100.0,
            step_us=2000.0,
            collective_us=50.0,
            step_deadline_s=self.step_deadline_s,
            free_seqs=self.config.max_seqs - len(self.requests),
            queue_wait_s=self.queue_wait[0],
            queue_wait_per_request_s=self.queue_wait[1],
            grammar_engine=self.grammar_engine,
        )

    def rank_times(self) -> tuple[RankTimes, ...]:
        """Rank 0 is the slow one: it waits for nobody."""
        return tuple(
            RankTimes(self._steps, 0.01 * self._steps, 0.01 * self._steps, (0.001 + 0.005 * rank) * self._steps, 0.0)
            for rank in range(self.config.tp)
        )

    def note_prefixes(self, *, wanted: bool) -> None:
        self.notes_prefixes, self._changes = wanted, PrefixChanges()

    def take_prefix_changes(self) -> PrefixChanges:
        changes, self._changes = self._changes, PrefixChanges()
        return changes

    def newest_prefixes(self, limit: int) -> list[int]:
        self.snapshots += 1
        return list(self._cached)[:limit]

    def view_ranks(self) -> dict[str, object]:
        return {"state": str(self._state), "epoch": self._epoch, "ranks": []}

    def set_log_level(self, level: str) -> None:
        self.log_levels.append(level)

    async def profile(self, steps: int) -> list[bytes]:
        return [f"{rank} {steps}".encode() for rank in range(self.config.tp)]

    async def store_prefixes(self, timeout_s: float) -> bool:
        self.stored_prefixes_of = list(self.requests)
        return True

    async def close(self) -> None:
        self.closed = True
        if self.close_error is not None:
            raise self.close_error
        if self.never_closes:
            await asyncio.Event().wait()
        if self._ticker is not None:
            self._ticker.cancel()

    # -- the script ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One token for every request, finishing those that have their max_tokens."""
        outputs = []
        for request_id, request in list(self.requests.items()):
            if request.embeds:
                vector = np.array([len(request.prompt_ids), 1, 2, 3], dtype=np.float32)
                outputs.append(Output(request_id, 0, (), finish=FinishReason.STOP, embedding=vector))
                self._forget(request_id)
                continue
            position = self.emitted[request_id]
            done = position + 1 >= request.sampling.max_tokens
            outputs.append(
                Output(
                    request_id,
                    position,
                    (token_at(request.prompt_ids, position),),
                    logprobs=_logprobs(request, position),
                    finish=FinishReason.LENGTH if done else None,
                    cached_tokens=self._cache(request) if position == len(request.emitted_ids) else 0,
                )
            )
            self.emitted[request_id] += 1
            if done:
                self._forget(request_id)
        self.give(outputs)

    def give(self, outputs: list[Output]) -> None:
        """A step with just these outputs."""
        self._steps += 1
        self._on_outputs(self._steps, outputs)

    def change_prefixes(self, added: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
        """Gain and lose blocks of the prefix cache."""
        self._cached |= dict.fromkeys(added)
        for key in removed:
            self._cached.pop(key, None)
        if self.notes_prefixes:
            before = self._changes
            self._changes = PrefixChanges((*before.added, *added), (*before.removed, *removed), before.is_complete)

    def _cache(self, request: Request) -> int:
        """Cache a prompt; returns how many of its tokens were cached before."""
        keys = prefix_keys(request.tenant, request.prompt_ids, len(request.prompt_ids))
        found = next((count for count, key in enumerate(keys) if key not in self._cached), len(keys))
        self.change_prefixes(keys[found:])
        return BLOCK_TOKENS * found

    def lose_prefixes(self) -> None:
        """Begin again with an empty prefix cache."""
        self._cached.clear()
        self._changes = PrefixChanges(is_complete=False)

    def change_phase(self, request_id: str, phase: Phase) -> None:
        """Report that a request runs or waits, from the event loop, as the engine does."""
        asyncio.get_running_loop().call_soon(self._on_phases, [PhaseChange(request_id, phase)])

    def lose_ranks(self, reason: str = "rank 1 was killed by SIGKILL") -> None:
        """Lose a rank: every request fails, and the epoch rises."""
        error = LockstepError(ErrorCode.WORKER_LOST, reason)
        lost = [Output(request_id, self.emitted[request_id], (), error=error) for request_id in self.requests]
        self.requests.clear()
        self.lose_prefixes()
        self._turn(EngineState.RESTARTING, reason)
        self._on_outputs(self._steps, lost)
        self._epoch += 1
        self._steps = 0
        self._on_change()

    def restart(self) -> None:
        """Make the ranks ready again."""
        self._turn(EngineState.READY)

    def fail(self, reason: str) -> None:
        """Make the engine fail permanently."""
        self._turn(EngineState.FAILED, reason)

    def _turn(self, state: EngineState, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._on_change()

    def _forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.emitted.pop(request_id, None)

    async def _tick(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if self._state is EngineState.READY and self.requests:
                self.step()
