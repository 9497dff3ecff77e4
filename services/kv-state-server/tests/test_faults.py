"""Redis fails in every way under load: calls fail typed and soon, nothing wrong is given, and it works again by itself.

The state server is a process, its eight clients are in the test. `state_load.py` checks every answer.
"""

import asyncio
import contextlib
import random
import secrets
import signal
import statistics
import time

import pytest
import redis
from backends import PATIENCE_S
from grpc_health.v1 import health_pb2
from lockstep_common.ports import free_port
from redis_damage import damage_some
from redis_server import RedisSentinels, RedisServer
from state_load import CLIENTS, READS, WRITES, loaded
from state_process import dialled, running
from tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TIMEOUT_S = 0.3
BATCH_TIMEOUT_S = 0.6
CALL_TIMEOUT_S = 5.0
SLACK_S = 5.0
"""A busy machine may take so long for what takes no time."""


class Faults:
    """A Redis behind a proxy, and what can happen to both."""

    def __init__(self, directory):
        self.server = RedisServer(directory)
        self.proxy = TcpProxy(self.server.port)
        self._client = redis.Redis(port=self.server.port, socket_timeout=PATIENCE_S)
        self._cutting = None

    @property
    def address(self):
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def killed(self):
        self.server.kill()
        yield
        self.server.start()

    def frozen(self):
        self.server.freeze()
        yield
        self.server.thaw()

    def slow(self):
        """200 ms for each answer; the limit for small operations is less, the one for batches more."""
        self.proxy.delay_s = (0.1, 0.1)
        yield
        self.proxy.delay_s = (0.0, 0.0)

    def silent(self):
        """The network drops everything."""
        self.proxy.silence()
        yield
        self.proxy.cut()
        self.proxy.pass_on()

    def reset(self):
        """The network resets connections as soon as they are used."""
        self._cutting = asyncio.create_task(self._cut())
        yield
        self._cutting.cancel()

    def read_only(self):
        """A failover has made it a replica, of a server that cannot be reached."""
        self._client.replicaof("127.0.0.1", free_port())
        yield
        self._client.replicaof("NO", "ONE")

    def full(self):
        self._client.config_set("maxmemory-policy", "noeviction")
        self._client.config_set("maxmemory", 1)
        yield
        self._client.config_set("maxmemory", 0)

    async def _cut(self):
        while True:
            self.proxy.cut()
            await asyncio.sleep(0.001)

    def close(self):
        if self._cutting is not None:
            self._cutting.cancel()
        self.server.thaw()
        self.server.kill()


@pytest.fixture
async def faults(tmp_path):
    made = Faults(tmp_path / "redis")
    try:
        async with made.proxy:
            yield made
    finally:
        made.close()


@pytest.fixture
def seed():
    number = secrets.randbelow(1 << 32)
    print(f"seed {number}")
    return number


@contextlib.asynccontextmanager
async def serving(tmp_path, store, seed, timeout_s=TIMEOUT_S, batch_timeout_s=BATCH_TIMEOUT_S, **options):
    """A process under load, which it survives."""
    listen = f"unix:{tmp_path}/state"
    flags = ("--store-timeout-s", str(timeout_s), "--store-batch-timeout-s", str(batch_timeout_s))
    with running(listen, "--store", store, *flags, "--call-timeout-s", str(CALL_TIMEOUT_S)) as process:
        async with dialled(listen) as client, loaded(client, seed, **options) as load:
            yield load
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def spread(results):
    """Median, 99th percentile and maximum of the times, in ms."""
    if not results:
        return "no calls"
    times = sorted(1000 * each.took_s for each in results)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return f"p50 {statistics.median(times):.1f}, p99 {p99:.1f}, max {times[-1]:.1f} ms of {len(times)} calls"


def check_times(load, name, injected, opened, healed):
    """Nobody waits longer than the limits of a call; while the breaker is open, nobody waits for Redis at all."""
    during = [each for each in load.since(injected) if each.began < healed]
    open_ones = [each for each in during if each.began > opened]
    before = [each for each in load.results if each.began + each.took_s < injected]
    print(f"{name}: breaker open after {1000 * (opened - injected):.0f} ms; before: {spread(before)}; ", end="")
    print(f"until open: {spread([each for each in during if each.began <= opened])}; open: {spread(open_ones)}")
    assert max(each.took_s for each in during) < CALL_TIMEOUT_S + SLACK_S
    assert statistics.median(each.took_s for each in open_ones) < TIMEOUT_S


@pytest.mark.parametrize("fault", ["killed", "frozen", "slow", "silent", "reset"])
async def test_without_redis_calls_fail_soon_and_it_works_again_by_itself(tmp_path, faults, seed, fault):
    timeout_s = 0.1 if fault == "slow" else TIMEOUT_S
    async with serving(tmp_path, faults.address, seed, timeout_s, may_lose=fault == "killed") as load:
        for _ in range(2):
            injected = time.monotonic()
            acting = getattr(faults, fault)()
            next(acting)
            await load.serves(NOT_SERVING)
            opened = time.monotonic()
            await load.goes_on(rounds=5)
            ended = load.statuses(opened)
            healed = time.monotonic()
            next(acting, None)
            await load.works()
            await load.serves(SERVING)
            check_times(load, fault, injected, opened, healed)
            assert ended["UNAVAILABLE"] > 10 * CLIENTS
            # A call may have been about to end well, or have got its answer between two of the cuts.
            assert set(load.statuses(injected)) <= {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


async def test_full_redis_is_read_and_takes_writes_when_it_has_room(tmp_path, faults, seed):
    patience_s = CALL_TIMEOUT_S  # Redis answers here, however late on a busy machine
    async with serving(tmp_path, faults.address, seed, patience_s, patience_s) as load:
        acting = faults.full()
        next(acting)
        await load.goes_on()  # what began before has ended
        began = time.monotonic()
        await load.goes_on(rounds=5)
        assert not {"OK"} & set(load.statuses(began, *WRITES)), load.statuses(began, *WRITES)
        assert set(load.statuses(began, *WRITES)) == {"FULL", "RESOURCE_EXHAUSTED"}
        assert set(load.statuses(began, *READS)) == {"OK"}
        await load.serves(SERVING)
        print(f"full: {spread(load.since(began))}")
        next(acting, None)
        await load.works()


async def test_read_only_redis_is_used_again_when_it_takes_writes(tmp_path, faults, seed):
    async with serving(tmp_path, faults.address, seed) as load:
        acting = faults.read_only()
        next(acting)
        await load.goes_on()
        began = time.monotonic()
        await load.goes_on(rounds=5)
        assert set(load.statuses(began, *WRITES)) == {"UNAVAILABLE"}
        assert set(load.statuses(began, *READS)) <= {"OK", "UNAVAILABLE"}
        print(f"read only: {spread(load.since(began))}")
        next(acting, None)
        await load.works()
        await load.serves(SERVING)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_sentinels_fail_over_and_it_goes_on_with_the_new_master(tmp_path, seed, fault):
    sentinels = RedisSentinels(tmp_path / "redis")
    try:
        async with serving(tmp_path, sentinels.address, seed, may_lose=True) as load:
            sentinels.freeze_sentinel(0)  # two of three are enough
            began = time.monotonic()
            sentinels.master.kill() if fault == "killed" else sentinels.master.freeze()
            await load.fails(began)
            await load.works(within_s=2 * PATIENCE_S)
            print(f"{fault}: works after {time.monotonic() - began:.1f} s; {spread(load.since(began))}")
            sentinels.master.start() if fault == "killed" else sentinels.master.thaw()
            await load.goes_on(rounds=20)  # the old master becomes a replica
            await load.works()
            assert set(load.statuses(began)) <= {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    finally:
        sentinels.kill()


async def test_damaged_values_are_as_absent(tmp_path, faults, seed):
    """Bits flipped, values cut, fields removed, and keys of other types, again and again in all that is stored."""
    rng = random.Random(seed)
    count = 0
    async with serving(tmp_path, faults.address, seed, may_lose=True) as load:
        server = redis.Redis(port=faults.server.port, socket_timeout=PATIENCE_S)
        began = time.monotonic()
        while count < 3000:
            count += await asyncio.to_thread(damage_some, server, rng)
        await load.goes_on()
        print(f"{count} values damaged under {len(load.since(began))} calls: {load.statuses(began)}")
        assert set(load.statuses(began)) <= {"OK", "FULL", "UNAVAILABLE"}
        assert load.statuses(began)["OK"] > 0.9 * len(load.since(began))
        server.flushdb()  # what was counted of the tenant may be wrong by now
        await load.works()


@pytest.mark.parametrize("store", ["memory", "redis"])
async def test_killed_state_server_begins_again_and_epochs_still_fence(tmp_path, faults, seed, store):
    listen = f"unix:{tmp_path}/state"
    flags = ("--store", "memory" if store == "memory" else faults.server.address)
    patience = ("--store-timeout-s", "5", "--store-batch-timeout-s", "5")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running(listen, *flags, *patience))
        async with dialled(listen) as client, loaded(client, seed, may_lose=store == "memory") as load:
            for _ in range(3):
                began = time.monotonic()
                process.kill()
                process.wait(PATIENCE_S)
                await load.goes_on()
                assert set(load.statuses(began)) <= {"OK", "UNAVAILABLE"}
                process = await asyncio.to_thread(lambda: stack.enter_context(running(listen, *flags, *patience)))
                await load.works()
            print(load.statuses())
