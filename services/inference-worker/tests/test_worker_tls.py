"""With TLS the worker serves only peers that have a router's certificate."""

import asyncio
import contextlib
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import ROUTER, WORKER, Authority, Mounted
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import PATIENCE_S, Router, make_settings, served, submit, until
from lockstep_api.v1 import worker_pb2, worker_pb2_grpc
from lockstep_common.ports import free_port
from lockstep_common.telemetry import REGISTRY
from trustme import LeafCert


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def mounted(tmp_path: Path, authority: Authority) -> Mounted:
    return Mounted(tmp_path / "tls", authority, WORKER)


def dial(address: str, authority: Authority, leaf: LeafCert | None, name: str = WORKER) -> grpc.aio.Channel:
    """A channel that shows a certificate and trusts the authority."""
    key = chain = None
    if leaf is not None:
        key = leaf.private_key_pem.bytes()
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    credentials = grpc.ssl_channel_credentials(authority.ca.cert_pem.bytes(), key, chain)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextlib.asynccontextmanager
async def greeted(channel: grpc.aio.Channel) -> AsyncIterator[Router]:
    """A router that has been greeted."""
    async with channel:
        router = Router(worker_pb2_grpc.WorkerStub(channel).Serve())
        await router.greet()
        await router.ready()
        yield router


async def refusal(channel: grpc.aio.Channel) -> set[grpc.StatusCode]:
    """The outcome of each kind of call: Serve, Tokenizer, health, reflection."""
    async with channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        codes = set()
        # Nothing is written: a write to a call that is over fails with INTERNAL, a read says why it is over.
        calls = (
            lambda: worker.Serve().read(),
            lambda: worker.Tokenizer(worker_pb2.TokenizerRequest(digest="d"), timeout=PATIENCE_S),
            lambda: health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S),
            lambda: reflection(channel).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            codes.add(caught.value.code())
        return codes


async def list_services(channel: grpc.aio.Channel) -> object:
    call = reflection(channel)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    return await call.read()


def reflection(channel: grpc.aio.Channel) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=PATIENCE_S)


async def test_router_is_served(model_dir, socket_path, authority, mounted):
    settings = make_settings(model_dir, socket_path, **mounted.settings(ROUTER))
    async with served(settings) as worker:
        async with greeted(dial(worker.address, authority, authority.issue(ROUTER))) as router:
            await router.send(submit=submit("s", max_tokens=1))
            await until(lambda: worker.engine.requests)
            worker.engine.step()
            assert (await router.next("tokens")).tokens.streams[0].stream_id == "s"
        async with dial(worker.address, authority, authority.issue(ROUTER)) as channel:
            assert await list_services(channel)


@pytest.mark.parametrize("stranger", ["another name", "no certificate", "another authority", "expired", "plain text"])
async def test_strangers_get_nothing(model_dir, socket_path, authority, mounted, stranger):
    settings = make_settings(model_dir, socket_path, **mounted.settings(ROUTER))
    refused_before = REGISTRY.get_sample_value("lockstep_worker_refused_peers_total") or 0.0
    async with served(settings) as worker:
        channel = {
            "another name": lambda: dial(worker.address, authority, authority.issue("stranger.test", WORKER)),
            "no certificate": lambda: dial(worker.address, authority, None),
            "another authority": lambda: dial(worker.address, authority, Authority().issue(ROUTER)),
            "expired": lambda: dial(worker.address, authority, authority.issue(ROUTER, expired=True)),
            "plain text": lambda: grpc.aio.insecure_channel(worker.address),
        }[stranger]()
        expected = grpc.StatusCode.PERMISSION_DENIED if stranger == "another name" else grpc.StatusCode.UNAVAILABLE
        assert await refusal(channel) == {expected}
        # And the router is served beside them.
        async with greeted(dial(worker.address, authority, authority.issue(ROUTER))):
            pass
    refused = (REGISTRY.get_sample_value("lockstep_worker_refused_peers_total") or 0.0) - refused_before
    assert refused == (4 if stranger == "another name" else 0)


async def test_worker_of_another_name_is_not_spoken_to(model_dir, socket_path, authority, tmp_path):
    impostor = Mounted(tmp_path / "impostor", authority, "impostor.test")
    async with served(make_settings(model_dir, socket_path, **impostor.settings(ROUTER))) as worker:
        assert await refusal(dial(worker.address, authority, authority.issue(ROUTER))) == {grpc.StatusCode.UNAVAILABLE}


async def test_stream_runs_on_while_certificates_are_replaced(model_dir, socket_path, authority, mounted):
    newer = Authority()
    async with (
        served(make_settings(model_dir, socket_path, **mounted.settings(ROUTER))) as worker,
        greeted(dial(worker.address, authority, authority.issue(ROUTER))) as router,
    ):
        await router.send(submit=submit("s", max_tokens=3))
        await until(lambda: worker.engine.requests)
        worker.engine.step()
        await router.next("tokens")
        mounted.write(newer, WORKER)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until a dial of the new authority succeeds
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async with greeted(dial(worker.address, newer, newer.issue(ROUTER))):
                        break
                await asyncio.sleep(0.1)
        assert await refusal(dial(worker.address, authority, authority.issue(ROUTER))) == {grpc.StatusCode.UNAVAILABLE}
        worker.engine.step()
        worker.engine.step()
        tokens = [(await router.next("tokens")).tokens.streams[0] for _ in range(2)]
        assert [update.stream_id for update in tokens] == ["s", "s"]
        assert tokens[-1].finish


async def test_management_port_takes_tls_without_a_clients_certificate(model_dir, socket_path, authority, mounted):
    port = free_port()
    changes = {**mounted.settings(ROUTER), "management_port": port, "management_tls": True}
    context = ssl.create_default_context(cadata=authority.ca.cert_pem.bytes().decode())
    context.check_hostname = False

    def healthz() -> dict[str, str]:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", timeout=PATIENCE_S, context=context) as answer:
            return json.loads(answer.read())

    async with served(make_settings(model_dir, socket_path, **changes)):
        assert await asyncio.to_thread(healthz) == {"status": "alive"}
        with pytest.raises((ConnectionError, http.client.HTTPException, urllib.error.URLError)):
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE_S)
        assert await asyncio.to_thread(healthz) == {"status": "alive"}
