"""Runs in a state server's pod: fills its Redis, keeps it full for a time, and empties it again.

Arguments: seconds, and the most MiB to write. The values have a time to live, so that none is left by an interruption.
"""

import asyncio
import itertools
import sys
import time

from lockstep_state.redis_backend import RedisOptions
from lockstep_state.redis_backend.connect import connect
from lockstep_state.secrets import read_password
from lockstep_state.settings import MEMORY, StateSettings
from redis.exceptions import OutOfMemoryError

SECONDS, MOST_BYTES = float(sys.argv[1]), int(sys.argv[2]) << 20
SIZES = (1 << 20, 1 << 14, 1 << 8)
GRACE_S = 60


def options(settings):
    """How the state server reaches its Redis, with more patience."""
    return RedisOptions(
        address=settings.store,
        username=settings.store_username,
        password=read_password("store_password_file", settings.store_password_file),
        sentinel_password=read_password("store_sentinel_password_file", settings.store_sentinel_password_file),
        ca=settings.store_ca,
        cert=settings.store_cert,
        key=settings.store_key,
        batch_timeout_s=10.0,
    )


async def fill(client, prefix):
    """Write until Redis refuses the smallest value too; returns the keys."""
    keys, written = [], 0
    numbers = itertools.count()
    for size in SIZES:
        while True:
            key = f"{prefix}chaos:{next(numbers)}"
            try:
                await client.set(key, bytes(size), ex=int(SECONDS + GRACE_S))
            except OutOfMemoryError:
                break
            keys.append(key)
            written += size
            if written > MOST_BYTES:
                await empty(client, keys)
                sys.exit(f"Redis is not full after {MOST_BYTES >> 20} MiB: its maxmemory is larger, or not set")
    return keys


async def empty(client, keys):
    """Delete the keys."""
    for key in keys:
        await client.unlink(key)


async def main():
    """Fill, wait, empty."""
    settings = StateSettings.load("fill", [])
    if settings.store == MEMORY:
        sys.exit("this state server has no Redis")
    client = connect(options(settings))
    try:
        keys = await fill(client, settings.store_prefix)
        print(f"fault {time.time():.6f}", flush=True)
        try:
            await asyncio.sleep(SECONDS)
        finally:
            await empty(client, keys)
    finally:
        await client.aclose()
    print(f"emptied: {len(keys)} values", flush=True)


asyncio.run(main())
