"""A Kv service in this process whose answers tests can change, and a KvStore on it."""

import asyncio
import contextlib
import hashlib

import grpc
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import until
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.grpc_tls import dial_plain
from lockstep_common.telemetry import REGISTRY
from lockstep_engine.remote_store import BlockForm, HeadRange, StoredBlock
from lockstep_worker.kv_store import KvStore, StoreOptions

FORM = BlockForm("float8_e4m3fn", (2, 4, 32), 256)
HEADS = (HeadRange(0, 4), HeadRange(4, 4))
CHUNK_BYTES = 100
"""Of the content in one message: a part has three."""


class ScriptedKv(state_pb2_grpc.KvServicer, health_pb2_grpc.HealthServicer):
    """Keeps blocks in a dictionary."""

    def __init__(self):
        self.blocks = {}
        """By tenant, hash, first head and number of heads: header and content."""
        self.answers = asyncio.Event()
        """Clear: nothing is answered."""
        self.answers.set()
        self.sends = asyncio.Event()
        """Clear: the messages of Get after the first `before` are held back."""
        self.sends.set()
        self.before = 0
        self.mangle = list
        """Changes the messages of Get."""
        self.put_outcome = state_pb2.PUT_OUTCOME_STORED
        self.put_status = None
        self.has_room_for_probes = True
        self.calls = []
        self.on_put = lambda tenant: None
        """Called with the tenant of each Put that is answered."""

    async def Check(self, request, context):
        await self.answers.wait()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def LookUp(self, request, context):
        self.calls.append("LookUp")
        await self.answers.wait()
        present = 0
        for block_hash in request.hashes:
            keys = [(request.tenant, block_hash, heads.first, heads.count) for heads in request.heads]
            if not all(key in self.blocks for key in keys):
                break
            present += 1
        return state_pb2.LookUpBlocksResponse(present=present)

    async def Put(self, requests, context):
        self.calls.append("Put")
        await self.answers.wait()
        tenant, headers, contents = "", [], []
        async for request in requests:
            tenant = tenant or request.tenant
            if request.HasField("header"):
                headers.append(request.header)
                contents.append(bytearray())
            contents[-1].extend(request.data)
        if self.put_status is not None:
            await context.abort(self.put_status, "no")
        self.on_put(tenant)
        is_refused = tenant == "-probe" and not self.has_room_for_probes
        outcome = state_pb2.PUT_OUTCOME_FULL if is_refused else self.put_outcome
        for header, content in zip(headers, contents, strict=True):
            assert header.length == len(content)
            assert header.checksum == xxhash.xxh3_64_intdigest(bytes(content))
            key = (tenant, header.key.hash, header.key.heads.first, header.key.heads.count)
            if outcome == state_pb2.PUT_OUTCOME_STORED:
                self.blocks[key] = (header, bytes(content))
        return state_pb2.PutBlocksResponse(outcomes=[outcome] * len(headers))

    async def Get(self, request, context):
        self.calls.append("Get")
        await self.answers.wait()
        messages = []
        for index, key in enumerate(request.keys):
            found = self.blocks.get((request.tenant, key.hash, key.heads.first, key.heads.count))
            if found is None:
                continue
            header, content = found
            step = max(CHUNK_BYTES, len(content) // 3)
            parts = [content[start : start + step] for start in range(0, len(content), step)]
            made = [state_pb2.GetBlocksResponse(index=index, data=part) for part in parts]
            made[0].header.CopyFrom(header)
            messages += made
        if request.tenant != "-probe":
            messages = self.mangle(messages)
        for number, message in enumerate(messages):
            if number >= self.before:
                await self.sends.wait()
            await context.write(message)

    def probes(self):
        """How often the link was measured."""
        return sum(tenant == "-probe" for tenant, *_ in self.blocks)


def block_hash(name):
    return hashlib.sha256(str(name).encode()).digest()


def content_of(name, rank, length=FORM.length):
    """What a rank's part of a block contains."""
    return hashlib.shake_128(f"{name}/{rank}".encode()).digest(length)


def parts_of(names, form=FORM):
    """The parts of blocks, as an engine offers them."""
    return [
        StoredBlock(block_hash(name), heads, form, memoryview(content_of(name, rank, form.length)))
        for name in names
        for rank, heads in enumerate(HEADS)
    ]


class Memory:
    """Where blocks are fetched to."""

    def __init__(self, length=FORM.length):
        self.length = length
        self.parts = {}

    def __call__(self, block, rank):
        return memoryview(self.parts.setdefault((block, rank), bytearray(self.length)))

    def has(self, names, count):
        """Whether the leading blocks are these."""
        return all(
            bytes(self.parts[at, rank]) == content_of(names[at], rank, self.length)
            for at in range(count)
            for rank in range(len(HEADS))
        )


async def fetch(store, names, into, *, tenant="t", recompute_s=1000.0, form=FORM, heads=HEADS, further_bytes=0):
    """Fetch blocks that would take `recompute_s` seconds each to compute."""
    hashes = [block_hash(name) for name in names]
    return await store.fetch(tenant, hashes, heads, form, lambda count: count * recompute_s, into, further_bytes)


@contextlib.asynccontextmanager
async def serving(kv, target):
    """The service at a target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    state_pb2_grpc.add_KvServicer_to_server(kv, server)
    health_pb2_grpc.add_HealthServicer_to_server(kv, server)
    server.add_insecure_port(target)
    await server.start()
    try:
        yield kv
    finally:
        kv.answers.set()
        kv.sends.set()
        await server.stop(0)


@contextlib.asynccontextmanager
async def opened(target, *, is_measured=True, **changes):
    """A store that knows its link."""
    options = {"timeout_s": 20.0, "fetch_timeout_s": 20.0, "queue_bytes": 8 << 20, "ttl_s": 60.0, "name": "w0"}
    async with KvStore(StoreOptions(target=target, **options | changes), dial_plain) as store:
        if is_measured:
            await until(lambda: store.link.estimate() is not None)
        yield store


async def stored(store, names, **options):
    """Store blocks and wait until they are."""
    parts = parts_of(names, **options)
    assert store.offer("t", parts) == len(parts)
    await store.flush(30.0)


def value(name, **labels):
    """Of a metric of the worker's store, without the beginning of its name."""
    return REGISTRY.get_sample_value(f"lockstep_worker_remote_cache_{name}", labels) or 0.0
