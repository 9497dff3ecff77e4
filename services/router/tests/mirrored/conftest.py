"""Stores of two routers, and the state server that they share."""

import contextlib

import pytest
from lockstep_common.grpc_tls import dial_plain
from lockstep_router.journals import MemoryJournalStore, MirroredJournalStore
from mirrored_stores import TIMEOUT_S, WINDOW_S, mirrored
from state_server import Clock, StateServer


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def server(tmp_path, clock):
    server = await StateServer(tmp_path / "state", clock).start()
    yield server
    await server.kill()


@pytest.fixture
async def make_store(server, clock):
    async with contextlib.AsyncExitStack() as stack:

        async def make(owner="router-1", timeout_s=TIMEOUT_S, max_lag_s=0.01, **bounds):
            front = MemoryJournalStore(**({"max_streams": 4, "max_bytes": 1 << 20} | bounds), clock=clock)
            store = MirroredJournalStore(
                front,
                server.target,
                dial_plain,
                owner=owner,
                window_s=WINDOW_S,
                timeout_s=timeout_s,
                max_lag_s=max_lag_s,
            )
            store.start()
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture
async def store(make_store):
    return await make_store()


@pytest.fixture
async def other(make_store):
    """The store of another router."""
    return await make_store("router-2")


@pytest.fixture
def advance(store, clock):
    async def advance(seconds):
        await mirrored(store)
        clock.now += seconds
        store.expire()

    return advance
