"""Eight clients that use all services of a state server, and know what may be given to them.

Each client has names of its own and makes contents from names, so that it knows a wrong answer whenever it comes.
"""

import asyncio
import contextlib
import hashlib
import itertools
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field

import grpc
from backends import PATIENCE_S
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_api.v1 import state_pb2
from odd_requests import NOT_SENT
from state_serving import Client
from test_journal_service import piece, record, write
from test_kv_service import get, header, key, put

CLIENTS = 8
DEADLINE_S = 60.0
"""The clients' own: what ends a call is the state server."""
_PAUSE_S = 0.01
_BLOCK_BYTES = 3000
_TTL_S = 36_000.0

OUTCOME = state_pb2.WriteOutcome.Name


@dataclass
class Result:
    """How one call has ended: OK, or the name of a status or of an outcome."""

    operation: str
    status: str
    began: float
    took_s: float


def token(stream_id, position):
    return zlib.crc32(f"{stream_id}:{position}".encode()) % 50_000


def content_of(name):
    digest = hashlib.sha256(name.encode()).digest()
    return (digest * (_BLOCK_BYTES // len(digest) + 1))[:_BLOCK_BYTES]


@dataclass
class Load:
    """The clients, what came of their calls, and what was wrong.

    Args:
        client: the stubs.
        may_lose: the store may lose what it has acknowledged, as after a failover.
    """

    client: Client
    seed: int
    may_lose: bool = False
    results: list[Result] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def since(self, began, *operations):
        return [each for each in self.results if each.began >= began and each.operation in (operations or OPERATIONS)]

    def statuses(self, began=0.0, *operations):
        return Counter(each.status for each in self.since(began, *operations))

    async def works(self, within_s=PATIENCE_S):
        """Wait until each operation is done again, many times in a row."""
        end = time.monotonic() + within_s
        while True:
            began = time.monotonic()
            await self.goes_on()
            if set(self.statuses(began)) == {"OK"}:
                return
            assert time.monotonic() < end, self.statuses(began)

    async def goes_on(self, rounds=2):
        """Wait until the clients have made some more calls of each kind, however they end."""
        began = time.monotonic()
        while any(len(self.since(began, operation)) < rounds * CLIENTS for operation in OPERATIONS):
            assert not self.wrong, self.wrong[:5]
            assert time.monotonic() < began + 2 * PATIENCE_S, "the clients stand still"
            await asyncio.sleep(0.02)

    async def fails(self, began):
        """Wait until a call has failed that began since then. Unlike a state of health, no pause hides it."""
        end = time.monotonic() + PATIENCE_S
        while not set(self.statuses(began)) - {"OK"}:
            assert time.monotonic() < end, "no call has failed"
            await asyncio.sleep(0.01)

    async def serves(self, expected):
        """Wait until the health service says whether the store can be used."""
        stub = health_pb2_grpc.HealthStub(self.client.channel)
        request = health_pb2.HealthCheckRequest(service="lockstep.v1.Journal")
        end = time.monotonic() + PATIENCE_S
        while (await stub.Check(request)).status != expected:
            assert time.monotonic() < end, "the health has not changed"
            await asyncio.sleep(0.01)


class _User:
    """One client."""

    def __init__(self, load, number):
        self._load = load
        self._client = load.client
        self._random = random.Random(load.seed * CLIENTS + number)
        self._name = f"{load.client.tenant}-{number}"
        self._numbers = itertools.count(1)
        self._stream_id = f"{self._name}-s0"
        self._length, self._acknowledged, self._epoch, self._is_open = 0, 0, 1, False
        self._may_be_taken = False
        self._bound = (0, 0)
        """The last worker that was acknowledged, and the last one tried."""
        self._lease_epoch = 0
        self._put = set()

    async def run(self):
        for operation in itertools.cycle(OPERATIONS):
            began = time.monotonic()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    status = await getattr(self, f"_{operation}")()
            except grpc.aio.AioRpcError as error:
                # The client's own library calls it INTERNAL if the server has gone while it sends.
                status = "UNAVAILABLE" if error.details() == NOT_SENT else error.code().name
            except TimeoutError:
                status = "the client's deadline"
            self._load.results.append(Result(operation, status, began, time.monotonic() - began))
            await asyncio.sleep(_PAUSE_S)

    def _check(self, is_right, what, *values):
        if not is_right:
            self._load.wrong.append(f"{what}: {values}")

    async def _append(self):
        position = self._length
        ids = [token(self._stream_id, at) for at in range(position, position + self._random.randrange(1, 5))]
        fields = {"pieces": [piece(0, position, *ids)], "epoch": self._epoch}
        if not self._is_open:
            fields["record"] = record(model=self._stream_id)
        made = state_pb2.AppendRequest(writes=[write(self._client, self._stream_id, **fields)])
        (result,) = (await self._client.journal.Append(made)).results
        match OUTCOME(result.outcome).removeprefix("WRITE_OUTCOME_"):
            case "OK":
                self._length = self._acknowledged = position + len(ids)
                self._is_open = True
                if self._length > 200:
                    await self._renew_stream()
            case "UNKNOWN":
                self._check(self._load.may_lose or not self._acknowledged, "a stream is lost", self._acknowledged)
                self._length, self._acknowledged, self._is_open = 0, 0, False
            case "GAP":
                self._check(self._load.may_lose, "tokens are lost", result.length, self._acknowledged)
                self._length = self._acknowledged = result.length
            case "STALE":
                self._check(self._may_be_taken, "a stream was taken by nobody", result.epoch, self._epoch)
                self._epoch = result.epoch
            case "UNAVAILABLE" | "FULL" as status:
                return status
            case other:
                self._check(False, "append", other, result)
        return "OK"

    async def _renew_stream(self):
        self._stream_id = f"{self._name}-s{next(self._numbers)}"
        self._length, self._acknowledged, self._epoch, self._is_open = 0, 0, 1, False
        self._may_be_taken = False

    def _check_stream(self, stored):
        log = stored.logs[0]
        self._check(stored.record == record(model=self._stream_id), "record", stored.record)
        expected = [token(self._stream_id, at) for at in range(len(log.ids))]
        self._check(list(log.ids) == expected, "tokens", log.ids, expected)
        if not self._load.may_lose:
            self._check(len(log.ids) >= self._acknowledged, "tokens are lost", len(log.ids), self._acknowledged)
            is_known = stored.epoch == self._epoch or (self._may_be_taken and stored.epoch > self._epoch)
            self._check(is_known, "epoch", stored.epoch, self._epoch)
        self._check(not stored.HasField("seal"), "seal", stored.seal)

    async def _read(self):
        request = state_pb2.ReadRequest(tenant=self._client.tenant, stream_id=self._stream_id)
        return await self._found(self._client.journal.Read(request), self._check_stream)

    async def _take(self):
        if self._random.random() < 0.7:
            return await self._read()
        self._may_be_taken = True
        request = state_pb2.TakeRequest(
            tenant=self._client.tenant, stream_id=self._stream_id, owner=self._name, ttl_s=_TTL_S
        )

        def taken(stored):
            self._epoch = max(self._epoch, stored.epoch) if not self._load.may_lose else stored.epoch
            self._check(stored.owner == self._name, "owner", stored.owner)
            self._check_stream(stored)
            self._may_be_taken = self._load.may_lose

        return await self._found(self._client.journal.Take(request), taken)

    async def _found(self, call, check):
        try:
            check(await call)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            self._check(self._load.may_lose or not self._acknowledged, "a stream is lost", self._acknowledged)
        return "OK"

    async def _bind(self):
        acknowledged, _ = self._bound
        number = next(self._numbers)
        self._bound = acknowledged, number
        target = f"{self._name}@{number}"
        request = state_pb2.BindRequest(tenant=self._client.tenant, session=self._name, worker_id=target, ttl_s=_TTL_S)
        answer = await self._client.sessions.Bind(request)
        self._check(answer.bound and answer.worker_id == target, "bind", answer, target)
        self._bound = number, number
        return "OK"

    async def _look_up(self):
        request = state_pb2.LookUpSessionRequest(tenant=self._client.tenant, session=self._name)
        worker = (await self._client.sessions.LookUp(request)).worker_id
        name, _, number = worker.rpartition("@")
        least, most = self._bound
        is_one = name == self._name and int(number) <= most
        is_right = is_one and int(number) >= least if not self._load.may_lose else is_one or not worker
        self._check(is_right or (not worker and not least), "session", worker, self._bound)
        return "OK"

    async def _lease(self):
        request = state_pb2.AcquireLeaseRequest(name=self._name, owner="a", ttl_s=_TTL_S)
        answer = await self._client.leases.Acquire(request)
        is_right = answer.granted and answer.owner == "a" and answer.epoch > self._lease_epoch
        self._check(is_right, "lease", answer, self._lease_epoch)
        self._lease_epoch = answer.epoch
        return "OK"

    async def _store(self):
        name = f"{self._name}-b{self._random.randrange(20)}"
        (outcome,) = await put(self._client, (header(name, content_of(name)), content_of(name)), ttl_s=_TTL_S)
        if outcome == state_pb2.PUT_OUTCOME_FULL:
            return "FULL"
        self._check(outcome == state_pb2.PUT_OUTCOME_STORED, "put", outcome)
        self._put.add(name)
        return "OK"

    async def _fetch(self):
        names = [f"{self._name}-b{number}" for number in self._random.sample(range(20), 6)]
        found = await get(self._client, *map(key, names))
        for at, content in found.items():
            self._check(content == content_of(names[at]), "block", names[at])
        missing = {name for at, name in enumerate(names) if at not in found} & self._put
        self._check(self._load.may_lose or not missing, "blocks are lost", missing)
        return "OK"


OPERATIONS = ("append", "read", "take", "bind", "look_up", "lease", "store", "fetch")
WRITES = ("append", "bind", "lease", "store")
READS = ("read", "look_up", "fetch")


@contextlib.asynccontextmanager
async def loaded(client, seed, *, may_lose=False):
    """Keep the clients going; in the end nothing may have been wrong."""
    load = Load(client, seed, may_lose)
    users = [asyncio.create_task(_User(load, number).run()) for number in range(CLIENTS)]
    try:
        await load.works()
        yield load
        for user in users:
            if user.done():
                await user
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    assert not load.wrong, load.wrong[:5]
