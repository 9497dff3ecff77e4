"""Workers of another number of ranks share KV blocks through the real state server: rank processes, the worker's store,
the server in memory and on Redis. The tokens are those of computed blocks.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest
from harness import PATIENCE_S
from lockstep_engine import AsyncEngine, EngineConfig, Output, Request, SamplingParams
from lockstep_engine.kernels import cpu
from lockstep_worker.kv_store import KvStore
from redis_server import RedisServer
from scripted_kv import opened
from state_in_process import serving
from system import REFERENCE

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
TEXT = tuple(Random(1).choices(range(10, 200), k=400))


class Worker:
    """An engine and its store."""

    def __init__(self, engine: AsyncEngine, store: KvStore, outputs: asyncio.Queue[Output]) -> None:
        self.engine = engine
        self._store = store
        self._outputs = outputs

    async def ask(self, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """Ids, and the number of cached tokens."""
        self.engine.submit(Request("a", prompt, PARAMS))
        ids: list[int] = []
        cached, last = 0, None
        async with asyncio.timeout(PATIENCE_S):
            while last is None or last.finish is None:
                last = await self._outputs.get()
                assert last.error is None
                ids += last.ids
                cached += last.cached_tokens
        return ids, cached

    async def drain(self) -> None:
        """Have all blocks stored."""
        assert await self.engine.store_prefixes(PATIENCE_S)
        await self._store.flush(PATIENCE_S)


@contextlib.asynccontextmanager
async def worker(target: str, tp: int) -> AsyncIterator[Worker]:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    ready = asyncio.Event()
    config = EngineConfig(
        model=str(REFERENCE),
        tp=tp,
        tp_shards=4,
        device="cpu",
        threads=1,
        max_seqs=4,
        kv_memory_bytes=2**23,
        host_cache_bytes=2**24,
    )
    async with opened(target, is_measured=not target.endswith("-away")) as store:
        fetch = store.fetch
        # Nothing is computed that can be fetched, however slow this machine is.
        store.fetch = lambda *given: fetch(*given[:4], lambda count: 1000.0 * count, *given[5:])
        engine = AsyncEngine(
            config,
            on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
            on_change=lambda: ready.set() if engine.status().state == "ready" else None,
            remote_store=store,
        )
        await engine.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ready.wait()
            yield Worker(engine, store, outputs)
        finally:
            await engine.close()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the state server keeps blocks, empty."""
    if request.param == "memory":
        yield "memory"
        return
    server = RedisServer(tmp_path)
    yield server.address
    server.kill()


@pytest.mark.slow
@pytest.mark.skipif(cpu.build is None, reason="torch's products depend on a matrix's width")
@pytest.mark.parametrize(("first", "second"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)])
async def test_a_conversation_goes_on_at_a_worker_of_another_number_of_ranks(
    private_tmp: Path, store: str, first: int, second: int
) -> None:
    async with serving(private_tmp, store=store) as target:
        async with worker(target, first) as one:
            ids, cached = await one.ask(TEXT)
            assert cached == 0
            await one.drain()
            turn = (*TEXT, *ids, 7, 8, 9)
            expected, _ = await one.ask(turn)
        async with worker(target, second) as other:
            found, cached = await other.ask(turn)
            usage = other.engine.status().remote
        assert cached == (len(TEXT) + len(ids) - 1) // 16 * 16
        assert usage.fetched > 0
        async with worker(f"{target}-away", second) as alone:
            computed, cached = await alone.ask(turn)
        assert cached == 0
    assert found == computed == expected
