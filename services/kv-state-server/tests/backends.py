"""Makes backends for tests. Each has keys of its own, so that tests can share a Redis."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from lockstep_api.v1 import state_pb2
from lockstep_state.backend import Backend, Limits, Opening, Write
from lockstep_state.memory import MemoryBackend
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.values import Values

PATIENCE_S = 30.0
TTL_S = 600.0
LIMITS = Limits(stream_bytes=64 << 10, tenant_bytes=1 << 20, tenant_streams=100, tenant_block_bytes=1 << 20)
OPTIONS: dict[str, Any] = {"timeout_s": 20.0, "batch_timeout_s": 20.0}
SECRET = bytes(range(32))

_numbers = itertools.count()


@dataclass
class Kept:
    """A backend, and what a test needs to use it."""

    backend: Backend
    tenant: str
    options: RedisOptions | None

    def key(self, name: str = "stream") -> str:
        return f"{self.tenant}-{name}"

    def write(self, name: str = "stream", **fields: Any) -> Write:
        """A write of the first epoch."""
        values: dict[str, Any] = {"tenant": self.tenant, "key": self.key(name), "epoch": 1, "ttl_s": TTL_S}
        return Write(**values | fields)

    async def append(self, name: str = "stream", **fields: Any) -> state_pb2.WriteResult:
        (result,) = await self.backend.append([self.write(name, **fields)])
        return result

    async def open(self, name: str = "stream", choices: int = 2, **fields: Any) -> state_pb2.WriteResult:
        return await self.append(name, opening=Opening(b"record", choices, "router-1"), **fields)


def make(kind: str, address: str | None, options: dict[str, Any], limits: Limits = LIMITS) -> Kept:
    tenant = f"tenant-{os.getpid()}-{next(_numbers)}"
    if address is None:
        return Kept(MemoryBackend(64 << 20, limits), tenant, None)
    redis = RedisOptions(address=address, **options)
    values = Values([SECRET] if kind == "encrypted" else [])
    return Kept(RedisBackend(redis, values, limits), tenant, redis)


@contextlib.asynccontextmanager
async def keep(kind: str, address: str | None, options: dict[str, Any], limits: Limits = LIMITS) -> AsyncIterator[Kept]:
    kept = make(kind, address, options, limits)
    running = asyncio.create_task(kept.backend.run())
    try:
        yield kept
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await kept.backend.close()


def piece(choice: int, position: int, *ids: int, **fields: Any) -> state_pb2.Piece:
    return state_pb2.Piece(choice=choice, position=position, ids=ids, **fields)


async def eventually(holds: Any, within_s: float = PATIENCE_S) -> Any:
    """The first true result of an asynchronous function."""
    end = time.monotonic() + within_s
    while True:
        result = await holds()
        if result:
            return result
        assert time.monotonic() < end, "it has not come true in time"
        await asyncio.sleep(0.02)
