"""All workers: their links, the models they have shown, and a way to wait for a change."""

import asyncio
import logging
from collections import Counter

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.clock import AwakeClock
from lockstep_router.links import Link, LinkState
from lockstep_router.routing import choose
from lockstep_router.settings import RouterSettings
from lockstep_router.tokenizer import Tokenizer
from lockstep_router.tokenizer_cache import TokenizerCache

logger = logging.getLogger("lockstep.router")

_MAX_TICK_S = 0.05
_MAX_MODELS = 256


class Workers:
    """The workers of the static list."""

    def __init__(self, settings: RouterSettings) -> None:
        self.clock = AwakeClock(tick_s=min(_MAX_TICK_S, settings.heartbeat_timeout_s / 10))
        self.tokenizers = TokenizerCache()
        self.links = [
            Link(target, settings, self.clock, self.tokenizers, self._on_change) for target in settings.workers
        ]
        self.models: dict[str, worker_pb2.ModelCard] = {}
        """By name, also those whose workers are all away just now: their requests wait instead of being refused."""
        self.failovers = 0
        """Of all streams so far."""
        self._settings = settings
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Dial the workers and start the clock."""
        self._tasks = [asyncio.create_task(link.run()) for link in self.links]
        self._tasks.append(asyncio.create_task(self.clock.run(self._tick)))

    async def stop(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ready(self, model: str | None = None, digest: str | None = None) -> list[Link]:
        """The links whose workers take new streams, of one model if wanted."""
        return [
            link
            for link in self.links
            if link.state is LinkState.READY
            and link.card is not None
            and (model is None or link.card.name == model)
            and (digest is None or link.card.digest == digest)
        ]

    def pick(self, session: str, links: list[Link]) -> Link:
        """The link that a session's next stream goes to."""
        by_id = {link.worker_id: link for link in links}
        return by_id[choose(session, [link.load for link in links], self._settings.queue_threshold)]

    async def model(self, name: str, session: str) -> tuple[worker_pb2.ModelCard, Tokenizer]:
        """A model as the session's worker has it. Waits while no worker has shown any, or its tokenizer is on its way.

        Raises:
            LockstepError: MODEL_NOT_FOUND, or UNAVAILABLE when the wait was too long.
        """
        deadline = asyncio.get_running_loop().time() + self._settings.resume_deadline_s
        while True:
            card = self._find_card(name, session)
            if card is not None and (tokenizer := self.tokenizers.get(card.tokenizer_digest)) is not None:
                return card, tokenizer
            if not await self.wait_change(deadline):
                raise LockstepError(ErrorCode.UNAVAILABLE, "no worker has started yet", retry_after_s=5)

    def _find_card(self, name: str, session: str) -> worker_pb2.ModelCard | None:
        if not self.models:
            return None
        if ready := self.ready(name):
            return self.pick(session, ready).card
        if name in self.models:
            return self.models[name]
        raise LockstepError(ErrorCode.MODEL_NOT_FOUND, f"the model {name!r} does not exist", field="model")

    async def wait_change(self, until: float) -> bool:
        """Wait for any worker to change; False when the event loop's time `until` came first."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _on_change(self, link: Link) -> None:
        if link.card is not None and self.models.get(link.card.name) != link.card:
            self._remember(link.card)
        self._changed.set()
        self._changed = asyncio.Event()
        self._count_states()

    def _remember(self, card: worker_pb2.ModelCard) -> None:
        self.models.pop(card.name, None)
        self.models[card.name] = card
        if len(self.models) > _MAX_MODELS:
            del self.models[next(iter(self.models))]
        shown = [*self.models.values(), *(link.card for link in self.links if link.card is not None)]
        self.tokenizers.keep_only({card.tokenizer_digest for card in shown})

    def _count_states(self) -> None:
        counts = Counter(link.state for link in self.links)
        for state in LinkState:
            metrics.WORKERS.labels(state.value).set(counts[state])

    def _tick(self) -> None:
        for link in self.links:
            link.check()
