"""The bundled Redis' configuration, as the chart renders it, on a real redis-server: what its user can do."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis
import yaml
from lockstep_api.v1 import state_pb2
from lockstep_common.ports import free_port
from lockstep_state.backend import Block, Limits, Opening, Take, Write
from lockstep_state.redis_backend import RedisBackend, RedisOptions
from lockstep_state.values import Values
from redis_server import program

CHART = Path(__file__).parents[2] / "charts/lockstep"
HELM = shutil.which("helm")
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def rendered() -> dict[str, str]:
    """The Secret with its password and its configuration."""
    state = {"enabled": True, "backend": "redis", "redis": {"bundled": {"enabled": True}}}
    command = [str(HELM), "template", "r", str(CHART), "-f", "-", "-s", "templates/kv-state-server/redis.yaml"]
    given = json.dumps({"state": state})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=True)
    (secret,) = (each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "Secret")
    found: dict[str, str] = secret["stringData"]
    return found


@pytest.fixture
def bundled(tmp_path: Path):
    """The port and the password of a redis-server with that configuration, but for its port and its addresses."""
    secret = rendered()
    port = free_port()
    path = tmp_path / "redis.conf"
    path.write_text(
        secret["redis.conf"]
        .replace("port 6379", f"port {port}")
        .replace("bind * -::*", "bind 127.0.0.1")
        .replace("dir /tmp", f"dir {tmp_path}")
    )
    with subprocess.Popen([program("redis-server"), str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            await_listening(process, port)
            yield port, secret["password"]
        finally:
            process.kill()


def await_listening(process: subprocess.Popen[str], port: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until_s, "redis-server does not answer"
        try:
            redis.Redis(port=port, socket_timeout=1).ping()
        except redis.AuthenticationError:
            return
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(0.02)


def test_each_rendering_has_another_password() -> None:
    passwords = [rendered()["password"] for _ in range(2)]
    assert all(re.fullmatch("[A-Za-z0-9]{32}", each) for each in passwords)
    assert passwords[0] != passwords[1]


async def test_the_state_servers_user_can_do_what_the_state_server_does(bundled: tuple[int, str]) -> None:
    port, password = bundled
    options = RedisOptions(
        f"redis://127.0.0.1:{port}/0", username="lockstep", password=password, timeout_s=20.0, batch_timeout_s=20.0
    )
    backend = RedisBackend(options, Values([]), Limits(1 << 16, 1 << 20, 10, 1 << 20))
    running = asyncio.create_task(backend.run())
    try:
        pieces = [state_pb2.Piece(choice=0, position=0, ids=[5, 6])]
        write = Write("tenant", "stream", 1, 60.0, opening=Opening(b"record", 1, "router-1"), pieces=pieces)
        (result,) = await backend.append([write])
        assert result.outcome == state_pb2.WRITE_OUTCOME_OK
        stream = await backend.read("stream", Take("router-2", 60.0))
        assert stream is not None
        assert list(stream.logs[0].ids) == [5, 6]
        assert await backend.put([Block("tenant", "block", b"content", 60.0)]) == [True]
        granted, lease = await backend.acquire("lease", "router-1", 60.0)
        assert granted
        assert (await backend.release("lease", "router-1", lease.epoch))[0]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await backend.close()


def test_nobody_else_can_log_in_and_the_user_can_do_nothing_else(bundled: tuple[int, str]) -> None:
    port, password = bundled
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
    with redis.Redis(port=port, username="lockstep", password=password) as client:
        client.set("lockstep:a", 1, ex=60)
        for forbidden in (("SET", "other", 1), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("ACL", "LIST"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*forbidden)


def test_a_full_one_refuses_writes_and_evicts_nothing(bundled: tuple[int, str]) -> None:
    port, password = bundled
    with redis.Redis(port=port, username="lockstep", password=password) as client:
        client.set("lockstep:first", 1, ex=600)
        refusals = 0
        for number in range(256):
            try:
                client.set(f"lockstep:{number}", bytes(1 << 20), ex=600)
            except redis.exceptions.OutOfMemoryError:
                refusals += 1
        assert 0 < refusals < 256
        assert client.get("lockstep:first") == b"1"
