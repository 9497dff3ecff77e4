"""Write-behind of the prefix cache: blocks of texts that have ended, and blocks that the pools have evicted, are
offered to a store outside of the machine.

Nothing waits for it. It works in small pieces between the events of the driver's loop, from queues with bounds, and
drops what the store does not take in time. Tenants take turns; blocks that the store does not take hold up only those
of the same tenant. A block is read from its slots of host memory. One that only the pools have is first copied there by
a plan, and is evicted from there before all others afterwards.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from lockstep_engine import remote_keys
from lockstep_engine.blocks import BlockKey
from lockstep_engine.config import HotWindow
from lockstep_engine.host_view import HostView
from lockstep_engine.remote_store import RemoteStore, StoredBlock
from lockstep_engine.scheduler import Scheduler
from lockstep_engine.tenant_queues import TenantQueues

logger = logging.getLogger("lockstep.engine")

_MAX_TEXTS = 1024
_MAX_DUE = 1 << 16
_MAX_NAMES = 1 << 16
"""Blocks whose names, or whose being offered, is remembered."""
_PIECE_BLOCKS = 256
"""Blocks that are named between two turns of the loop: less than a millisecond."""
_PIECE_BYTES = 2**20
"""Bytes that are offered, and so copied, between two turns of the loop, unless one block has more."""
_FULL_WAIT_S = 0.02
_MAX_FULL_WAIT_S = 0.32
"""Until a tenant's blocks are offered again that the store has not taken: first the one, doubled each time."""
PATIENCE_S = 2.0
"""How long a block waits for room in the store's queue."""
_COPY_WAIT_S = 30.0
"""How long a block waits for the plan that copies it; longer than any step may take."""


class _Text(NamedTuple):
    """The blocks of a text whose contents are known."""

    tenant: str
    keys: list[BlockKey]
    fork: int


class _Due(NamedTuple):
    """A version of a block that has to be offered to the store."""

    tenant: str
    key: BlockKey
    cold: bool
    name: bytes


class _Refused(NamedTuple):
    """Blocks of one tenant that the store has not taken."""

    batch: list[_Due]
    again_at: float
    """When they are offered again."""
    wait_s: float
    """How long that is after the time before."""
    until: float
    """When they are dropped."""


class RemoteWriter:
    """Offers blocks in one epoch of the ranks.

    Args:
        store: where to.
        scheduler: has the blocks.
        view: their contents in host memory.
        hot_window: decides which versions a later text needs.
        seed: of a tenant's chain of names.
        on_copies: called when the scheduler has copies to plan.
    """

    def __init__(
        self,
        store: RemoteStore,
        scheduler: Scheduler,
        view: HostView,
        hot_window: HotWindow | None,
        seed: Callable[[str], bytes],
        on_copies: Callable[[], None],
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._view = view
        self._hot_window = hot_window
        self._seed = seed
        self._on_copies = on_copies
        self._texts: TenantQueues[_Text] = TenantQueues(_MAX_TEXTS)
        self._due: TenantQueues[_Due] = TenantQueues(_MAX_DUE)
        self._refused: dict[str, _Refused] = {}
        """By tenant; nothing else of it is offered meanwhile."""
        self._links: OrderedDict[bytes, tuple[str, BlockKey, bytes]] = OrderedDict()
        """By a block's digest: whose it is, and its link of the chain."""
        self._offered: OrderedDict[bytes, float] = OrderedDict()
        """By a block's name: when the store has taken it, or was seen to have it."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self.blocks = 0
        """Blocks that the store has taken."""

    def add(self, tenant: str, keys: Sequence[BlockKey], fork: int) -> None:
        """Have the blocks of a text offered.

        Args:
            tenant: whose text it is.
            keys: of its blocks whose contents are known.
            fork: after so many of them other texts have diverged.
        """
        if keys:
            self._texts.add(tenant, _Text(tenant, list(keys), fork))
            self.notify()

    async def add_evicted(self) -> None:
        """Have all known blocks offered that have not been yet, wherever they are."""
        versions = (False,) if self._hot_window is None else (False, True)
        for count, (tenant, key, link) in enumerate(list(self._links.values()), 1):
            self._list(tenant, key, link, versions)
            if count % _PIECE_BLOCKS == 0:
                await asyncio.sleep(0)
        self.notify()

    def mark(self, names: Sequence[bytes]) -> None:
        """The store has these blocks."""
        for name in names:
            self._remember(name)

    def forget(self, names: Sequence[bytes]) -> None:
        """The store does not have these blocks, or not any more: they are offered again."""
        for name in names:
            self._offered.pop(name, None)

    def notify(self) -> None:
        """There may be something to do: a step is done, or something was added."""
        self._idle.clear()
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until all was offered or dropped."""
        self.notify()
        await self._idle.wait()

    async def run(self) -> None:
        """Offer blocks until it is cancelled."""
        while True:
            try:
                while (tenant := next(iter(self._texts), None)) is not None:
                    text = self._texts.pop(tenant)
                    self._texts.end_turn(tenant)
                    await self._list_text(text)
                self._list_spilled()
                while True:
                    refused = self._take_refused()
                    batch = self._next_batch() if refused is None else refused.batch
                    if not batch:
                        break
                    await self._offer_batch(batch, refused)
                    await asyncio.sleep(0)  # of blocks that are gone nothing is offered, and nothing was waited for
            except Exception:
                logger.exception("blocks of the prefix cache were not stored")
            if self._texts or self._spilled:
                continue
            if self._refused:
                await self._wait_for_room()
            elif not self._due:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()

    async def _wait_for_room(self) -> None:
        """Wait until it is time to offer blocks again, or there may be others."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(each.again_at for each in self._refused.values())):
                await self._wake.wait()

    @property
    def _spilled(self) -> deque[tuple[bool, BlockKey]]:
        return deque() if self._scheduler.slots is None else self._scheduler.slots.spilled

    async def _list_text(self, text: _Text) -> None:
        """List the versions of a text's blocks that a later text which begins with it needs."""
        count, blocks = len(text.keys), self._scheduler.blocks
        parts = blocks.parts(count), blocks.parts(min(text.fork, count))
        hot, cold = ({*parts[0][version], *parts[1][version]} for version in (False, True))
        last = self._seed(text.tenant)
        for begin in range(0, count, _PIECE_BLOCKS):
            piece = text.keys[begin : begin + _PIECE_BLOCKS]
            links = list(remote_keys.chain(last, piece))
            last = links[-1]
            for index, (key, link) in enumerate(zip(piece, links, strict=True), begin):
                self._links[key.digest] = text.tenant, key, link
                self._links.move_to_end(key.digest)
                versions = (*((True,) if index in cold else ()), *((False,) if index in hot else ()))
                self._list(text.tenant, key, link, versions)
            while len(self._links) > _MAX_NAMES:
                self._links.popitem(last=False)
            await asyncio.sleep(0)

    def _list_spilled(self) -> None:
        """List the blocks that have been evicted to host memory, if it is known of which text they are."""
        spilled = self._spilled
        while spilled:
            cold, key = spilled.popleft()
            tenant, known, link = self._links.get(key.digest, ("", None, b""))
            if known == key:
                self._list(tenant, key, link, (cold,))

    def _list(self, tenant: str, key: BlockKey, link: bytes, versions: tuple[bool, ...]) -> None:
        for cold in versions:
            name = remote_keys.block_name(link, cold=cold)
            if not self._is_offered(name):
                self._due.add(tenant, _Due(tenant, key, cold, name))

    def _take_refused(self) -> _Refused | None:
        """Blocks that the store has not taken, and for which it is time to offer them again."""
        now = asyncio.get_running_loop().time()
        tenant = next((each for each, refused in self._refused.items() if refused.again_at <= now), None)
        return None if tenant is None else self._refused.pop(tenant)

    def _next_batch(self) -> list[_Due]:
        """The next blocks of the tenant whose turn it is: a part of what a step may copy, and of host memory."""
        sizes = self._scheduler.blocks.sizes.host
        most = min(sizes.step_slots, sizes.slots) // 4
        for tenant in [each for each in self._due if each not in self._refused]:
            batch: list[_Due] = []
            slots = 0
            while (each := self._due.first(tenant)) is not None:
                slots += 1 if each.cold else sizes.hot_slots
                if batch and slots > most:
                    break
                self._due.pop(tenant)
                if not self._is_offered(each.name):
                    batch.append(each)
            self._due.end_turn(tenant)
            if batch:
                return batch
        return []

    async def _offer_batch(self, batch: list[_Due], refused: _Refused | None) -> None:
        """Offer blocks of one tenant; `refused`: they are from this."""
        blocks = self._scheduler.blocks
        absent = [each for each in batch if not blocks.host.has(each.key, cold=each.cold)]
        staged = [each for each in absent if blocks.stage(each.key, cold=each.cold)]
        if staged:
            self._on_copies()
        try:
            async with asyncio.timeout(_COPY_WAIT_S):
                left = await self._offer(batch)
            if left:
                self._keep(left, None if refused is None or len(left) < len(refused.batch) else refused)
        except TimeoutError:
            logger.warning("blocks of the prefix cache were not stored: no step has copied them")
        for each in staged:
            self._scheduler.blocks.host.demote(each.key, cold=each.cold)

    def _keep(self, batch: list[_Due], refused: _Refused | None) -> None:
        """Offer blocks again later, unless that has been done for long enough without any of them being taken."""
        now = asyncio.get_running_loop().time()
        wait_s = _FULL_WAIT_S if refused is None else min(2 * refused.wait_s, _MAX_FULL_WAIT_S)
        until = now + PATIENCE_S if refused is None else refused.until
        if now < until:
            self._refused[batch[0].tenant] = _Refused(batch, now + wait_s, wait_s, until)

    async def _offer(self, batch: list[_Due]) -> list[_Due]:
        """Offer blocks once host memory has them; leave out those that it has no more.

        Returns:
            Those for which the store has no room now.
        """
        left = deque(batch)
        while left:
            piece, contents = self._readable(left)
            if not piece:
                if not left:
                    break
                self._wake.clear()
                if self._scheduler.blocks.host.slots_of(left[0].key, cold=left[0].cold) == ():
                    await self._wake.wait()  # for the end of a step
                continue
            parts = len(self._view.heads)
            taken = max(0, self._store.offer(piece[0].tenant, contents)) // parts
            for each in piece[:taken]:
                self._remember(each.name)
                self.blocks += 1
                left.popleft()
            if taken < len(piece):
                break
            await asyncio.sleep(0)
        return list(left)

    def _readable(self, left: deque[_Due]) -> tuple[list[_Due], list[StoredBlock]]:
        """The first blocks that can be read now, as much as may be copied at once; those that are gone are removed."""
        piece: list[_Due] = []
        contents: list[StoredBlock] = []
        size = 0
        for each in list(left):
            slots = self._scheduler.blocks.host.slots_of(each.key, cold=each.cold)
            if slots is None:
                left.remove(each)
                continue
            form = self._view.forms[each.cold]
            size += form.length * len(self._view.heads)
            if not slots or (piece and size > _PIECE_BYTES):
                break
            piece.append(each)
            contents.extend(
                StoredBlock(each.name, heads, form, self._view.read(part, slots, cold=each.cold))
                for part, heads in enumerate(self._view.heads)
            )
        return piece, contents

    def _is_offered(self, name: bytes) -> bool:
        offered_at = self._offered.get(name)
        return offered_at is not None and self._store.is_kept(offered_at)

    def _remember(self, name: bytes) -> None:
        self._offered[name] = time.monotonic()
        self._offered.move_to_end(name)
        while len(self._offered) > _MAX_NAMES:
            self._offered.popitem(last=False)
