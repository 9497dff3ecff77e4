"""What the worker asks of an engine: `lockstep_engine.AsyncEngine`, or in tests one with scripted timing."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lockstep_engine import EngineConfig, EngineStatus, Output, Request

OnOutputs = Callable[[int, list[Output]], None]
"""Called once a step with the step's number and what it gave."""

OnChange = Callable[[], None]
"""Called when the engine's state or epoch has changed."""


class ModelLike(Protocol):
    """A checkpoint, known before anything is loaded."""

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
    def eos_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def created(self) -> int: ...  # noqa: D102


class EngineLike(Protocol):
    """An engine in the event loop's thread: it calls back there, and nothing but `start` and `close` waits.

    The worker never calls it from within `OnOutputs`; from within `OnChange` it calls nothing but `status`.
    """

    @property
    def model(self) -> ModelLike:
        """The checkpoint it serves."""

    async def start(self) -> None:
        """Return when the ranks are ready; raise LockstepError when they can never be."""

    def submit(self, request: Request) -> None:
        """Queue a request; raise LockstepError when it cannot be taken."""

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is there, and free its blocks; it gets no further outputs."""

    def status(self) -> EngineStatus:
        """The state of ranks, queue and blocks now."""

    async def close(self) -> None:
        """End the ranks; also when `start` was cancelled half-way."""


class EngineFactory(Protocol):
    """How an engine is made: raises LockstepError for a model or a split that is impossible."""

    def __call__(self, config: EngineConfig, *, on_outputs: OnOutputs, on_change: OnChange) -> EngineLike: ...  # noqa: D102
