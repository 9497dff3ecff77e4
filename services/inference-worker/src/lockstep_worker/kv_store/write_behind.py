"""The blocks that wait to be stored: a queue bounded in bytes, and one task that stores them in batches.

The caller that offers a block never waits. What does not fit is dropped and counted: it is in no other place, and is
computed again if it is ever needed. Of blocks that were taken and are dropped later the caller is told. Tenants are
stored in turn, a batch of each. In a full queue a tenant within its share takes the room of the newest blocks of the
tenant that is furthest beyond its own. A tenant for which the server has no room waits alone.
"""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import xxhash
from lockstep_api.v1 import state_pb2
from lockstep_common.state_channel import StateAwayError, StateRefusedError
from lockstep_engine.remote_store import BlockForm, HeadRange, StoredBlock

from lockstep_worker import metrics
from lockstep_worker.kv_store.client import KvClient
from lockstep_worker.kv_store.parts import to_header, to_key

logger = logging.getLogger("lockstep.worker")

_BATCH_BYTES = 8 << 20
_BATCH_BLOCKS = 256
_SLICE_BYTES = 1 << 20
"""Summed up and sent at a time, about 0.1 ms each; in between the event loop serves others."""
_OFFER_BYTES = 32 << 20
"""Copied by one `offer`, about 5 ms; the loop waits for it."""
_PUT_TIMEOUT_S = 10.0
PAUSE_S = 0.5
"""After a failure; of one tenant, after the server had no room for its blocks."""
_TRIES = 2
_CHECK_S = 0.1
"""How often `flush` looks whether the server is away."""

_Key = tuple[str, bytes, HeadRange]

_OUTCOMES = {
    state_pb2.PUT_OUTCOME_STORED: "stored",
    state_pb2.PUT_OUTCOME_FULL: "full",
    state_pb2.PUT_OUTCOME_INVALID: "refused",
}


@dataclass
class Waiting:
    """A part of a block that is not stored yet."""

    tenant: str
    hash: bytes
    heads: HeadRange
    form: BlockForm
    content: bytes
    tries: int = 0

    @property
    def key(self) -> _Key:
        """Names it in the queue."""
        return self.tenant, self.hash, self.heads


class WriteBehind:
    """Stores blocks later.

    Args:
        client: the state server.
        max_bytes: of the blocks that wait.
        ttl_s: for how long the server keeps them.
        tenant_share: part of `max_bytes` that a tenant's blocks may take at the cost of others.
    """

    def __init__(self, client: KvClient, max_bytes: int, ttl_s: float, tenant_share: float = 1.0) -> None:
        self.waiting_bytes = 0
        self.on_lost: Callable[[Sequence[bytes]], None] = lambda _: None
        """See `RemoteStore.on_lost`. What the server itself does not take is not lost: it would not take it again."""
        self._client = client
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._share = max_bytes * tenant_share
        self._queues: OrderedDict[str, deque[Waiting]] = OrderedDict()
        """By tenant, the one whose turn it is first; none is empty."""
        self._batch: list[Waiting] = []
        """What is being stored. It waits as well, but in no queue."""
        self._bytes: Counter[str] = Counter()
        """Of each tenant's blocks that wait."""
        self._paused: dict[str, float] = {}
        """By tenant for which the server had no room: the loop's time of its next turn."""
        self._keys: set[_Key] = set()
        self._wake = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to store."""
        self._writing = asyncio.create_task(self._write_forever())

    def offer(self, tenant: str, blocks: Sequence[StoredBlock]) -> int:
        """Copy blocks into the queue; how many leading ones were taken."""
        taken = copied = 0
        for block in blocks:
            key = (tenant, block.hash, block.heads)
            size = block.content.nbytes
            if key not in self._keys:
                if copied + size > max(_OFFER_BYTES, size) or not self._make_room(tenant, size):
                    break
                waiting = Waiting(tenant, block.hash, block.heads, block.form, bytes(block.content))
                self._queues.setdefault(tenant, deque()).append(waiting)
                self._keys.add(key)
                self._count(tenant, size)
                copied += size
            taken += 1
        if dropped := len(blocks) - taken:
            metrics.REMOTE_PUTS.labels("dropped").inc(dropped)
        if copied:
            metrics.REMOTE_QUEUE_BYTES.set(self.waiting_bytes)
            self._is_idle.clear()
            self._wake.set()
        return taken

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is stored, no longer than this, and not for a server that is away."""
        if self._writing is None:
            return
        ends_at = asyncio.get_running_loop().time() + timeout_s
        while not self._client.is_away and (left_s := ends_at - asyncio.get_running_loop().time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_CHECK_S, left_s)):
                    await self._is_idle.wait()
                    return

    async def close(self) -> None:
        """Stop. What still waits is lost."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        left = [*self._batch, *(each for queue in self._queues.values() for each in queue)]
        if left:
            logger.info("blocks were not stored before the end", extra={"blocks": len(left)})
            metrics.REMOTE_PUTS.labels("dropped").inc(len(left))
            self._queues.clear()
            self._forget(left)

    def _make_room(self, tenant: str, size: int) -> bool:
        """Whether a tenant's block fits now; blocks of tenants beyond their shares are dropped for it."""
        while self.waiting_bytes + size > self._max_bytes:
            if self._bytes[tenant] + size > self._share:
                return False
            furthest = max(self._queues, key=lambda each: (self._bytes[each], each), default=None)
            if furthest is None or self._bytes[furthest] <= self._share:
                return False
            self._lose([self._queues[furthest].pop()])
            self._remove_if_empty(furthest)
            metrics.REMOTE_PUTS.labels("dropped").inc()
        return True

    async def _write_forever(self) -> None:
        while True:
            await self._wake.wait()
            await self._client.is_reachable.wait()
            batch = self._batch = self._next_batch()
            if not batch and self._queues:
                await self._wait_for_turn()
                continue
            if not batch:
                self._wake.clear()
                self._is_idle.set()
                continue
            try:
                pause_s = await self._write(batch)
            except Exception:
                logger.exception("blocks could not be stored")
                metrics.REMOTE_PUTS.labels("failed").inc(len(batch))
                self._lose(batch)
                pause_s = PAUSE_S
            self._batch = []
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _wait_for_turn(self) -> None:
        """All tenants whose blocks wait are paused: wait for the end of the first pause, or for further blocks."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(self._paused.values())):
                await self._wake.wait()
        self._wake.set()

    def _next_batch(self) -> list[Waiting]:
        """The oldest blocks of the tenant whose turn it is, out of its queue; its next turn is after all others."""
        now = asyncio.get_running_loop().time()
        self._paused = {tenant: until for tenant, until in self._paused.items() if until > now}
        tenant = next((each for each in self._queues if each not in self._paused), None)
        if tenant is None:
            return []
        batch: list[Waiting] = []
        queue, size = self._queues[tenant], 0
        while queue and (not batch or (size + len(queue[0].content) <= _BATCH_BYTES and len(batch) < _BATCH_BLOCKS)):
            batch.append(queue.popleft())
            size += len(batch[-1].content)
        self._queues.move_to_end(tenant)
        self._remove_if_empty(tenant)
        return batch

    def _put_back(self, batch: Sequence[Waiting]) -> None:
        """Try the rest of a batch again, before anything else."""
        if not batch:
            return
        tenant = batch[0].tenant
        self._queues.setdefault(tenant, deque()).extendleft(reversed(batch))
        self._queues.move_to_end(tenant, last=False)

    def _remove_if_empty(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]

    async def _write(self, batch: Sequence[Waiting]) -> float:
        """Store a batch; for how long to pause then."""
        try:
            response = await self._client.put(self._messages(batch), _PUT_TIMEOUT_S)
        except StateRefusedError:
            metrics.REMOTE_PUTS.labels("refused").inc(len(batch))
            self._forget(batch)
            return 0.0
        except StateAwayError:
            for each in batch:
                each.tries += 1
            # Blocks that were put back may be joined by fresh ones, which have all their tries yet.
            failed = [each for each in batch if each.tries >= _TRIES]
            metrics.REMOTE_PUTS.labels("failed").inc(len(failed))
            self._lose(failed)
            self._put_back([each for each in batch if each.tries < _TRIES])
            return PAUSE_S
        outcomes = [_OUTCOMES.get(each, "failed") for each in response.outcomes]
        outcomes = (outcomes + ["failed"] * len(batch))[: len(batch)]
        for each, outcome in zip(batch, outcomes, strict=True):
            metrics.REMOTE_PUTS.labels(outcome).inc()
            metrics.REMOTE_BYTES.labels("out").inc(len(each.content) if outcome == "stored" else 0)
        self._forget(batch)
        self.on_lost([each.hash for each, outcome in zip(batch, outcomes, strict=True) if outcome == "failed"])
        if "full" in outcomes:
            self._paused[batch[0].tenant] = asyncio.get_running_loop().time() + PAUSE_S
        return 0.0

    def _lose(self, blocks: Sequence[Waiting]) -> None:
        """Blocks do not wait any more, and were not stored."""
        self._forget(blocks)
        self.on_lost([each.hash for each in blocks])

    def _forget(self, blocks: Sequence[Waiting]) -> None:
        """Blocks do not wait any more."""
        for each in blocks:
            self._keys.discard(each.key)
            self._count(each.tenant, -len(each.content))
        metrics.REMOTE_QUEUE_BYTES.set(self.waiting_bytes)

    def _count(self, tenant: str, size: int) -> None:
        self.waiting_bytes += size
        self._bytes[tenant] += size
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    async def _messages(self, batch: Sequence[Waiting]) -> AsyncIterator[state_pb2.PutBlocksRequest]:
        for number, each in enumerate(batch):
            checksum = xxhash.xxh3_64()
            slices = [each.content[start : start + _SLICE_BYTES] for start in range(0, len(each.content), _SLICE_BYTES)]
            for part in slices:
                checksum.update(part)
                await asyncio.sleep(0)
            header = to_header(to_key(each.hash, each.heads), each.form, checksum.intdigest())
            for at, part in enumerate(slices):
                message = state_pb2.PutBlocksRequest(data=part, header=None if at else header)
                if not number and not at:
                    message.tenant, message.ttl_s = each.tenant, self._ttl_s
                yield message
