"""What counts as a failure of Redis, what closes the breaker again, and what is done with answers that are none."""

import asyncio
import contextlib
import random
import time

import pytest
import redis
from backends import LIMITS, PATIENCE_S, TTL_S, eventually, keep
from lockstep_api.v1.state_pb2 import WRITE_OUTCOME_OK as OK
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.ports import free_port
from lockstep_common.telemetry import REGISTRY
from lockstep_state.backend import Binding, Block, Opening
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.values import Values
from redis_server import RedisCluster, RedisServer
from tcp_proxy import TcpProxy

UNAVAILABLE = ErrorCode.UNAVAILABLE
SHORT_S = 0.1


@pytest.fixture
async def proxy(redis_server):
    async with TcpProxy(redis_server.port) as proxy:
        yield proxy


def behind(proxy, **options):
    values = {"timeout_s": SHORT_S, "batch_timeout_s": PATIENCE_S, "probe_s": 0.05}
    return keep("redis", f"redis://127.0.0.1:{proxy.port}/0", values | options)


async def failing(kept):
    """The error of a small operation."""
    with pytest.raises(LockstepError) as caught:
        await kept.backend.bound(kept.key())
    return caught.value


async def answers(kept):
    """Whether a small operation is answered in time; on a busy machine, one that has to connect may not be."""
    try:
        return await kept.backend.bound(kept.key()) is None
    except LockstepError:
        return False


async def test_waiting_for_others_does_not_open_the_breaker(proxy):
    async with behind(proxy, connections=1) as kept:
        assert await kept.backend.get([kept.key()]) == [None]
        proxy.silence()
        batch = asyncio.create_task(kept.backend.get([kept.key()]))
        await asyncio.sleep(0)
        for _ in range(5):
            assert (await failing(kept)).code is UNAVAILABLE
        assert kept.backend.unready is None
        proxy.pass_on()
        assert await batch == [None]


async def given_up(call):
    """End a call that waits for Redis, as its caller's deadline does."""
    calling = asyncio.create_task(call)
    await asyncio.wait({calling}, timeout=SHORT_S / 10)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_callers_that_give_up_before_the_timeouts_do_not_hide_that_redis_is_silent(proxy, is_batch):
    async with behind(proxy, batch_timeout_s=10 * SHORT_S) as kept:
        await eventually(lambda: answers(kept))
        proxy.silence()

        async def opens():
            await given_up(kept.backend.get([kept.key()]) if is_batch else kept.backend.bound(kept.key()))
            return kept.backend.unready is not None

        await eventually(opens)
        proxy.pass_on()
        await eventually(lambda: _is(kept.backend.unready is None))


async def test_callers_that_give_up_do_not_open_the_breaker_while_redis_answers(proxy):
    async with behind(proxy, breaker_failures=1, timeout_s=PATIENCE_S) as kept:
        await eventually(lambda: answers(kept))
        proxy.delay_s = (SHORT_S, SHORT_S)
        for _ in range(20):
            await given_up(kept.backend.bound(kept.key()))
        assert await kept.backend.bound(kept.key()) is None
        assert kept.backend.unready is None


async def test_a_process_that_stood_still_does_not_open_the_breaker(proxy):
    async with behind(proxy, breaker_failures=1) as kept:
        await eventually(lambda: answers(kept))
        asking = [asyncio.create_task(kept.backend.bound(kept.key())) for _ in range(5)]
        await asyncio.sleep(0)
        time.sleep(5 * SHORT_S)
        await asyncio.gather(*asking, return_exceptions=True)
        assert kept.backend.unready is None


async def test_late_answers_of_batches_do_not_hide_failures_of_small_operations(proxy):
    async with behind(proxy, breaker_failures=4) as kept:
        await eventually(lambda: answers(kept))
        proxy.delay_s = (SHORT_S, SHORT_S)
        for _ in range(50):  # two rounds, but failures while this process itself is stalled do not count
            await asyncio.gather(failing(kept), failing(kept))
            if kept.backend.unready is not None:
                break
            await kept.backend.get([kept.key()])
        assert kept.backend.unready is not None


async def test_late_answers_of_probes_do_not_close_the_breaker(proxy):
    async with behind(proxy, breaker_failures=1) as kept:
        await eventually(lambda: answers(kept))
        proxy.delay_s = (SHORT_S, SHORT_S)
        while kept.backend.unready is None:  # a failure while this process itself is stalled does not count
            await failing(kept)
        opened = proxy.connections
        await eventually(lambda: _is(proxy.connections > opened + 3))  # it is probed again and again
        assert kept.backend.unready is not None
        proxy.delay_s = (0.0, 0.0)
        await eventually(lambda: _is(kept.backend.unready is None))
        await eventually(lambda: answers(kept))


async def test_a_batch_waits_for_one_timeout_and_not_for_one_of_each_part(proxy):
    async with behind(proxy, batch_timeout_s=0.5, breaker_failures=100) as kept:
        await eventually(lambda: answers(kept))
        proxy.silence()
        began = time.monotonic()
        results = await kept.backend.append([kept.write(f"s{number}") for number in range(256 * 40)])
        assert time.monotonic() - began < 0.5 * 40 / 2
        assert len(results) == 256 * 40
        proxy.pass_on()


@pytest.mark.parametrize("answer", [b":abc\r\n", b"\0\1\2\3", b"*1\r\n$-5\r\n", b"$9999999999\r\n", b""])
async def test_answers_that_cannot_be_read_are_typed_and_probed_on(answer):
    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                writer.write(answer)
                if not answer:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    options = {"timeout_s": 0.5, "batch_timeout_s": 0.5, "probe_s": 0.01}
    async with server, keep("redis", address, options) as kept:
        for _ in range(5):
            assert (await failing(kept)).code is UNAVAILABLE
            result = await kept.open()
            assert result.outcome == 10  # UNAVAILABLE
        assert kept.backend.unready is not None
        await asyncio.sleep(0.1)  # some probes, which must not end it: `keep` would not notice


def without_replicas(client, _):
    client.config_set("min-replicas-to-write", 1)
    yield
    client.config_set("min-replicas-to-write", 0)


def without_disk(client, directory):
    (directory / "dump.rdb/taken").mkdir(parents=True)  # where its file would be
    client.config_set("save", "3600 1000000")
    client.bgsave()
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.01)
    yield
    client.config_set("save", "")


def as_a_replica(client, _):
    client.replicaof("127.0.0.1", free_port())  # it still answers reads
    yield
    client.replicaof("NO", "ONE")


@pytest.mark.parametrize("fault", [without_replicas, without_disk, as_a_replica])
async def test_redis_that_takes_no_writes_opens_the_breaker_until_it_does(tmp_path, fault):
    server = RedisServer(tmp_path)
    client = redis.Redis(port=server.port, socket_timeout=PATIENCE_S)
    try:
        options = {"probe_s": 0.05, "timeout_s": PATIENCE_S, "batch_timeout_s": PATIENCE_S}
        async with keep("redis", server.address, options) as kept:
            assert (await kept.open()).outcome == OK
            acting = fault(client, tmp_path)
            next(acting)
            for number in range(5):
                assert (await kept.open(f"s{number}")).outcome == 10  # UNAVAILABLE
                with contextlib.suppress(LockstepError):  # reads succeed until the breaker is open
                    await kept.backend.sizes([kept.key()])
            assert kept.backend.unready is not None
            assert REGISTRY.get_sample_value("lockstep_state_breaker_open") == 1
            await asyncio.sleep(0.2)  # some probes
            assert kept.backend.unready is not None
            next(acting, None)
            await eventually(lambda: _is(kept.backend.unready is None))
            assert (await kept.open("last")).outcome == OK
    finally:
        client.close()
        server.kill()


async def test_after_a_failover_behind_one_address_the_new_master_gets_the_writes(tmp_path):
    """Connections stay with the demoted one, and so do those that are in use while the probe connects."""
    servers = [RedisServer(tmp_path / str(number)) for number in range(2)]
    former = redis.Redis(port=servers[0].port, socket_timeout=PATIENCE_S)
    try:
        async with TcpProxy(servers[0].port) as proxy, behind(proxy, timeout_s=PATIENCE_S) as kept:
            assert (await kept.open()).outcome == OK
            await asyncio.gather(*(kept.backend.sizes([kept.key()]) for _ in range(2)))
            assert proxy.connections == 2
            former.replicaof("127.0.0.1", servers[1].port)
            proxy.target_port = servers[1].port
            former.client_pause(2000, all=True)  # what is refused is answered nevertheless
            reading = asyncio.create_task(kept.backend.sizes([kept.key()]))
            await asyncio.sleep(0)  # it has one of the connections
            with pytest.raises(LockstepError):
                await kept.backend.discard(kept.tenant, [kept.key()])
            await eventually(lambda: _is(kept.backend.unready is None))
            assert (await kept.open("new")).outcome == OK
            await asyncio.gather(reading, return_exceptions=True)
            for number in range(5):
                assert (await kept.open(f"s{number}")).outcome == OK
    finally:
        former.close()
        for server in servers:
            server.kill()


async def test_probing_ends_when_it_is_cancelled():
    """At whatever moment: otherwise the process would not end while Redis is away."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    options = RedisOptions(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout_s=0.5, probe_s=0.0)
    rng = random.Random(1)
    async with server:
        for _ in range(40):
            backend = RedisBackend(options, Values(), LIMITS)
            for _ in range(options.breaker_failures):
                with pytest.raises(LockstepError):
                    await backend.bound("key")
            running = asyncio.create_task(backend.run())
            await asyncio.sleep(rng.random() * 0.01)
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=PATIENCE_S)
            assert done
            await backend.close()


@pytest.mark.parametrize("kind", ["redis"])
@pytest.mark.parametrize("other", ["set", "rpush", "sadd", "hset"])
async def test_keys_of_another_type_are_as_absent(kept, kind, redis_server, other):
    """Somebody else has written them; what is ours takes their place."""
    with redis.Redis(port=redis_server.port) as server:

        def spoil(*kinds):
            for part in kinds:
                for name in list(server.scan_iter(f"lockstep:{part}:*{kept.tenant}*")):
                    server.delete(name)
                    values = ("x", "y") if other == "hset" else ("x",)
                    getattr(server, other)(name, *values)

        await kept.open()
        await kept.backend.put([Block(kept.tenant, kept.key("b"), b"value", TTL_S)])
        await kept.backend.bind(kept.tenant, kept.key("n"), Binding(b"one"), TTL_S, None)
        _, lease = await kept.backend.acquire(kept.key("l"), "a", TTL_S)
        spoil("stream", "block", "name", "lease", "tenant")
        assert await kept.backend.read(kept.key()) is None
        assert await kept.backend.get([kept.key("b")]) == [None]
        assert await kept.backend.bound(kept.key("n")) is None
        spoil("stream", "block", "name", "lease", "tenant")
        assert (await kept.append(opening=Opening(b"record", 1, "r"))).outcome == 1
        assert await kept.backend.put([Block(kept.tenant, kept.key("b"), b"value", TTL_S)]) == [True]
        assert await kept.backend.bind(kept.tenant, kept.key("n"), Binding(b"two"), TTL_S, b"") == (
            True,
            Binding(b"two"),
        )
        done, second = await kept.backend.acquire(kept.key("l"), "b", TTL_S)
        assert done
        assert second.epoch > lease.epoch
        assert await kept.backend.get([kept.key("b")]) == [b"value"]


@pytest.mark.slow
async def test_cluster_that_was_silent_or_gone_is_used_again(tmp_path):
    """More calls than there are connections end at their timeouts, and none of the connections is lost."""
    cluster = RedisCluster(tmp_path / "cluster")
    options = {"timeout_s": 0.3, "batch_timeout_s": 0.6, "probe_s": 0.1, "connections": 4}
    try:
        async with keep("cluster", cluster.address, options, LIMITS) as kept:

            async def works():
                try:
                    return (await kept.open()).outcome == 1 and await kept.backend.bound(kept.key()) is None
                except LockstepError:
                    return False

            await eventually(works)
            for _ in range(3):
                cluster.each("freeze")
                for _ in range(10):
                    await asyncio.gather(*(failing(kept) for _ in range(4)))
                cluster.each("thaw")
                await eventually(works)
            cluster.each("kill")
            for _ in range(5):
                assert (await failing(kept)).code is UNAVAILABLE
            for known in (tmp_path / "cluster").glob("*/nodes.conf"):
                known.unlink()  # else the nodes soon know each other and their slots again
            cluster.each("start")
            await asyncio.sleep(0.5)  # empty nodes, without slots: typed, and the probing goes on
            assert (await failing(kept)).code is UNAVAILABLE
    finally:
        cluster.each("thaw")
        cluster.kill()


async def _is(condition):
    return condition


async def test_redis_that_is_no_cluster_is_unavailable(redis_server):
    """As a cluster that is down, or whose user may not ask for its slots: the library has an error of its own."""
    async with keep("cluster", f"redis+cluster://127.0.0.1:{redis_server.port}", {"breaker_failures": 2}) as kept:
        for _ in range(3):
            assert (await failing(kept)).code is UNAVAILABLE
        assert kept.backend.unready is not None
