"""The router as a process of its own, as tests start it."""

import asyncio
import json
import os
import sys

BODY = {"model": "reference", "prompt": "hello", "max_tokens": 40, "seed": 1}


DEFAULTS = {"LOCKSTEP_MANAGEMENT_PORT": "0", "LOCKSTEP_HEARTBEAT_TIMEOUT_S": "60"}
"""The workers live in the process of the test: a machine that holds that up for seconds must not make them lost."""


async def start(*flags, **variables):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | DEFAULTS | variables
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lockstep_router", *flags, stderr=asyncio.subprocess.PIPE, env=environment
    )


async def listening(process):
    """Read the log until the router says where it listens."""
    async with asyncio.timeout(60):
        while line := await process.stderr.readline():
            entry = json.loads(line)
            if entry["message"] == "listening":
                return entry
    raise AssertionError("the router ended")
