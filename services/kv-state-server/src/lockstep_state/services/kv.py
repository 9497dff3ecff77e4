"""The Kv service: blocks of KV cache, looked up by chain, put and got in streams.

One block of each call is in memory at a time when blocks come in, and one or a few small ones when they go out. Calls
that move blocks are limited in number, and the blocks of all of them in bytes.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack

import grpc
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.errors import invalid
from lockstep_common.grpc_decoding import decoded

from lockstep_state import metrics
from lockstep_state.backend import Backend, Block
from lockstep_state.block_values import Parsed, is_content, pack, unpack
from lockstep_state.keys import Kind, key_of
from lockstep_state.services.calls import Running, call, unary
from lockstep_state.services.checks import (
    SCHEMA,
    Times,
    check_count,
    check_hash,
    check_header,
    check_heads,
    check_key,
    check_name,
)
from lockstep_state.services.transfers import Transfers
from lockstep_state.settings import StateSettings

_CHUNK_BYTES = 1 << 20
_LOOK_UP = 64
"""Blocks of a chain looked up at a time; the first one that is not there ends it."""
_GET = 4
"""Blocks read from the store at a time, at most."""
_GET_BYTES = 4 << 20
"""Of these blocks, unless one is larger."""
_MAX_RANGES = 64
_NUMBER_BYTES = 4


class Kv(state_pb2_grpc.KvServicer):
    """Cold blocks of KV cache."""

    def __init__(self, backend: Backend, settings: StateSettings, running: Running) -> None:
        self._backend = backend
        self._times = Times(settings.ttl_s, settings.max_ttl_s)
        self.timeout_s = settings.call_timeout_s
        self.running = running
        self._transfer_timeout_s = settings.transfer_timeout_s
        self._max_batch = settings.max_batch
        self._max_block_bytes = settings.max_block_bytes
        self._transfers = Transfers(settings.max_transfers, settings.transfer_bytes)

    @unary("Kv.LookUp")
    async def LookUp(  # noqa: N802
        self, request: state_pb2.LookUpBlocksRequest
    ) -> state_pb2.LookUpBlocksResponse:
        """How many leading blocks are there for all heads."""
        check_name("tenant", request.tenant)
        check_count("hashes", len(request.hashes), self._max_batch)
        check_count("heads", len(request.heads), _MAX_RANGES)
        for each in request.hashes:
            check_hash("hashes", each)
        for heads in request.heads:
            check_heads("heads", heads)
        response = state_pb2.LookUpBlocksResponse()
        for start in range(0, len(request.hashes), _LOOK_UP):
            part = request.hashes[start : start + _LOOK_UP]
            present = await self._count(request.tenant, part, request.heads, response)
            if present < len(part):
                break
        return response

    async def Put(  # noqa: N802
        self, requests: AsyncIterator[state_pb2.PutBlocksRequest], context: grpc.aio.ServicerContext
    ) -> state_pb2.PutBlocksResponse:
        """Store blocks, each as soon as it is complete."""
        async with call(context, "Kv.Put", self.running, self._transfer_timeout_s):
            with self._transfers.one_more():
                return state_pb2.PutBlocksResponse(outcomes=await self._put(requests))
        raise AssertionError("`call` has ended the call")

    async def Get(  # noqa: N802
        self, request: state_pb2.GetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Give the blocks that are there."""
        async with call(context, "Kv.Get", self.running, self._transfer_timeout_s, gives_stream=True):
            with self._transfers.one_more():
                check_name("tenant", decoded(request).tenant)
                check_count("keys", len(request.keys), self._max_batch)
                for key in request.keys:
                    check_key("keys", key)
                for start in range(0, len(request.keys), _LOOK_UP):
                    part = request.keys[start : start + _LOOK_UP]
                    sizes = await self._backend.sizes(_block_keys(request.tenant, part))
                    for places in _groups(sizes):
                        async with self._transfers.room(sum(sizes[at] for at in places)):
                            await self._give(request, [start + at for at in places], context)

    async def _give(
        self, request: state_pb2.GetBlocksRequest, places: Sequence[int], context: grpc.aio.ServicerContext
    ) -> None:
        """Give those of the blocks that are at these places of the request."""
        blocks = await self._get(request.tenant, [request.keys[at] for at in places])
        for at, block in zip(places, blocks, strict=True):
            for message in _messages(at, block):
                await context.write(message)

    async def _count(
        self,
        tenant: str,
        hashes: Sequence[bytes],
        ranges: Sequence[state_pb2.HeadRange],
        response: state_pb2.LookUpBlocksResponse,
    ) -> int:
        """Count leading blocks that are there into the response; how many of these."""
        keys = [_block_key(tenant, each, heads) for each in hashes for heads in ranges]
        sizes = await self._backend.sizes(keys)
        for at in range(len(hashes)):
            parts = sizes[at * len(ranges) : (at + 1) * len(ranges)]
            if not all(parts):
                return at
            response.present += 1
            response.stored_bytes += sum(parts)
        return len(hashes)

    async def _put(self, requests: AsyncIterator[state_pb2.PutBlocksRequest]) -> list[state_pb2.PutOutcome]:
        outcomes: list[state_pb2.PutOutcome] = []
        tenant, ttl_s = "", 0.0
        header: state_pb2.BlockHeader | None = None
        content = bytearray()
        async with AsyncExitStack() as room:
            async for request in requests:
                if not tenant:
                    tenant = check_name("tenant", decoded(request).tenant)
                    ttl_s = self._times.check("ttl_s", request.ttl_s)
                if decoded(request).HasField("header"):
                    if header is not None:
                        raise invalid("header", "comes before the block before it is complete")
                    header = request.header
                    check_header(header, self._max_block_bytes)
                    check_count("blocks", len(outcomes) + 1, self._max_batch)
                    await room.enter_async_context(self._transfers.room(header.length))
                if header is None:
                    raise invalid("data", "comes without a header")
                content += request.data
                if len(content) > header.length:
                    raise invalid("data", "is longer than its header says")
                if len(content) == header.length:
                    outcomes.append(await self._store(tenant, ttl_s, header, content))
                    header, content = None, bytearray()
                    await room.aclose()
        if header is not None:
            raise invalid("data", "is shorter than its header says")
        return outcomes

    async def _store(
        self, tenant: str, ttl_s: float, header: state_pb2.BlockHeader, content: bytearray
    ) -> state_pb2.PutOutcome:
        """Store a block. Its content is taken away, so that there is no copy of it while it is sent to the store."""
        if not is_content(header, content):
            metrics.BLOCKS.labels("refused").inc()
            return state_pb2.PUT_OUTCOME_INVALID
        key = _block_key(tenant, header.key.hash, header.key.heads)
        block = Block(key_of(Kind.TENANT, tenant), key, pack(header, content), ttl_s)
        content.clear()
        (stored,) = await self._backend.put([block])
        metrics.BLOCKS.labels("stored" if stored else "full").inc()
        metrics.BLOCK_BYTES.labels("in").inc(header.length if stored else 0)
        return state_pb2.PUT_OUTCOME_STORED if stored else state_pb2.PUT_OUTCOME_FULL

    async def _get(self, tenant: str, keys: Sequence[state_pb2.BlockKey]) -> list[Parsed | None]:
        stored = _block_keys(tenant, keys)
        values = await self._backend.get(stored)
        blocks = [
            None if value is None else unpack(value, key, SCHEMA) for key, value in zip(keys, values, strict=True)
        ]
        damaged = [
            key for key, value, block in zip(stored, values, blocks, strict=True) if value is not None and block is None
        ]
        if damaged:
            await self._backend.discard(key_of(Kind.TENANT, tenant), damaged)
            metrics.BLOCKS.labels("damaged").inc(len(damaged))
        hits = len(blocks) - blocks.count(None)
        metrics.BLOCKS.labels("hit").inc(hits)
        metrics.BLOCKS.labels("miss").inc(len(blocks) - hits)
        return blocks


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """The places of blocks that are read together. One of size 0 is not there, or damaged, which reading it ends."""
    group: list[int] = []
    for at, size in enumerate(sizes):
        if group and (len(group) == _GET or sum(sizes[each] for each in group) + size > _GET_BYTES):
            yield group
            group = []
        group.append(at)
    yield group


def _block_keys(tenant: str, keys: Sequence[state_pb2.BlockKey]) -> list[str]:
    return [_block_key(tenant, key.hash, key.heads) for key in keys]


def _block_key(tenant: str, block_hash: bytes, heads: state_pb2.HeadRange) -> str:
    numbers = (number.to_bytes(_NUMBER_BYTES, "big") for number in (heads.first, heads.count))
    return key_of(Kind.BLOCK, tenant, block_hash, *numbers)


def _messages(index: int, block: Parsed | None) -> Iterator[state_pb2.GetBlocksResponse]:
    """What gives a block, one by one: each is a copy of its part of the content."""
    if block is None:
        return
    header, content = block
    metrics.BLOCK_BYTES.labels("out").inc(len(content))
    for start in range(0, len(content), _CHUNK_BYTES):
        part = bytes(content[start : start + _CHUNK_BYTES])
        yield state_pb2.GetBlocksResponse(index=index, data=part, header=None if start else header)
