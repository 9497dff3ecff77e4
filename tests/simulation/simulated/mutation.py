"""A change of the product or of the transport, to test whether the checks find it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep_client.steps import Outgoing
from lockstep_router.journals import JournalStore, MemoryJournalStore, MirroredJournalStore
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.streams.journal import Journal
from lockstep_state.memory import MemoryBackend

from simulated.kernel import ProcessLoop


def in_memory(settings: RouterSettings, loop: ProcessLoop) -> JournalStore:
    """The store that a router has if it is given none. A store that all routers share would be made once."""
    return MemoryJournalStore(settings.max_resumable_streams, settings.max_resumable_bytes, clock=loop.time)


@dataclass(frozen=True)
class Mutation:
    """What is changed. The default changes nothing."""

    journal: type[Journal] = Journal
    to_worker: Callable[[object], list[object]] = lambda frame: [frame]
    to_router: Callable[[object], list[object]] = lambda frame: [frame]
    router: type[Router] = Router
    settings: dict[str, object] = field(default_factory=dict)
    store: Callable[[RouterSettings, ProcessLoop], JournalStore] = in_memory
    """Makes the journal store of a router process."""
    mirrored: type[MirroredJournalStore] = MirroredJournalStore
    """The store around it, where routers share a state server."""
    state: type[MemoryBackend] = MemoryBackend
    """What the state server keeps everything in."""
    request: Callable[[Outgoing], Outgoing] = lambda request: request
    """Of a client over HTTP."""
    answer: Callable[[bytes], list[bytes]] = lambda piece: [piece]
    """A piece of an answer over HTTP."""
