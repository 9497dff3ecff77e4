"""All workers: their links, their models, and a way to wait for a change.

It connects to the workers that discovery reports and disconnects from those that it drops. It never looks into a
stream.
"""

import asyncio
import functools
import logging
import math
from collections import Counter
from random import Random

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import Dial, dial_plain

from lockstep_router import metrics
from lockstep_router.discovery import Discovery, Report, WorkerAddress
from lockstep_router.history import History
from lockstep_router.policies import Policy, RequestFacts, imbalance, make_policy, rank, without_impaired
from lockstep_router.randomness import RANDOMNESS
from lockstep_router.settings import RouterSettings
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers.clock import AwakeClock
from lockstep_router.workers.health import HealthWatch
from lockstep_router.workers.health.watch import note_closed, note_ejected
from lockstep_router.workers.link import Link, LinkState
from lockstep_router.workers.retry_budget import RetryBudget
from lockstep_router.workers.running import Deadlines
from lockstep_router.workers.suspects import Suspects
from lockstep_router.workers.tokenizer_cache import TokenizerCache

logger = logging.getLogger("lockstep.router")
metrics.NO_WORKER.labels("")  # from 0

_MAX_TICK_S = 0.05
_MAX_MODELS = 256
_MEASURE_EVERY_S = 1.0
"""Interval for measuring the imbalance of loads and for comparing the workers' health."""


class Workers:
    """The workers that discovery reports."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        dial: Dial = dial_plain,
        rng: Random | None = None,
    ) -> None:
        self.rng = rng or RANDOMNESS
        """The router's source of randomness: jitter, stream ids, and seeds of requests that name none."""
        self.clock = AwakeClock(tick_s=min(_MAX_TICK_S, settings.heartbeat_timeout_s / 10))
        self.tokenizers = TokenizerCache()
        self.suspects = Suspects(settings.quarantine_after, self._announce)
        self.history = History(is_kept=settings.console != "off")
        self.retries = RetryBudget(settings.retry_share)
        """Shared by all streams of this router."""
        self.report = Report(self._on_discovered)
        self.models: dict[str, worker_pb2.ModelCard] = {}
        """The newest card of each model, by name. A model stays known while all its workers are away: its requests wait
        instead of being refused."""
        self.failovers = 0
        """Total of all streams."""
        self.imbalances: dict[str, float] = {}
        """Of each model that has a ready worker: requests on the most loaded one over the average."""
        self.watch = HealthWatch(settings)
        self.deadlines = Deadlines(
            first_token_s=settings.first_token_deadline_s,
            inter_token_s=settings.inter_token_deadline_s,
            next_wait_s=settings.max_queue_wait_s,
        )
        self.measure_at = 0.0
        """In the awake clock's time."""
        self._settings = settings
        self._discovery = discovery
        self._policies: dict[str, Policy] = {}
        """By the name of the model."""
        self._served = frozenset(settings.served_models)
        for name in self._served:
            metrics.NO_WORKER.labels(name)  # from 0
        self._indexed: set[str] = set()
        """Models with an index of cached blocks."""
        self._dial = dial
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._ready: dict[tuple[str | None, str | None, bool], list[Link]] = {}
        """What `ready` has found since a worker last changed."""
        self._equal_cards: dict[str, bool] = {}
        """By the name of the model, whether its ready workers have equal cards, since a worker last changed."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of links that are being closed."""
        self._shared_ids: set[str] = set()
        """Worker ids that several workers use and that have been logged."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._keeps_unlisted = False

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that all of it runs in. Asking asyncio for it takes a system call in Python 3.11, and a
        request would ask a dozen times.
        """
        return asyncio.get_running_loop()

    @property
    def links(self) -> tuple[Link, ...]:
        """All links, including retired ones that still have streams."""
        return tuple(self._links)

    def start(self) -> None:
        """Start the discovery and the clock."""
        self._tasks = [
            asyncio.create_task(self._discovery.run(self.report)),
            asyncio.create_task(self.clock.run(self._tick)),
        ]

    async def stop(self) -> None:
        """Close all links."""
        tasks = [*self._tasks, *self._links.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_discovered(self, addresses: frozenset[WorkerAddress]) -> None:
        """Connect to new workers and retire those that are gone."""
        known = {link.address: link for link in self._links if not self._links[link].done()}
        newest = {address: address for address in addresses}
        for address, link in known.items():
            link.listed = address in addresses
            link.retired = link.retired and not link.listed
            link.address = newest.get(address, address)  # its alternates may have changed
        for address in sorted(addresses - known.keys(), key=lambda each: each.target):
            if not any(link.adopt(address) for link in known.values()):
                link = Link(
                    address,
                    self._settings,
                    self.clock,
                    self.tokenizers,
                    self.suspects,
                    self._on_change,
                    self.history,
                    self._dial,
                    self.rng,
                )
                self._links[link] = asyncio.create_task(link.run())
        self._retire_unlisted()
        self._remove_retired()
        self._announce()

    def _retire_unlisted(self) -> None:
        """Retire the workers that discovery no longer lists.

        Unlisted workers that are connected and well are kept while they outnumber the listed workers that are connected
        and well. A pod that ends reports it or its connection breaks, so discovery is more likely to be wrong.
        """
        unlisted = [link for link in self._links if not link.listed and not link.retired]
        well = [link for link in unlisted if link.is_well]
        kept = well if len(well) > sum(link.is_well for link in self._links if link.listed) else []
        for link in unlisted:
            link.retired = link not in kept
        metrics.UNLISTED_WORKERS.set(len(kept))
        if bool(kept) != self._keeps_unlisted:
            self._keeps_unlisted = bool(kept)
            if kept:
                logger.warning(
                    "discovery no longer lists workers that are connected and well: they stay in use",
                    extra={"workers": sorted(link.worker_id for link in kept)},
                )
            else:
                logger.info("discovery lists all workers in use again")

    def _remove_retired(self) -> bool:
        """Close the retired links without streams; whether there were any."""
        removed = [link for link in self._links if link.retired and not link.has_streams]
        for link in removed:
            task = self._links.pop(link)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        return bool(removed)

    def ready(self, model: str | None = None, digest: str | None = None, *, grammars: bool = False) -> list[Link]:
        """The links whose workers take new streams, optionally of one model; one link for each worker id.

        Args:
            model: name of the model.
            digest: of the model's card.
            grammars: only workers that take streams with a grammar.
        """
        key = (model, digest, grammars)
        found = self._ready.get(key)
        if found is None:
            if len(self._ready) >= _MAX_MODELS:
                self._ready.clear()
            found = self._ready[key] = self._find_ready(model, digest, grammars=grammars)
        return found

    def _find_ready(self, model: str | None, digest: str | None, *, grammars: bool) -> list[Link]:
        newest: dict[str, Link] = {}
        for link in self._links:
            if link.state is LinkState.READY:
                other = newest.setdefault(link.worker_id, link)
                if link.incarnation > other.incarnation:
                    # A pod and its successor have the same name, and the old pod may still be running.
                    newest[link.worker_id] = link
        return [
            link
            for link in newest.values()
            if link.card is not None
            and (model is None or link.card.name == model)
            and (digest is None or link.card.digest == digest)
            and (not grammars or link.card.grammar_engine)
        ]

    def have_one_numerics(self, model: str, digest: str) -> bool:
        """Whether all workers of a model, also those that are away, compute the same tokens. One that has not said yet
        what it serves counts as another.
        """
        cards = [link.card for link in self._links]
        known = {
            (link.fingerprint, link.grammar_engine)
            for link in self._links
            if link.card is not None and (link.card.name, link.card.digest) == (model, digest)
        }
        return None not in cards and len(known) == 1 and all(fingerprint for fingerprint, _ in known)

    def within_wait(self, links: list[Link], may_wait_s: float, priority: int = 0) -> list[Link]:
        """The links, all of one model, whose estimated wait is short enough for a new request.

        Raises:
            LockstepError: OVERLOADED, there is none of them.
        """
        if len(links) == 1 and links[0].queue_wait_of(priority) <= may_wait_s:
            return links
        short = [link for link in links if link.queue_wait_of(priority) <= may_wait_s]
        if short or not links:
            return short
        least_s = min(link.queue_wait_of(priority) for link in links)
        model = links[0].card.name if links[0].card is not None else ""
        metrics.QUEUE_REFUSALS.inc()
        raise LockstepError(
            ErrorCode.OVERLOADED,
            f"the queue of {model!r} takes {least_s:.0f} s now, this request may wait {may_wait_s:.0f} s",
            retry_after_s=max(1, math.ceil(least_s - may_wait_s)),
        )

    def pick(self, model: str, request: RequestFacts, links: list[Link]) -> Link:
        """The link, of those of a model, that a stream goes to. It changes nothing: see `note_sent`.

        Impaired workers are avoided while there are others, whatever the policy.
        """
        if len(links) == 1:
            return links[0]
        by_id = {link.worker_id: link for link in links}
        offered = without_impaired([link.facts for link in links], self._settings.queue_threshold)
        return by_id[self._policy_of(model).choose(request, offered)]

    def note_sent(self, model: str, request: RequestFacts, link: Link) -> None:
        """Note that a stream is about to be sent to a link."""
        metrics.PICKS.labels(self._settings.policy_of(model)).inc()
        policy = self._policy_of(model)
        if policy.uses_prefixes:
            link.prefixes.note_sent(request.stream_id, request.prefix_keys)
        if policy.notes_sent:
            policy.note_sent(request, link.facts)

    def note_no_worker(self, model: str) -> None:
        """Note that a request waits because no worker of its model takes it."""
        metrics.NO_WORKER.labels(model if model in self.models or model in self._served else "").inc()

    # Evidence of streams about their workers.

    def note_success(self, link: Link, stream_id: str) -> None:
        """Note that a stream makes progress on a worker, or is complete."""
        if link.health.breaker.note_success(stream_id, self.clock.now()):
            note_closed(link)

    def note_probe_failed(self, link: Link, cause: str) -> None:
        """Note that the stream that probed an ejected worker was lost there: the worker is ejected for longer."""
        now = self.clock.now()
        link.health.breaker.eject(cause, now)
        note_ejected(link, now)

    def note_fault(self, link: Link) -> None:
        """Note that a stream which was lost on a worker makes progress on another one."""
        link.health.breaker.note_fault(self.clock.now())
        self._consider(link)

    def note_internal(self, link: Link, session: str) -> None:
        """Note that a worker ended a stream with an internal error."""
        link.health.breaker.note_internal(session, self.clock.now())
        self._consider(link)

    def _consider(self, link: Link) -> None:
        self.watch.consider(link, [each for each in self._links if each.model == link.model], self.clock.now())

    def _policy_of(self, model: str) -> Policy:
        policy = self._policies.get(model)
        if policy is None:
            policy = self._policies[model] = make_policy(self._settings.policy_of(model), self._settings)
            if len(self._policies) > _MAX_MODELS:
                del self._policies[next(iter(self._policies))]
        return policy

    async def find_version(self, name: str, session: str) -> tuple[worker_pb2.ModelCard, Tokenizer]:
        """The version of a model that a session gets, identified by the card's digest, and its tokenizer.

        It chooses no worker: each attempt of a stream does that, among the workers with this digest. Waits while no
        worker has connected yet, or none of a model of `served_models`, or the tokenizer is being fetched, no longer
        than `max_queue_wait_s`.

        Raises:
            LockstepError: MODEL_NOT_FOUND, or UNAVAILABLE when the wait was too long.
        """
        began_at = self.loop.time()
        while True:
            card = self._choose_version(name, session)
            if card is None:
                self.note_no_worker(name)
            elif (tokenizer := self.tokenizers.get(card.tokenizer_digest)) is not None:
                return card, tokenizer
            if not await self.wait_change(began_at + self._settings.max_queue_wait_s):
                waited_s = self.loop.time() - began_at
                if card is not None:
                    missing = f"the tokenizer of {name!r}"
                else:
                    missing = f"a worker of {name!r}" if name in self._served else "any worker"
                message = f"waited {waited_s:.1f} s for {missing} ({self.describe_links()})"
                raise LockstepError(ErrorCode.UNAVAILABLE, message, retry_after_s=5)

    def describe_links(self) -> str:
        """How many workers there are in each state, for errors: `2 connecting, 1 loading`."""
        counts = Counter(link.state.value for link in self._links)
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no worker is known"

    def _choose_version(self, name: str, session: str) -> worker_pb2.ModelCard | None:
        """The card of the version for a session; None if no worker has connected yet, or none of a served model."""
        if not self.models:
            return None
        if ready := self.ready(name):
            # During a rollout the workers may have several versions. A session gets the version of the worker that it
            # prefers, so that its requests stay with one version. The load plays no part in this choice.
            if self._have_one_card(name, ready):
                return ready[0].card
            sound = [link for link in ready if not link.health.breaker.is_ejected] or ready
            cards = {link.worker_id: link.card for link in sound}
            return cards[rank(session, cards)[0]]
        if name in self.models:
            return self.models[name]
        if name in self._served:
            return None
        raise model_not_found(name)

    def _have_one_card(self, name: str, ready: list[Link]) -> bool:
        """Whether the cards of a model's ready workers are equal: the versions may differ in more than the digest."""
        equal = self._equal_cards.get(name)
        if equal is None:
            equal = self._equal_cards[name] = all(link.card == ready[0].card for link in ready)
        return equal

    async def wait_change(self, until: float) -> bool:
        """Wait for a change of any worker; False if the event loop's time `until` comes first."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _on_change(self, link: Link) -> None:
        self._forget_found()
        if link.card is not None and self.models.get(link.card.name) != link.card:
            self._remember(link.card)
        self._watch_prefixes()
        self._note_shared_ids()
        self._retire_unlisted()
        self._announce()

    def _forget_found(self) -> None:
        self._ready.clear()
        self._equal_cards.clear()

    def _announce(self) -> None:
        self._forget_found()
        self._changed.set()
        self._changed = asyncio.Event()
        counts = Counter(link.state for link in self._links)
        for state in LinkState:
            metrics.WORKERS.labels(state.value).set(counts[state])

    def _note_shared_ids(self) -> None:
        counts = Counter(
            worker_id
            for worker_id, _ in {
                (link.worker_id, link.incarnation) for link in self._links if link.is_connected and not link.retired
            }
        )
        shared = {worker_id for worker_id, count in counts.items() if count > 1}
        for worker_id in shared - self._shared_ids:
            logger.warning("several workers have the same id: the newest gets the streams", extra={"worker": worker_id})
        self._shared_ids = shared

    def _remember(self, card: worker_pb2.ModelCard) -> None:
        self.models.pop(card.name, None)
        self.models[card.name] = card
        metrics.NO_WORKER.labels(card.name)  # from 0
        if len(self.models) > _MAX_MODELS:
            forgotten = next(iter(self.models))
            del self.models[forgotten]
            for metric in (metrics.READY_WORKERS, metrics.QUEUED_REQUESTS, metrics.NO_WORKER):
                metric.remove(forgotten)
        cards = [*self.models.values(), *(link.card for link in self._links if link.card is not None)]
        self.tokenizers.keep_only({card.tokenizer_digest for card in cards})

    def _tick(self) -> None:
        for link in self._links:
            link.check()
        if self._remove_retired():
            self._announce()
        if self.clock.now() >= self.measure_at:
            self.measure_at = self.clock.now() + _MEASURE_EVERY_S
            self._measure_loads()
            self._watch_prefixes()
            self.watch.check((link for link in self._links if not link.retired), self.clock.now())

    def _watch_prefixes(self) -> None:
        """Keep the indexes of cached blocks of those models whose policies use them."""
        by_model: dict[str, list[Link]] = {}
        for link in self._links:
            if link.is_connected and link.card is not None:
                by_model.setdefault(link.card.name, []).append(link)
        for model, links in by_model.items():
            if self._policy_of(model).uses_prefixes:
                for link in links:
                    link.watch_prefixes(self._settings.prefix_index_blocks // len(links))
                self._indexed.add(model)
        for model in tuple(self._indexed):
            if model in by_model:
                metrics.PREFIX_INDEX_BLOCKS.labels(model).set(sum(len(link.prefixes) for link in by_model[model]))
            else:
                self._indexed.remove(model)
                metrics.PREFIX_INDEX_BLOCKS.remove(model)

    def _measure_loads(self) -> None:
        requests: dict[str, list[int]] = {}
        models = self.models.keys() | self._served
        queued = dict.fromkeys(models, 0)
        for link in self.ready():
            assert link.card is not None
            requests.setdefault(link.card.name, []).append(link.status.queued + link.status.running)
            queued[link.card.name] = queued.get(link.card.name, 0) + link.status.queued
        for model in models:
            metrics.READY_WORKERS.labels(model).set(len(requests.get(model, ())))
            metrics.QUEUED_REQUESTS.labels(model).set(queued[model])
        for model in self.imbalances.keys() - requests.keys():
            metrics.LOAD_IMBALANCE.remove(model)
        self.imbalances = {model: imbalance(each) for model, each in requests.items()}
        for model, ratio in self.imbalances.items():
            metrics.LOAD_IMBALANCE.labels(model).set(ratio)


def model_not_found(name: str) -> LockstepError:
    """The error for a model that no worker has reported."""
    return LockstepError(ErrorCode.MODEL_NOT_FOUND, f"the model {name!r} does not exist", field="model")
