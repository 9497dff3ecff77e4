"""A state server in the process of the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from harness import PATIENCE_S
from lockstep_state.server import run
from lockstep_state.settings import StateSettings


@contextlib.asynccontextmanager
async def serving(directory: Path, **settings: object) -> AsyncIterator[str]:
    """The target of a state server in this process."""
    patient = {"store_timeout_s": 10.0, "store_batch_timeout_s": 20.0, "call_timeout_s": PATIENCE_S}
    target, stop = f"unix:{directory}/state", asyncio.Event()
    given = StateSettings(**{"listen": target, "management_port": 0, **patient, **settings})
    task = asyncio.create_task(run(given, stop))
    try:
        yield target
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE_S)
