"""What a policy knows about a stream and about the workers, and the interface of a policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_common.prefix_keys import prefix_keys

_MAX_BLOCKS = 256
"""Blocks of a prompt that are looked at, from its beginning, so that a long prompt costs the router little."""


class KnownBlocks(Protocol):
    """The blocks of prompts that a worker has in its prefix cache, as far as this router knows."""

    def known(self, keys: Sequence[int]) -> int:
        """How many of the blocks with these keys, from the first one on without a gap, the worker has."""


@dataclass(slots=True)
class RequestFacts:
    """A stream, as far as the choice of its worker depends on it.

    Not changed after construction; not frozen, for speed.
    """

    session: str
    """The identity whose streams should stay together."""
    stream_id: str = ""
    """Different for each stream. Policies without affinity break ties by it."""
    tenant: str = ""
    """Workers reuse KV blocks for the same tenant only."""
    prompt_ids: Sequence[int] = ()
    _prefix_keys: Sequence[int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def prefix_keys(self) -> Sequence[int]:
        """Keys of the first 256 whole blocks of the prompt, salted with the tenant. The last token is in none of them:
        it is always computed.
        """
        if self._prefix_keys is None:
            self._prefix_keys = prefix_keys(self.tenant, self.prompt_ids, _MAX_BLOCKS)
        return self._prefix_keys


@dataclass(slots=True)
class WorkerFacts:
    """A worker that could run the stream, as this router knows it now.

    Not changed after construction; not frozen, for speed.
    """

    worker_id: str
    life: tuple[str, int, int] = ("", 0, 0)
    """Target, incarnation and epoch. Whatever was cached in another life is gone."""
    queued: int = 0
    """Requests in its queue, of all routers, as it last reported."""
    running: int = 0
    """Requests in its batch, likewise."""
    sent: int = 0
    """Streams sent to it by this router that the report says nothing of. They may run or wait."""
    queue_wait_s: float = 0.0
    """Estimated wait of one more request in its queue."""
    capacity: int = 0
    """Its KV blocks, free or not; 0 if it has not reported them."""
    is_suspected: bool = False
    """Whether it may have died or hang: its heartbeats or its current step are late. Like `is_ejected` and `is_slow`,
    true of an offered worker only if there is no better one."""
    is_ejected: bool = False
    """Whether it has failed streams that other workers completed."""
    is_slow: bool = False
    """Whether it takes several times as long as the other workers of its model."""
    blocks: KnownBlocks | None = None
    """What it has in its prefix cache; None: nothing is known of it."""

    def known_blocks(self, keys: Sequence[int]) -> int:
        """How many of a prompt's first blocks it has, by their keys."""
        return 0 if self.blocks is None else self.blocks.known(keys)

    @property
    def requests(self) -> int:
        """Requests on the worker, as far as known."""
        return self.queued + self.running + self.sent


class Policy(ABC):
    """A way to choose workers. There is one object for each model."""

    uses_prefixes: bool = False
    """Whether it looks at `RequestFacts.prefix_keys` and `WorkerFacts.blocks`. Only then workers are asked for their
    blocks."""

    @property
    def notes_sent(self) -> bool:
        """Whether it has a `note_sent` of its own."""
        return type(self).note_sent is not Policy.note_sent

    @abstractmethod
    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The id of the worker for a stream.

        It changes no state: a stream that waits is asked about several times.

        Args:
            request: the stream.
            workers: those that may run it, at least one, in any order; all of one version of the model.
        """

    def note_sent(self, request: RequestFacts, worker: WorkerFacts) -> None:  # noqa: B027 - most policies have no state
        """Note that a stream was sent to a worker, which need not be the one that `choose` named."""
