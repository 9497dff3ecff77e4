"""`listenAddress: "::"` of the chart: each service listens there, and is reached by IPv4 and by IPv6."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lockstep_common.address import join_host_port
from lockstep_common.ports import free_port
from lockstep_router.faces.forwarded import ForwardedClients
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

SCRIPTED = Path(__file__).parents[2] / "services/inference-worker/tests/scripted_process.py"
PATIENCE_S = 60.0


def has_ipv6() -> bool:
    """Whether a socket can listen on `::` here and take IPv4 too."""
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::", 0))
            return not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@asynccontextmanager
async def listening(*arguments: str) -> AsyncIterator[dict[str, object]]:
    """A service as a process with these arguments; yields what its log says about where it listens."""
    path = os.pathsep.join(sys.path)
    variables = {"PYTHONPATH": path, "LOCKSTEP_MANAGEMENT_HOST": "::", "LOCKSTEP_MANAGEMENT_PORT": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | variables | {"LOCKSTEP_DIE_WITH_PARENT": str(os.getpid())},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            lines = [json.loads(line) async for line in _until_listening(process.stderr)]
        yield lines[-1]
    finally:
        process.kill()
        await process.communicate()


async def _until_listening(log: asyncio.StreamReader) -> AsyncIterator[bytes]:
    async for line in log:
        yield line
        if b'"listening"' in line:
            return
    raise AssertionError("the service ended")


async def reach(*ports: object) -> None:
    """Connect to each port by both protocols."""
    for port in ports:
        for address in ("127.0.0.1", "::1"):
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, int(str(port))), PATIENCE_S)
            writer.close()
            await writer.wait_closed()


@needs_ipv6
async def test_router_takes_both_protocols() -> None:
    flags = ("--workers", "a:1", "--host", "::", "--port", "0", "--grpc-port", "0")
    async with listening("-m", "lockstep_router", *flags) as entry:
        await reach(entry["port"], entry["grpc_port"], entry["management_port"])


@needs_ipv6
async def test_worker_takes_both_protocols(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0, "hello": 1}, unk_token="?"))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    port = free_port()
    listen = join_host_port("::", port)
    async with listening(str(SCRIPTED), "--model", str(tmp_path), "--listen", listen) as entry:
        await reach(port, entry["management_port"])


@needs_ipv6
async def test_state_server_takes_both_protocols() -> None:
    port = free_port()
    async with listening("-m", "lockstep_state", "--listen", join_host_port("::", port)) as entry:
        await reach(port, entry["management_port"])


@pytest.mark.parametrize("proxy", ["::ffff:10.0.0.7", "::ffff:10.0.0.0/104"])
async def test_an_ipv4_proxy_is_trusted_as_it_is_documented(proxy: str) -> None:
    proxies = ForwardedClients([proxy])
    assert await proxies.address("::ffff:10.0.0.7", [b"192.0.2.1"]) == "192.0.2.1"
    assert await proxies.address("::ffff:11.0.0.7", [b"192.0.2.1"]) == "::ffff:11.0.0.7"
