"""The router as a process: it starts, names itself, refuses invalid settings, and drains on a signal."""

import asyncio
import contextlib
import json
import signal
import socket
import sys

import httpx
import pytest
from router_cluster import eventually
from router_process import BODY, listening, start
from scripted_worker import Script, ScriptedWorker


@pytest.fixture
async def worker(tmp_path):
    made = await ScriptedWorker("w0", tmp_path / "w0.sock").start()
    yield made
    await made.kill()


async def port_of(process):
    return (await listening(process))["port"]


async def test_serves_drains_and_leaves(worker):
    process = await start("--workers", worker.target, "--port", "0")
    try:
        port = await port_of(process)
        worker.script = Script(delay_s=0.1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            body = {"model": "reference", "prompt": "hello", "max_tokens": 40, "seed": 1}
            running = asyncio.create_task(
                client.post("/v1/completions", json=body, headers={"authorization": "Bearer secret-key"})
            )
            await eventually(lambda: worker.submits)
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                assert file.read().startswith(b"lockstep: router")
            process.send_signal(signal.SIGTERM)
            alone = {"connection": "close"}
            async with asyncio.timeout(30):
                # A connection of its own each time: one that is kept may be closed just when it is used again.
                while (await client.get("/readyz", headers=alone)).json()["status"] != "draining":
                    await asyncio.sleep(0.01)
            assert (await running).json()["usage"]["completion_tokens"] == 40
        rest = await asyncio.wait_for(process.stderr.read(), 30)
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


async def readyz(client, status):
    async with asyncio.timeout(30):
        while (response := await client.get("/readyz")).status_code != status:
            await asyncio.sleep(0.01)
    return response


@contextlib.asynccontextmanager
async def serving(worker, *flags):
    process = await start("--workers", worker.target, "--port", "0", *flags)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port_of(process)}", timeout=30) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_lame_duck_still_serves_but_sends_its_clients_away_until_a_second_signal(worker):
    async with serving(worker, "--lame-duck-s", "600") as (process, client):
        assert "connection" not in (await readyz(client, 200)).headers
        process.send_signal(signal.SIGTERM)
        response = await readyz(client, 503)
        assert (response.json()["status"], response.headers["connection"]) == ("draining", "close")
        served = await client.post("/v1/completions", json=BODY)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            assert stream.headers["connection"] == "close"
            assert [line async for line in stream.aiter_lines()][-2:] == ["data: [DONE]", ""]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 130


async def test_drain_after_the_lame_duck_closes_connections_too(worker):
    worker.script = Script(delay_s=0.2)
    async with serving(worker, "--lame-duck-s", "0.2") as (process, client):
        await readyz(client, 200)
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await eventually(lambda: worker.submits)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while (refused := await client.post("/v1/completions", json=BODY | {"max_tokens": 1})).status_code == 200:
                await asyncio.sleep(0.05)
        assert (refused.json()["error"]["code"], refused.headers["connection"]) == ("draining", "close")
        assert (await running).status_code == 200
        assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.parametrize("fields", [{}, {"resumable": True}])
async def test_stream_that_outlasts_the_drain_ends_with_a_typed_error(worker, fields):
    worker.script = Script(hang_after=2)
    async with serving(worker, "--drain-timeout-s", "0.2") as (process, client):
        await readyz(client, 200)
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True} | fields) as stream:
            lines = aiter(stream.aiter_lines())
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            data = [line async for line in lines if line.startswith("data: ")]
        assert json.loads(data[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_answer_begun_before_the_signal_is_the_last_on_its_connection(worker):
    """Its headers had no `Connection: close`: on an open connection the client's next request would be refused."""
    worker.script = Script(delay_s=0.05)
    async with serving(worker) as (process, client):
        await readyz(client, 200)
        idle, _ = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        body = json.dumps(BODY | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert b"connection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        longer = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 120}))
        await eventually(lambda: len(worker.submits) == 2)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(idle.read(), 30) == b""
        assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert not longer.done(), "connections were closed because the router ended, not because it drains"
        assert (await longer).status_code == 200


async def test_management_port_tells_what_the_public_one_does_not(worker):
    process = await start("--workers", worker.target, "--port", "0")
    try:
        entry = await listening(process)
        async with httpx.AsyncClient(timeout=30) as client:
            public, private = (f"http://127.0.0.1:{entry[name]}" for name in ("port", "management_port"))
            async with asyncio.timeout(30):
                while (await client.get(f"{private}/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
            for path in ("/metrics", "/status"):
                assert (await client.get(public + path)).status_code == 404
            assert (await client.get(f"{private}/healthz")).json() == {"status": "alive"}
            assert (await client.post(f"{public}/v1/completions", json=BODY)).status_code == 200
            counted = 'lockstep_router_requests_total{code="200",endpoint="/v1/completions",face="http"} 1.0'
            async with asyncio.timeout(30):
                # A request has ended and is counted when its client has the answer already.
                while counted not in (await client.get(f"{private}/metrics")).text:
                    await asyncio.sleep(0.01)
            assert [each["id"] for each in (await client.get(f"{private}/status")).json()["workers"]] == ["w0"]
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()


async def test_taken_management_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("--workers", "a:1", "--port", "0", "--management-port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    sentence = f"cannot listen on 127.0.0.1:{port} for health and metrics: Address already in use"
    assert errors.decode().splitlines() == [sentence]


async def test_every_response_names_the_router(worker):
    async with serving(worker, "--router-id", "router-7") as (_, client):
        await readyz(client, 200)
        for response in (
            await client.get("/healthz"),
            await client.get("/nowhere"),
            await client.post("/v1/completions", json=BODY),
            await client.post("/v1/completions", json=BODY | {"stream": True}),
            await client.post("/v1/completions", content=b"no json"),
        ):
            assert response.headers.get_list("x-lockstep-router") == ["router-7"]
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"this is no HTTP\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert b"400 Bad Request" in answer
        assert b"x-lockstep-router: router-7" in answer.lower()


async def test_last_words_go_into_the_termination_message(tmp_path):
    log = tmp_path / "termination-log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--workers", "a:1", "--port", str(port), "--termination-log", str(log))
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert errors.decode() == log.read_text() + "\n" == f"cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_wrong_settings_are_last_words_too(tmp_path):
    log = tmp_path / "termination-log"
    log.write_text("something old and rather long" * 10)
    process = await start("--discovery", "dns", LOCKSTEP_TERMINATION_LOG=str(log))
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert errors.decode() == log.read_text() + "\n" == "setting workers_dns: must be set for discovery = dns\n"


async def test_kubernetes_client_is_loaded_only_if_it_is_asked_for():
    code = (
        "import asyncio, sys; from lockstep_router import server\n"
        "from lockstep_router.router import Router; from lockstep_router.settings import RouterSettings\n"
        "async def main():\n"
        "    async with Router(RouterSettings(workers='a:1')): pass\n"
        "asyncio.run(main()); print([m for m in sys.modules if m.split('.')[0] in ('kubernetes', 'aiohttp', 'torch')])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output == b"[]\n"


async def test_only_faces_load_the_web_framework():
    code = "import sys; from lockstep_router import router; print([m for m in sys.modules if 'fastapi' in m])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output == b"[]\n"


async def test_taken_port_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--workers", "unix:/nowhere", "--port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert errors.decode().splitlines() == [f"cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_what_the_event_loop_waits_for_does_not_hold_up_the_end():
    """Such as a look-up without a DNS server that answers: the last lines are there all the same."""
    code = (
        "import asyncio, time; from lockstep_router.server import run\n"
        "from lockstep_router.settings import RouterSettings\n"
        "def begin(_):\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600); print('listening', flush=True)\n"
        "run(RouterSettings(workers='unix:/nowhere', port=0, management_port=0), on_listening=begin)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"listening\n"
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, json.loads(errors.splitlines()[-1])["message"]) == (0, "stopped")
