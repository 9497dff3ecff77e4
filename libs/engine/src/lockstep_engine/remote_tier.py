"""The prefix cache's third tier: KV blocks that come from a store outside of the machine, and go to it.

Blocks come and go through the second tier, in host memory. What is fetched is written to slots that nothing else uses
meanwhile; once it is complete for every rank, the blocks belong to the second tier, whose loads are ordered by plans.
So all ranks agree on a hit before a step is planned, and the bits are those of any block that was copied to host memory
and back. A request whose blocks are being fetched waits; others go on. Whatever goes wrong, it is computed.

Which versions of a block are stored follows from what a query sees: those that the query after the end of a text needs.
A prompt that begins with this text needs the same ones. Its compressed blocks are fetched first; how far they reach
decides which uncompressed ones, before its next token, are needed with them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep_engine import remote_keys
from lockstep_engine.blocks import BlockKey, HostSizes
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, WindowedLayers
from lockstep_engine.control import Ready
from lockstep_engine.host_view import HostView
from lockstep_engine.remote_store import RemoteStore
from lockstep_engine.remote_writer import RemoteWriter
from lockstep_engine.request import Request
from lockstep_engine.scheduler import Scheduler
from lockstep_engine.sequence import Sequence as RunningSequence
from lockstep_engine.shared_slots import SharedSlots

logger = logging.getLogger("lockstep.engine")

_MAX_FETCHES = 16
"""Requests that wait for blocks at once. Others are computed at once."""
_RESERVED = 32
"""Blocks for which slots are reserved at a time."""
_GRACE_S = 1.0
"""For the store to end a fetch by itself after its deadline, with what has come by then, or after it is cancelled."""
AWAY_S = 2.0
"""How long `store_all` waits for a store that is away."""
_CHECK_S = 0.1
"""How often it looks whether it is."""


@dataclass(frozen=True)
class RemoteUsage:
    """What the third tier has done since the engine's start."""

    fetching: int = 0
    """Requests that wait for blocks now."""
    fetched: int = 0
    """Blocks that have come, in any version."""
    stored: int = 0
    """Blocks that the store has taken."""


class _Epoch:
    """What is valid for one life of the ranks."""

    def __init__(self, view: HostView, seed: Callable[[str], bytes], writer: RemoteWriter) -> None:
        self.view = view
        self.seed = seed
        self.writer = writer
        self.task = asyncio.get_running_loop().create_task(writer.run())


class _Arriving:
    """The memory of the blocks of one fetch. Slots are reserved once something comes for them: what is not there, or
    would come too late, evicts nothing.

    Args:
        scheduler: has the tier in host memory.
        shared: its slots in this epoch.
        view: their memory.
        tenant: whose blocks they are.
        count: of the blocks.
        cold: their version.
    """

    def __init__(
        self, scheduler: Scheduler, shared: SharedSlots, view: HostView, tenant: str, count: int, *, cold: bool
    ) -> None:
        self.slots: list[tuple[int, ...]] = []
        """Of the leading blocks."""
        self._scheduler = scheduler
        self._shared = shared
        self._view = view
        self._tenant = tenant
        self._left = count
        self._cold = cold
        self._apart: dict[tuple[int, int], memoryview] = {}
        """By block and part: memory of blocks whose slots do not follow each other."""
        self._nowhere: memoryview | None = None
        """For what comes when there is no slot: it is lost."""
        self._is_open = True

    def into(self, index: int, part: int) -> memoryview:
        """See `RemoteStore.fetch`."""
        while index >= len(self.slots) and self._reserve():
            pass
        length = self._view.forms[self._cold].length
        if index >= len(self.slots):
            self.end()  # slots reserved later would be taken for those of this block
            if self._nowhere is None:
                self._nowhere = memoryview(bytearray(length))
            return self._nowhere
        memory = self._view.part(part, self.slots[index], cold=self._cold)
        if memory is None:
            if (index, part) not in self._apart:
                self._apart[index, part] = memoryview(bytearray(length))
            memory = self._apart[index, part]
        return memory

    async def copy_apart(self, count: int) -> None:
        """Write what has come of the first `count` blocks to those of their slots that do not have it yet: parts that
        have come to other memory, and parts that several ranks have.
        """
        view = self._view
        repeated = [part for part, places in enumerate(view.places) if len(places) > 1]
        for index, part in [(index, part) for index in range(count) for part in repeated]:
            if (index, part) not in self._apart:
                view.write(part, self.slots[index], view.read(part, self.slots[index], cold=self._cold))
                await asyncio.sleep(0)
        for (index, part), content in list(self._apart.items()):
            if index < count:
                view.write(part, self.slots[index], content)
                await asyncio.sleep(0)

    def end(self) -> None:
        """Reserve no more."""
        self._is_open = False

    def _reserve(self) -> bool:
        """Reserve slots for further blocks, a few at a time; whether there were any."""
        if not self._is_open or self._scheduler.slots is not self._shared:
            return False
        host = self._scheduler.blocks.host
        found = host.reserve(min(_RESERVED, self._left), cold=self._cold, tenant=self._tenant)
        self.slots.extend(found)
        self._left -= len(found)
        return bool(found)


class RemoteTier:
    """Fetches blocks for requests before they run, and has blocks stored behind them.

    Args:
        store: the store.
        config, model_digest, windowed: part of the names of blocks.
        scheduler: has the requests and the other tiers.
        recompute_s: estimates the seconds until so many tokens of a further prompt would be computed.
        on_change: called when the scheduler may plan something: a request need not wait any more, or there are blocks
            to copy.
    """

    def __init__(
        self,
        store: RemoteStore,
        config: EngineConfig,
        model_digest: str,
        scheduler: Scheduler,
        recompute_s: Callable[[int], float],
        on_change: Callable[[], None],
        windowed: WindowedLayers | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._windowed = windowed
        self._hot_window = config.hot_window_with(windowed)
        self._model_digest = model_digest
        self._scheduler = scheduler
        self.recompute_s = recompute_s
        self._on_change = on_change
        self._epoch: _Epoch | None = None
        self._fetches: dict[str, asyncio.Task[None]] = {}
        """By the id of the request."""
        self._first_missing: dict[bytes, asyncio.Task[None]] = {}
        """By the digest of the first block that each of these fetches lacks."""
        self._fetched = self._stored = 0
        self._ending: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended."""
        self.fetch_deadline_s = store.fetch_timeout_s + _GRACE_S
        scheduler.on_end = self._on_end
        store.on_lost = self._on_lost

    @property
    def usage(self) -> RemoteUsage:
        """What it has done."""
        stored = self._stored + (0 if self._epoch is None else self._epoch.writer.blocks)
        return RemoteUsage(len(self._fetches), self._fetched, stored)

    def open(self, ready: Ready, ranks: Sequence[Ready], sizes: HostSizes, memories: Sequence[memoryview]) -> None:
        """New ranks are ready.

        Args:
            ready: what holds for the group.
            ranks: what each has said.
            sizes: of the tier in host memory.
            memories: each rank's.
        """
        self.close()
        seeds: dict[str, bytes] = {}

        def seed(tenant: str) -> bytes:
            if tenant not in seeds:
                if len(seeds) >= 1024:
                    seeds.clear()
                seeds[tenant] = remote_keys.seed(
                    self._config, self._model_digest, ready, tenant, windowed=self._windowed
                )
            return seeds[tenant]

        hot_layers = 0 if self._windowed is None else len(self._windowed.numbers)
        copies = self._windowed is not None and self._config.hot_window is None
        view = HostView.of(ranks, sizes, memories, hot_layers=hot_layers, copies=copies)
        writer = RemoteWriter(self._store, self._scheduler, view, self._hot_window, seed, self._on_change)
        self._epoch = _Epoch(view, seed, writer)

    def close(self) -> None:
        """The ranks are gone, and with them the requests. Fetches that have not ended write to the memory of these
        ranks only.
        """
        for task in self._fetches.values():
            self._end(task)
        self._fetches.clear()
        self._first_missing.clear()
        if self._epoch is not None:
            self._stored += self._epoch.writer.blocks
            self._end(self._epoch.task)
            self._epoch = None

    async def wait_closed(self) -> None:
        """Wait until what `close` has cancelled has ended."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=_GRACE_S)

    def begin(self, request: Request) -> None:
        """Fetch blocks for a request that the scheduler has just queued, if it lacks any."""
        epoch = self._epoch
        if epoch is None or len(self._fetches) >= _MAX_FETCHES:
            return
        keys = self._scheduler.prefix_keys(request.id)
        usable = self._scheduler.blocks.match(keys).usable
        if usable == len(keys):
            return
        self._scheduler.hold(request.id, held=True)
        first = keys[usable].digest
        other = self._first_missing.get(first)
        task = asyncio.get_running_loop().create_task(self._run(epoch, request, keys, other))
        self._fetches[request.id] = task
        if other is not None:
            return  # further requests wait for the fetch, too: this one may end, or wait no longer, before that is done
        self._first_missing[first] = task

        def done(ended: asyncio.Task[None]) -> None:
            if self._first_missing.get(first) is ended:
                del self._first_missing[first]

        task.add_done_callback(done)

    def cancel(self, request_id: str) -> None:
        """A request has been cancelled."""
        task = self._fetches.pop(request_id, None)
        if task is not None:
            self._end(task)

    def on_step(self) -> None:
        """A step is done."""
        if self._epoch is not None:
            self._epoch.writer.notify()

    async def store_all(self, timeout_s: float) -> bool:
        """Have the blocks of running requests stored, and all others that have not been; False if there is no time, or
        the store is away for longer than a moment.
        """
        epoch = self._epoch
        if epoch is None:
            return True
        clock = asyncio.get_running_loop().time
        latest = ends_at = clock() + timeout_s
        waiter = asyncio.ensure_future(self._store_all(epoch.writer))
        try:
            while not waiter.done() and not epoch.task.done() and (now := clock()) < ends_at:
                ends_at = min(ends_at, now + AWAY_S) if self._store.is_away else latest
                wait_s = min(_CHECK_S, ends_at - now)
                await asyncio.wait((waiter, epoch.task), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return waiter.done()
        finally:
            waiter.cancel()

    async def _store_all(self, writer: RemoteWriter) -> None:
        # Those of running requests first: other workers are about to go on with them.
        for sequence in list(self._scheduler.sequences.running):
            if sequence.has_output:  # see `Scheduler.on_end`
                self._on_end(sequence)
        await writer.wait_idle()
        await writer.add_evicted()
        await writer.wait_idle()

    def _on_end(self, sequence: RunningSequence) -> None:
        if self._epoch is not None:
            keys = sequence.keys[: sequence.remembered]
            self._epoch.writer.add(sequence.request.tenant, keys, sequence.fork)

    def _on_lost(self, names: Sequence[bytes]) -> None:
        if self._epoch is not None:
            self._epoch.writer.forget(names)

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _run(
        self, epoch: _Epoch, request: Request, keys: list[BlockKey], other: asyncio.Task[None] | None
    ) -> None:
        """Fetch, then let the request be admitted.

        Args:
            epoch: the ranks' life.
            request: the request.
            keys: of the blocks that it need not compute.
            other: a fetch that brings the first of those that it lacks. What it does not bring is computed.
        """
        try:
            async with asyncio.timeout(self.fetch_deadline_s):
                if other is None:
                    await self._fetch(epoch, request.tenant, keys)
                else:
                    # It may bring more than this request needs, which must not wait longer than for its own blocks.
                    usable = self._scheduler.blocks.match(keys).usable
                    await asyncio.wait((other,), timeout=self.recompute_s((len(keys) - usable) * BLOCK_SIZE))
        except TimeoutError:
            logger.warning("the store for KV blocks has not kept its deadline")
        except Exception:
            logger.exception("the store for KV blocks has failed")
        finally:
            # Also if it was the store that raised CancelledError: a request must not be held for ever.
            if self._epoch is epoch and self._fetches.get(request.id) is asyncio.current_task():
                del self._fetches[request.id]
                self._scheduler.hold(request.id, held=False)
                self._on_change()

    async def _fetch(self, epoch: _Epoch, tenant: str, keys: list[BlockKey]) -> None:
        links = list(remote_keys.chain(epoch.seed(tenant), keys))
        hot_window, end = self._hot_window, len(keys)
        parts, seen = self._scheduler.blocks.parts(end), self._scheduler.blocks.first_seen(end * BLOCK_SIZE)
        cold, ahead, hot_bytes = hot_window is not None, 0, 0
        if hot_window is not None:
            ahead = hot_window.size
            hot_bytes = (hot_window.sink + ahead) * epoch.view.forms[False].length * len(epoch.view.heads)
        fetch_part = partial(self._fetch_part, epoch, tenant, keys, links)
        if parts[cold]:
            reached = await fetch_part(parts[cold], cold=cold, ahead=ahead, further_bytes=hot_bytes)
            if reached is None:
                return
            end = min(end, reached + ahead)
            parts = self._scheduler.blocks.parts(end)
            # A text that ends earlier has its window earlier, too.
            earlier = [index for index in parts[cold] if index < seen]
            if earlier:
                rest = end - 1 - earlier[-1]
                reached = await fetch_part(earlier, cold=cold, ahead=rest, further_bytes=hot_bytes, needs_all=True)
                if reached is None or reached <= earlier[-1]:
                    return
            if self._scheduler.blocks.match(keys[:end]).usable == end:
                return
        if cold and parts.hot:
            is_apart = len(parts.hot) <= parts.hot[-1]
            await fetch_part(parts.hot, cold=False, ahead=0, further_bytes=0, needs_all=is_apart)

    async def _fetch_part(
        self,
        epoch: _Epoch,
        tenant: str,
        keys: list[BlockKey],
        links: list[bytes],
        indices: Sequence[int],
        *,
        cold: bool,
        ahead: int,
        further_bytes: int,
        needs_all: bool = False,
    ) -> int | None:
        """Fetch those of the blocks at `indices` that are not in the other tiers; they are of use with `ahead` more,
        which take `further_bytes`. With `needs_all` a part of them is of no use.

        Returns:
            The index of the first block that is still missing, or the end of `indices`; None: the store does not serve
            this request.
        """
        blocks = self._scheduler.blocks
        blocks.host.keep((keys[index] for index in reversed(indices)), cold=cold)
        missing = [index for index in indices if not blocks.has(keys[index], cold=cold)]
        if not missing:
            return max(indices, default=-1) + 1
        usable = blocks.match(keys).usable

        def recompute_s(count: int) -> float:
            if count < (len(missing) if needs_all else 1):
                return self.recompute_s(0)
            end = min(len(keys), missing[min(count, len(missing)) - 1] + 1 + ahead)
            return self.recompute_s(max(0, end - usable) * BLOCK_SIZE)

        wanted = [keys[index] for index in missing]
        names = [remote_keys.block_name(links[index], cold=cold) for index in missing]
        count = await self._receive(epoch, tenant, wanted, names, recompute_s, cold=cold, further_bytes=further_bytes)
        if count is None:
            return None
        return missing[count] if count < len(missing) else max(indices) + 1

    async def _receive(
        self,
        epoch: _Epoch,
        tenant: str,
        keys: list[BlockKey],
        names: list[bytes],
        recompute_s: Callable[[int], float],
        *,
        cold: bool,
        further_bytes: int,
    ) -> int | None:
        """Fetch these blocks to host memory. Returns how many of the first ones have come; None: it is of no use to ask
        for others.
        """
        shared, host = self._scheduler.slots, self._scheduler.blocks.host
        names = names[: host.fillable(cold=cold, tenant=tenant)]
        if not names or shared is None:
            return None
        arriving, count = _Arriving(self._scheduler, shared, epoch.view, tenant, len(names), cold=cold), 0
        try:
            result = await self._store.fetch(
                tenant, names, epoch.view.heads, epoch.view.forms[cold], recompute_s, arriving.into, further_bytes
            )
            complete = min(max(0, result.blocks), len(arriving.slots))
            await arriving.copy_apart(complete)
            count = complete
        finally:
            arriving.end()
            # After a restart of the ranks these are the numbers of other slots.
            if self._epoch is epoch and self._scheduler.slots is shared:
                host = self._scheduler.blocks.host
                for slots in arriving.slots[count:]:
                    host.give_back(slots)
                for key, slots in reversed(list(zip(keys, arriving.slots[:count], strict=False))):
                    host.adopt(key, slots, cold=cold)
        if self._epoch is epoch:
            self._fetched += count
            epoch.writer.mark(names[:count])
            if result.outcome == "absent":
                epoch.writer.forget(names)
        return count if result.outcome in ("fetched", "absent") else None
