"""The mirror before a state server that is another process: stopped, killed, and what the mirror costs."""

import asyncio
import contextlib
import random
import time

import pytest
from journal_store_contract import record
from lockstep_common.grpc_tls import dial_plain
from lockstep_router.journals import Claim, MemoryJournalStore, MirroredJournalStore, Outcome, Piece
from router_cluster import eventually
from state_server_process import StateProcess

TOKEN_EVERY_S = 0.02
STREAMS = 100
SECONDS = 5.0


@pytest.fixture
def server(tmp_path):
    server = StateProcess(tmp_path).start()
    yield server
    server.kill()


@contextlib.asynccontextmanager
async def store_of(server, owner="router-1", timeout_s=0.5):
    front = MemoryJournalStore(max_streams=1000, max_bytes=64 << 20)
    store = MirroredJournalStore(
        front, server.target, dial_plain, owner=owner, window_s=60.0, timeout_s=timeout_s, max_lag_s=0.05
    )
    store.start()
    try:
        yield store
    finally:
        await store.close()


async def is_mirrored(store, other, request_id):
    kept, seen = await store.read(request_id), await other.look_up(request_id, "tenant")
    return seen is not None and list(seen.logs) == list(kept.logs)


async def until_mirrored(store, other, request_id):
    end = time.monotonic() + 60
    while not await is_mirrored(store, other, request_id):
        assert time.monotonic() < end, "it is not mirrored"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
async def test_streams_are_served_while_the_server_is_away_and_mirrored_when_it_returns(server, fault):
    async with store_of(server) as store, store_of(server, "router-2", 5.0) as other:
        await store.open(record())
        store.append("r-1", Piece(0, 0, [5]))
        await until_mirrored(store, other, "r-1")
        (server.stop if fault == "stopped" else server.kill)()
        for n in range(1, 4):
            await store.claim(f"tenant/{n}", Claim(f"s-{n}", b""))
        await eventually(lambda: store.client.requests.is_open)
        waits = []
        for n in range(100):
            store.append("r-1", Piece(0, n + 1, [n]))
            began = time.monotonic()
            await store.claim(f"tenant/more-{n}", Claim(f"t-{n}", b""))
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.01)
        assert sorted(waits)[90] < 0.1, "nobody waits for a call, which may take half a second"
        await eventually(lambda: store.client.mirror.is_open)
        assert await store.look_up("r-9", "tenant") is None
        if fault == "stopped":
            server.go_on()
        else:
            server.start()
        await until_mirrored(store, other, "r-1")
        await eventually(lambda: not store.client.requests.is_open)


async def load(store, streams, seconds):
    """Streams that gain a token at a steady pace, as the router's runs append them; the CPU time of this process."""
    for n in range(streams):
        await store.open(record(f"r-{n}", choices=1, prompt=range(500)))
    chance = random.Random(7)
    offsets = [chance.uniform(0, TOKEN_EVERY_S) for _ in range(streams)]
    lengths = [0] * streams
    began, cpu = time.monotonic(), time.process_time()
    while (now := time.monotonic() - began) < seconds:
        for n in range(streams):
            if now > offsets[n] + lengths[n] * TOKEN_EVERY_S:
                store.append(f"r-{n}", Piece(0, lengths[n], [lengths[n] % 4096], (), 0, 0, False, "numerics-1"))
                lengths[n] += 1
        await asyncio.sleep(0.001)
    for n in range(streams):
        await store.seal(f"r-{n}", Outcome(), 60.0)
    return time.process_time() - cpu, sum(lengths)


@pytest.mark.slow
async def test_mirror_takes_less_than_a_hundredth_of_a_streams_time(server):
    plain = MemoryJournalStore(max_streams=1000, max_bytes=64 << 20)
    without_s, _ = await load(plain, STREAMS, SECONDS)
    async with store_of(server, timeout_s=5.0) as store:
        with_s, tokens = await load(store, STREAMS, SECONDS)
        await eventually(lambda: not store.mirror.entries)
    share = (with_s - without_s) / (STREAMS * SECONDS)
    print(
        f"{STREAMS} streams, a token each {1e3 * TOKEN_EVERY_S:.0f} ms, {SECONDS:.0f} s, {tokens} tokens: CPU time of "
        f"the router's process {without_s:.3f} s without the mirror, {with_s:.3f} s with it: {100 * share:.3f} % of a "
        f"stream's time, {1e6 * (with_s - without_s) / tokens:.1f} us a token"
    )
    assert share < 0.01
