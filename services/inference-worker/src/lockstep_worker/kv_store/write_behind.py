"""The blocks that wait to be stored: a queue bounded in bytes, and one task that stores them in batches.

Who offers a block never waits. What does not fit is dropped and counted: it is in no other place, and is computed again
if it is ever needed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import xxhash
from lockstep_api.v1 import state_pb2
from lockstep_engine.remote_store import BlockForm, HeadRange, StoredBlock

from lockstep_worker import metrics
from lockstep_worker.kv_store.client import KvClient, StateAwayError, StateRefusedError
from lockstep_worker.kv_store.parts import to_header, to_key

logger = logging.getLogger("lockstep.worker")

_BATCH_BYTES = 8 << 20
_BATCH_BLOCKS = 256
_SLICE_BYTES = 1 << 20
"""Summed up and sent at a time, about 0.1 ms each; in between the event loop serves others."""
_OFFER_BYTES = 32 << 20
"""Copied by one `offer`, about 5 ms; the loop waits for it."""
_PUT_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
"""After a failure, and after the server had no room."""
_TRIES = 2

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
    """

    def __init__(self, client: KvClient, max_bytes: int, ttl_s: float) -> None:
        self.waiting_bytes = 0
        self._client = client
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._queue: deque[Waiting] = deque()
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
                if self.waiting_bytes + size > self._max_bytes or copied + size > max(_OFFER_BYTES, size):
                    break
                self._queue.append(Waiting(tenant, block.hash, block.heads, block.form, bytes(block.content)))
                self._keys.add(key)
                self.waiting_bytes += size
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
        if self._client.is_away or self._writing is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()

    async def close(self) -> None:
        """Stop. What still waits is lost."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._queue:
            logger.info("blocks were not stored before the end", extra={"blocks": len(self._queue)})
            metrics.REMOTE_PUTS.labels("dropped").inc(len(self._queue))
            self._remove(len(self._queue))

    async def _write_forever(self) -> None:
        while True:
            await self._wake.wait()
            await self._client.is_reachable.wait()
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                self._is_idle.set()
                continue
            try:
                pause_s = await self._write(batch)
            except Exception:
                logger.exception("blocks could not be stored")
                metrics.REMOTE_PUTS.labels("failed").inc(len(batch))
                self._remove(len(batch))
                pause_s = _PAUSE_S
            if pause_s:
                await asyncio.sleep(pause_s)

    def _next_batch(self) -> list[Waiting]:
        """Blocks of one tenant from the head of the queue, where they stay until they are stored."""
        batch: list[Waiting] = []
        size = 0
        for each in self._queue:
            size += len(each.content)
            if batch and (each.tenant != batch[0].tenant or size > _BATCH_BYTES or len(batch) >= _BATCH_BLOCKS):
                break
            batch.append(each)
        return batch

    async def _write(self, batch: Sequence[Waiting]) -> float:
        """Store a batch; for how long to pause then."""
        try:
            response = await self._client.put(self._messages(batch), _PUT_TIMEOUT_S)
        except StateRefusedError:
            metrics.REMOTE_PUTS.labels("refused").inc(len(batch))
            self._remove(len(batch))
            return 0.0
        except StateAwayError:
            for each in batch:
                each.tries += 1
            if batch[0].tries >= _TRIES:
                metrics.REMOTE_PUTS.labels("failed").inc(len(batch))
                self._remove(len(batch))
            return _PAUSE_S
        outcomes = [_OUTCOMES.get(each, "failed") for each in response.outcomes]
        outcomes = (outcomes + ["failed"] * len(batch))[: len(batch)]
        for each, outcome in zip(batch, outcomes, strict=True):
            metrics.REMOTE_PUTS.labels(outcome).inc()
            metrics.REMOTE_BYTES.labels("out").inc(len(each.content) if outcome == "stored" else 0)
        self._remove(len(batch))
        return _PAUSE_S if "full" in outcomes else 0.0

    def _remove(self, count: int) -> None:
        for _ in range(count):
            each = self._queue.popleft()
            self._keys.discard(each.key)
            self.waiting_bytes -= len(each.content)
        metrics.REMOTE_QUEUE_BYTES.set(self.waiting_bytes)

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
