"""Whatever comes in at the state server's port, no defect shows, and eight other clients get right answers.

`--fuzz-cases 100000` or `--fuzz-seconds 600` for a long run by hand; a seed makes the same cases again.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import odd_requests
import pytest
from bent import bent
from fuzzing import PREFACE, run_cases
from lockstep_common.ports import free_port
from redis_server import RedisServer
from state_load import Load, loaded
from state_process import dialled, running

_TIMEOUT_S = 60.0


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.slow), "redis"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Of a state server, which has to live until the end and then to stop as it should."""
    number = free_port()
    patience = ("--store-timeout-s", "10", "--store-batch-timeout-s", "20", "--call-timeout-s", "60")
    with contextlib.ExitStack() as stack:
        store = "memory"
        if request.param == "redis":
            server = RedisServer(tmp_path / "redis")
            stack.callback(server.kill)
            store = server.address
        flags = ("--store", store, "--max-transfers", "256", *patience)
        process = stack.enter_context(running(f"127.0.0.1:{number}", *flags))
        yield number
        assert process.poll() is None
        process.terminate()
        assert process.wait(_TIMEOUT_S) == 0


@contextlib.asynccontextmanager
async def behaved(port: int, seed: int) -> AsyncIterator[Load]:
    """Clients whose calls all end well, with right answers."""
    async with dialled(f"127.0.0.1:{port}") as client, loaded(client, seed) as load:
        yield load
        await load.goes_on()
        assert set(load.statuses()) == {"OK"}, load.statuses()


async def test_messages(port, seed, pytestconfig, summarize) -> None:
    draw, statuses = random.Random(seed), Counter[str]()
    async with dialled(f"127.0.0.1:{port}") as client:

        async def case() -> None:
            leaves = draw.random() < 0.05
            request = odd_requests.make(draw, f"{client.tenant}-{draw.randrange(20)}")
            method = request.method if draw.random() < 0.98 else draw.choice(["Kv/Nothing", "Nothing/Get", ""])
            sent = dataclasses.replace(request, method=method)
            status, _ = await odd_requests.send(client.channel, sent, _TIMEOUT_S, leaves=leaves)
            assert status in odd_requests.ANSWERS, request
            statuses[status] += 1

        async with behaved(port, seed) as load:
            cases = await run_cases(pytestconfig, case, share=2, timeout_s=_TIMEOUT_S)
    summarize(f"state server, messages: {cases} cases (seed {seed}), {dict(statuses)}; {len(load.results)} other calls")
    assert statuses["OK"] > cases / 10
    assert statuses["INVALID_ARGUMENT"] > cases / 5


async def test_bytes(port, seed, pytestconfig, summarize) -> None:
    draw, answered = random.Random(seed), 0

    async def case() -> None:
        nonlocal answered
        data = PREFACE if draw.random() < 0.8 else draw.randbytes(draw.randrange(200))
        for _ in range(draw.randrange(1, 6)):
            payload = draw.randbytes(draw.randrange(200))
            head = len(payload).to_bytes(3) + bytes([draw.randrange(11), draw.randrange(256)])
            data += head + draw.randrange(8).to_bytes(4) + payload
        if draw.random() < 0.3:
            data = bent(draw, data)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(0.05):
                while some := await reader.read(1 << 16):
                    received += len(some)
        writer.transport.abort()
        answered += received > 0

    async with behaved(port, seed) as load:
        cases = await run_cases(pytestconfig, case, share=2, timeout_s=_TIMEOUT_S)
    counts = f"{cases} connections, {answered} answered (seed {seed}); {len(load.results)} other calls"
    summarize(f"state server, bytes: {counts}")
    assert answered  # nearly all, where the machine is not so slow that they are cut off first
