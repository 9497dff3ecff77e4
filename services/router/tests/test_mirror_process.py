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
MAX_LAG_S = 0.05
STRETCHES = 20
STRETCH_S = 0.5


@pytest.fixture
def server(tmp_path):
    server = StateProcess(tmp_path).start()
    yield server
    server.kill()


@contextlib.asynccontextmanager
async def store_of(server, owner="router-1", timeout_s=0.5):
    front = MemoryJournalStore(max_streams=1000, max_bytes=64 << 20)
    store = MirroredJournalStore(
        front, server.target, dial_plain, owner=owner, window_s=60.0, timeout_s=timeout_s, max_lag_s=MAX_LAG_S
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
        assert sorted(waits)[90] < 0.1, "no request waits for a call, which may take half a second"
        await eventually(lambda: store.client.mirror.is_open)
        assert await store.look_up("r-9", "tenant") is None
        if fault == "stopped":
            server.go_on()
        else:
            server.start()
        await until_mirrored(store, other, "r-1")
        await eventually(lambda: not store.client.requests.is_open)


async def open_streams(store, streams):
    for n in range(streams):
        await store.open(record(f"r-{n}", choices=1, prompt=range(500)))


async def append_tokens(store, appended_at, every_s, seconds):
    """Each stream gains a token at a steady pace, as the router's runs append them; `appended_at` has the times."""
    chance = random.Random(7)
    due_at = [time.monotonic() + chance.uniform(0, every_s) for _ in appended_at]
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for n, times in enumerate(appended_at):
            if now > due_at[n]:
                store.append(f"r-{n}", Piece(0, len(times), [len(times) % 4096], (), 0, 0, False, "numerics-1"))
                times.append(now)
                due_at[n] += every_s
        await asyncio.sleep(0.001)


async def load(store, streams, seconds):
    """Streams from the beginning to the end; the CPU time of this process, and how many tokens they had."""
    await open_streams(store, streams)
    appended_at = [[] for _ in range(streams)]
    cpu = time.process_time()
    await append_tokens(store, appended_at, TOKEN_EVERY_S, seconds)
    for n in range(streams):
        await store.seal(f"r-{n}", Outcome(), 60.0)
    return time.process_time() - cpu, sum(map(len, appended_at))


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


@pytest.mark.slow
async def test_state_server_has_the_tokens_of_200_streams_in_time(server, monkeypatch):
    """As far as it keeps up: what a batch takes comes on top. On a busy machine tokens are late: then once more."""
    async with store_of(server, timeout_s=5.0) as store:
        append, appended_at = store.client.append, [[] for _ in range(200)]
        lags_s, calls_s = [], []

        async def timed(request):
            began = time.monotonic()
            response = await append(request)
            now = time.monotonic()
            calls_s.append(now - began)
            for write in request.writes:
                times = appended_at[int(write.stream_id.removeprefix("r-"))]
                for piece in write.pieces:
                    lags_s.extend(now - times[at] for at in range(piece.position, piece.position + len(piece.ids)))
            return response

        monkeypatch.setattr(store.client, "append", timed)
        await open_streams(store, len(appended_at))
        for _ in range(STRETCHES):
            await eventually(lambda: store.mirror.is_idle)
            lags_s.clear()
            calls_s.clear()
            await append_tokens(store, appended_at, 0.05, STRETCH_S)
            await eventually(lambda: store.mirror.is_idle)
            lag_s, call_s = sorted(lags_s)[int(0.99 * len(lags_s))], max(calls_s)
            print(f"99 % of {len(lags_s)} tokens in {1e3 * lag_s:.1f} ms; a batch takes up to {1e3 * call_s:.1f} ms")
            if lag_s <= MAX_LAG_S + call_s:
                break
        assert lag_s <= MAX_LAG_S + call_s
