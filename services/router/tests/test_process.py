"""The router as a process: it starts, names itself, refuses what cannot work, and leaves when told."""

import asyncio
import json
import os
import signal
import socket
import sys

import httpx
import pytest
from router_cluster import eventually
from scripted_worker import Script, ScriptedWorker


async def start(*flags):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lockstep_router", *flags, stderr=asyncio.subprocess.PIPE, env=environment
    )


@pytest.fixture
async def worker(tmp_path):
    made = await ScriptedWorker("w0", tmp_path / "w0.sock").start()
    yield made
    await made.kill()


async def port_of(process):
    """Read the log until the router says where it listens."""
    while line := await asyncio.wait_for(process.stderr.readline(), 20):
        entry = json.loads(line)
        if entry["message"] == "listening":
            return entry["port"]
    raise AssertionError("the router ended")


async def test_serves_drains_and_leaves(worker):
    process = await start("--workers", worker.target, "--port", "0")
    try:
        port = await port_of(process)
        worker.script = Script(delay_s=0.02)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            body = {"model": "reference", "prompt": "hello", "max_tokens": 40, "seed": 1}
            running = asyncio.create_task(
                client.post("/v1/completions", json=body, headers={"authorization": "Bearer secret-key"})
            )
            await eventually(lambda: worker.submits)
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                assert file.read().startswith(b"lockstep: router")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while (await client.get("/readyz")).json()["status"] != "draining":
                    await asyncio.sleep(0.01)
            assert (await running).json()["usage"]["completion_tokens"] == 40
        rest = await asyncio.wait_for(process.stderr.read(), 10)
        assert await process.wait() == 0
        assert b"secret-key" not in rest
        assert b"hello world" not in rest
        entries = [json.loads(line) for line in rest.splitlines()]
        (entry,) = [e for e in entries if e["message"] == "request" and e["endpoint"] == "/v1/completions"]
        assert (entry["status"], entry["completion_tokens"]) == (200, 40)
        assert entries[-1]["message"] == "stopped"
    finally:
        if process.returncode is None:
            process.kill()


async def test_taken_port_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--workers", "unix:/nowhere", "--port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert errors.decode().splitlines() == [f"cannot listen on 127.0.0.1:{port}: Address already in use"]
