"""What the contracts hold for: three workers (the router's double, a scripted engine, the real one), four faces."""

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "services/router/tests"))
sys.path.append(str(Path(__file__).parents[2] / "services/inference-worker/tests"))

from faces import GRPC, REST, SSE, WEBSOCKET, Grpc, Rest, Sse, WebSocket
from implementations import DOUBLE, REAL, SCRIPTED, Implementation, RealProcess, double, real, scripted
from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import eventually
from scripted_worker import ScriptedWorker, tokenizer_files
from systems import Make, System


@pytest.fixture(scope="module")
def real_process(private_tmp: Path) -> Iterator[RealProcess]:
    """A worker process with two ranks; started for the first test that wants it."""
    process = RealProcess(private_tmp / "real.sock")
    yield process
    process.stop()


@pytest.fixture
async def worker(
    request: pytest.FixtureRequest, real_process: RealProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Implementation]:
    """The implementation that the test is run against."""
    path = tmp_path_factory.mktemp("w") / "s"
    assert len(os.fsencode(path)) < 100
    context = {DOUBLE: double, SCRIPTED: scripted}.get(request.param)
    async with context(path) if context else real(real_process) as implementation:
        yield implementation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's IMPLEMENTATIONS names the workers for its tests; all three by default."""
    if "worker" in metafunc.fixturenames:
        chosen = getattr(metafunc.module, "IMPLEMENTATIONS", (DOUBLE, SCRIPTED, REAL))
        metafunc.parametrize("worker", chosen, indirect=True)


# The router's faces.


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_files())


@pytest.fixture
async def make(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Make]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(workers: int = 2, *, model: dict[str, Any] | None = None, **settings: Any) -> System:
            started = []
            for index in range(workers):
                worker = ScriptedWorker(f"w{index}", tmp_path / f"w{index}.sock", **(model or {}))
                started.append(await worker.start())
                stack.push_async_callback(worker.kill)
            router = Router(
                RouterSettings(
                    workers=[worker.target for worker in started],
                    grpc_port=0,
                    heartbeat_timeout_s=1.0,
                    backoff_initial_s=0.02,
                    backoff_max_s=0.1,
                    **settings,
                )
            )
            await stack.enter_async_context(router)
            system = System(router, create_app(router), started, None, tokenizer)
            if model and "files" in model:
                system.tokenizer = Tokenizer(model["files"])
            client: httpx.AsyncClient = await stack.enter_async_context(system.over_http())
            system.http = client
            channel: grpc.aio.Channel = await stack.enter_async_context(system.over_grpc())
            system.faces = {
                REST: Rest(client),
                SSE: Sse(client),
                WEBSOCKET: WebSocket(client),
                GRPC: Grpc(channel, system.grpc_address),
            }
            await eventually(lambda: len(router.workers.ready()) == workers)
            return system

        yield make


@pytest.fixture
async def system(make: Make) -> System:
    return await make()
