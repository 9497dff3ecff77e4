"""All workers: their links, the models they have shown, and a way to wait for a change."""

import asyncio
import logging
from collections import Counter

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.clock import AwakeClock
from lockstep_router.discovery import Discovery, Found, Report
from lockstep_router.links import Link, LinkState
from lockstep_router.routing import choose
from lockstep_router.settings import RouterSettings
from lockstep_router.tokenizer import Tokenizer
from lockstep_router.tokenizer_cache import TokenizerCache

logger = logging.getLogger("lockstep.router")

_MAX_TICK_S = 0.05
_MAX_MODELS = 256


class Workers:
    """The workers that discovery finds, as long as it does."""

    def __init__(self, settings: RouterSettings, discovery: Discovery) -> None:
        self.clock = AwakeClock(tick_s=min(_MAX_TICK_S, settings.heartbeat_timeout_s / 10))
        self.tokenizers = TokenizerCache()
        self.report = Report(self._on_found)
        self.models: dict[str, worker_pb2.ModelCard] = {}
        """By name, also those whose workers are all away just now: their requests wait instead of being refused."""
        self.failovers = 0
        """Of all streams so far."""
        self._settings = settings
        self._discovery = discovery
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Of links that hang up."""
        self._doubles: set[str] = set()
        """Ids that several workers have, as far as that has been said."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def links(self) -> tuple[Link, ...]:
        """All links, the retired ones too that still have streams."""
        return tuple(self._links)

    def start(self) -> None:
        """Look for workers and start the clock."""
        self._tasks = [
            asyncio.create_task(self._discovery.run(self.report)),
            asyncio.create_task(self.clock.run(self._tick)),
        ]

    async def stop(self) -> None:
        """Hang up."""
        tasks = [*self._tasks, *self._links.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_found(self, workers: frozenset[Found]) -> None:
        """Dial those that are new, retire those that have gone."""
        known = {link.found: link for link in self._links if not self._links[link].done()}
        for found, link in known.items():
            link.retired = found not in workers
        for found in sorted(workers - known.keys(), key=lambda found: found.target):
            if not any(link.adopt(found) for link in known.values()):
                link = Link(found, self._settings, self.clock, self.tokenizers, self._on_change)
                self._links[link] = asyncio.create_task(link.run())
        self._remove_retired()
        self._announce()

    def _remove_retired(self) -> None:
        for link in [link for link in self._links if link.retired and not link.has_streams]:
            task = self._links.pop(link)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def ready(self, model: str | None = None, digest: str | None = None) -> list[Link]:
        """The links whose workers take new streams, of one model if wanted: one link for each worker id."""
        newest: dict[str, Link] = {}
        for link in self._links:
            if link.state is LinkState.READY:
                other = newest.setdefault(link.worker_id, link)
                if link.incarnation > other.incarnation:
                    # A pod's successor has its name, and the pod may not know yet that it has been succeeded.
                    newest[link.worker_id] = link
        return [
            link
            for link in newest.values()
            if link.card is not None
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
        self._note_doubles()
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        counts = Counter(link.state for link in self._links)
        for state in LinkState:
            metrics.WORKERS.labels(state.value).set(counts[state])

    def _note_doubles(self) -> None:
        counts = Counter(
            worker_id
            for worker_id, _ in {
                (link.worker_id, link.incarnation) for link in self._links if link.is_connected and not link.retired
            }
        )
        doubles = {worker_id for worker_id, count in counts.items() if count > 1}
        for worker_id in doubles - self._doubles:
            logger.warning("several workers have the same id: the newest gets the streams", extra={"worker": worker_id})
        self._doubles = doubles

    def _remember(self, card: worker_pb2.ModelCard) -> None:
        self.models.pop(card.name, None)
        self.models[card.name] = card
        if len(self.models) > _MAX_MODELS:
            del self.models[next(iter(self.models))]
        shown = [*self.models.values(), *(link.card for link in self._links if link.card is not None)]
        self.tokenizers.keep_only({card.tokenizer_digest for card in shown})

    def _tick(self) -> None:
        for link in self._links:
            link.check()
        self._remove_retired()
