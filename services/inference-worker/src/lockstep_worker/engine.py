"""The interface of an engine: `lockstep_engine.AsyncEngine`, or in tests an engine with scripted timing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lockstep_engine import (
    EmbeddingInfo,
    EngineConfig,
    EngineStatus,
    Output,
    PhaseChange,
    PrefixChanges,
    RankTimes,
    Request,
)
from lockstep_engine.config import WindowedLayers
from lockstep_engine.remote_store import RemoteStore

OnOutputs = Callable[[int, list[Output]], None]
"""Called once for each step, with the step's number and its outputs."""

OnPhases = Callable[[list[PhaseChange]], None]
"""Called when requests begin to run or are preempted, and when a step has computed a part of a prompt."""

OnCompiled = Callable[[str, int, int], None]
"""Called with a request's id and when its compilation began and ended, in ns of the monotonic clock."""

OnChange = Callable[[], None]
"""Called when the engine's state or epoch has changed."""


class ModelLike(Protocol):
    """A checkpoint's description, known before its weights are loaded."""

    @property
    def path(self) -> Path: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def architecture(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def context_length(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def created(self) -> int: ...  # noqa: D102
    @property
    def embedding(self) -> EmbeddingInfo | None: ...  # noqa: D102
    @property
    def windowed(self) -> WindowedLayers | None: ...  # noqa: D102


class EngineLike(Protocol):
    """An engine in the event loop's thread: callbacks run there, and only `start` and `close` wait.

    The worker never calls it from within `OnOutputs`; from within `OnChange` it calls only `status`.
    """

    on_compiled: OnCompiled
    """Called when the grammar of a request was compiled."""

    @property
    def model(self) -> ModelLike:
        """The checkpoint that the engine serves."""

    async def start(self) -> None:
        """Return when the ranks are ready; raise LockstepError if they can never be."""

    def submit(self, request: Request) -> None:
        """Queue a request; raise LockstepError if it is refused."""

    def cancel(self, request_id: str) -> None:
        """Drop a request, if there is one with this id, and free its blocks; it gets no further outputs."""

    def status(self) -> EngineStatus:
        """The state of ranks, queue and blocks now."""

    def rank_times(self) -> Sequence[RankTimes]:
        """What each rank has done in this epoch so far."""

    def note_prefixes(self, *, wanted: bool) -> None:
        """Begin or stop to note what `take_prefix_changes` returns."""

    def take_prefix_changes(self) -> PrefixChanges:
        """What the prefix cache has gained and lost since the last call."""

    def newest_prefixes(self, limit: int) -> list[int]:
        """Keys of at most `limit` blocks of the prefix cache, those that are kept longest first."""

    def view_ranks(self) -> dict[str, Any]:
        """Where the ranks are, as JSON types. Any thread may call it."""

    def set_log_level(self, level: str) -> None:
        """Make the ranks log from this level on."""

    async def profile(self, steps: int) -> list[bytes]:
        """The ranks' profiles of the next steps, in the order of ranks; raise LockstepError if there are none."""

    async def store_prefixes(self, timeout_s: float) -> bool:
        """Have what the prefix cache has stored outside of the machine; False if there is no time for all of it."""

    async def close(self) -> None:
        """Stop the ranks, also if `start` was cancelled before it returned."""


class EngineFactory(Protocol):
    """Creates an engine. Raises LockstepError for a model, or a split of it over ranks, that cannot be served."""

    def __call__(  # noqa: D102
        self,
        config: EngineConfig,
        *,
        on_outputs: OnOutputs,
        on_change: OnChange,
        on_phases: OnPhases,
        remote_store: RemoteStore | None = None,
    ) -> EngineLike: ...
