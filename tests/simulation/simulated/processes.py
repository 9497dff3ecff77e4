"""One simulated router process: the real router with its REST application, in an event loop of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from lockstep_router.discovery import Report, WorkerAddress
from lockstep_router.faces.rest.app import create_app
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.journals import JournalStore, MemoryJournalStore, MirroredJournalStore
from lockstep_router.router import Router
from lockstep_router.running import RunningRequest
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import Account

from simulated.clients import Client
from simulated.kernel import ProcessLoop
from simulated.plan import settings_of
from simulated.tracks import Tracks, WatchedStore
from simulated.wire import Exchange

if TYPE_CHECKING:
    from simulated.world import World

CLOSE_TIMEOUT_S = 1.0
"""Time that the server leaves to its connections after the drain, before it cancels them."""


class ScriptedDiscovery:
    """A discovery that reports what the world sets."""

    def __init__(self, addresses: frozenset[WorkerAddress]) -> None:
        self.addresses = addresses
        self.report: Report | None = None

    async def run(self, report: Report) -> None:
        self.report = report
        report.update(self.addresses)
        await asyncio.Event().wait()

    def set(self, addresses: frozenset[WorkerAddress]) -> None:
        self.addresses = addresses
        if self.report is not None:
            self.report.update(addresses)


def watching(
    base: type[Router], on_prepared: Callable[[Prepared], None], on_continued: Callable[[Prepared], None]
) -> type[Router]:
    """The class of routers that report what they have prepared, and what they continue after it had failed."""

    class WatchedRouter(base):  # type: ignore[misc, valid-type]
        async def prepare(self, request: GenerationRequest, account: Account) -> Prepared:
            prepared: Prepared = await super().prepare(request, account)
            on_prepared(prepared)
            return prepared

        def run(self, prepared: Prepared, *args: Any, **options: Any) -> RunningRequest:
            if prepared.begun is not None:
                on_continued(prepared)
            running: RunningRequest = super().run(prepared, *args, **options)
            return running

    return WatchedRouter


class RouterProcess:
    """One router process with its event loop, from its start to its end."""

    def __init__(self, world: "World", index: int, life: int) -> None:
        self.index = index
        self.name = f"router-{index}"
        self._world = world
        rng = Random(f"{world.plan.seed}/{self.name}/{life}")
        self.loop = ProcessLoop(world.kernel, self.name, clock_offset=float(rng.randrange(1, 1 << 20)))
        self.discovery = ScriptedDiscovery(world.addresses())
        self.router: Router | None = None
        self.app: FastAPI | None = None
        self.clients: list[Client] = []
        self.tracks = Tracks()
        self.started_at = world.kernel.now
        self.front: JournalStore | None = None
        """Its journals in its own memory."""
        self.mirrored: MirroredJournalStore | None = None
        """All of its journals, if routers share a state server."""
        self.is_leaving = False
        """It was asked to drain and end."""
        self._leaving = asyncio.Event()
        self._serving = self.loop.spawn(self._serve(world, rng))

    async def _serve(self, world: "World", rng: Random) -> None:
        settings = settings_of(world.plan, self.name).model_copy(update=world.mutation.settings)
        dial = world.network.dial
        store = self.front = world.mutation.store(settings, self.loop)
        if world.state is not None:
            store = self.mirrored = self._mirror(store, settings, world)
        router_class = watching(
            world.mutation.router,
            lambda prepared: world.on_prepared(self, prepared),
            lambda prepared: world.on_continued(self, prepared),
        )
        watched = WatchedStore(
            store, self.tracks, lambda: world.kernel.now, lambda request_id: world.note_owner(request_id, self)
        )
        async with (
            self._mirroring(),
            router_class(settings, self.discovery, lambda target, _: dial(self.loop, target), rng, watched) as router,
        ):
            self.router, self.app = router, create_app(router)
            await self._leaving.wait()
            if self.is_leaving:
                await router.leave()
                await self._finish_answers()
                world.on_drained(self)
                await asyncio.sleep(0)
        self.app = None

    def _mirror(self, front: JournalStore, settings: RouterSettings, world: "World") -> MirroredJournalStore:
        state = world.state
        assert state is not None
        assert isinstance(front, MemoryJournalStore)
        return world.mutation.mirrored(
            front,
            settings.state_server,
            lambda _target, _options: state.dial(self.loop),  # type: ignore[arg-type, return-value]
            owner=settings.router_id,
            window_s=settings.resume_window_s,
            timeout_s=settings.state_timeout_s,
            max_lag_s=settings.state_max_lag_s,
        )

    @asynccontextmanager
    async def _mirroring(self) -> AsyncIterator[None]:
        if self.mirrored is None:
            yield
            return
        self.mirrored.start()
        try:
            yield
        finally:
            await self.mirrored.close()

    async def _finish_answers(self) -> None:
        """What the server does at its end: connections have a moment for the ends of their answers."""
        end = self.loop.time() + CLOSE_TIMEOUT_S
        while self.loop.time() < end and any(each.process is self for each in self._world.wire.of(self.index)):
            await asyncio.sleep(CLOSE_TIMEOUT_S / 20)

    def call(self, action: Callable[[], object]) -> None:
        """Run something in the process."""
        if not self.loop.is_dead and not self.loop.is_closed():
            self.loop.call_soon(action)

    def leave(self) -> None:
        """End it: the simulation is over."""
        self.loop.call_soon(self._leaving.set)

    def drain(self) -> None:
        """SIGTERM: lame duck, drain, end."""
        self.is_leaving = True
        self.loop.call_soon(self._leaving.set)

    @property
    def listens(self) -> bool:
        """Whether connections are accepted."""
        return not self.loop.is_dead and self.router is not None and not self.has_left

    @property
    def failure(self) -> BaseException | None:
        """What ended it, if that was not planned."""
        serving = self._serving
        return serving.exception() if serving.done() and not serving.cancelled() else None

    def on_end(self, action: Callable[[], object]) -> None:
        """Do something when it has ended by itself."""
        self._serving.add_done_callback(lambda _: action())

    @property
    def has_left(self) -> bool:
        return self._serving.done()

    # What its connections show.

    def note_reader(self, exchange: Exchange) -> None:
        """The head of an answer has named its stream."""
        assert exchange.stream_id is not None
        track = exchange.track = self.tracks.by_id.get(exchange.stream_id)
        if track is not None:
            track.readers += 1

    def note_left(self, exchange: Exchange) -> None:
        """A connection has ended."""
        now = self._world.kernel.now
        if (track := exchange.track) is not None:
            track.readers -= 1
            if not track.readers:
                track.left_at = now
        if exchange.is_reading:
            self.tracks.left_at[exchange.subject] = now

    def has_reader(self, subject: str) -> bool:
        """Whether any connection reads, or waits for, what belongs to a client's request."""
        exchanges = self._world.wire.of(self.index)
        return any(each.process is self and each.subject == subject and each.is_reading for each in exchanges)
