"""With TLS the router uses only workers with the right certificate, and clients use HTTPS."""

import asyncio
import contextlib
import signal
import ssl
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from authority import ROUTER, WORKER, Authority, Mounted
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.tls import RouterTls
from pydantic import ValidationError
from router_cluster import eventually
from router_process import BODY, listening, start
from scripted_worker import Script, ScriptedWorker
from state_server import StateServer


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def mounted(tmp_path: Path, authority: Authority) -> Mounted:
    return Mounted(tmp_path / "tls", authority, ROUTER, "localhost", "127.0.0.1")


def credentials(authority: Authority, *names: str, expired: bool = False) -> grpc.ServerCredentials:
    """A worker's credentials, which accept routers of the authority."""
    leaf = authority.issue(*names, expired=expired)
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    pair = (leaf.private_key_pem.bytes(), chain)
    return grpc.ssl_server_credentials([pair], authority.ca.cert_pem.bytes(), require_client_auth=True)


@contextlib.asynccontextmanager
async def routed(tmp_path: Path, mounted: Mounted, worker_credentials: grpc.ServerCredentials | None):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", credentials=worker_credentials).start()
    settings = RouterSettings(
        workers=[worker.target], backoff_initial_s=0.02, backoff_max_s=0.1, **mounted.settings(WORKER)
    )
    tls = RouterTls.load(settings)
    try:
        async with tls.watched(), Router(settings, dial=tls.dial) as router:
            yield router, worker
    finally:
        await worker.kill()


async def test_worker_with_the_right_name_is_used(tmp_path, authority, mounted):
    async with routed(tmp_path, mounted, credentials(authority, WORKER)) as (router, _):
        await eventually(router.workers.ready)


@pytest.mark.parametrize("name", ["state.test", "impostor.test"])
async def test_state_server_needs_a_certificate_for_its_name(tmp_path, authority, mounted, name):
    server = await StateServer(tmp_path / "state", credentials=credentials(authority, name)).start()
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", credentials=credentials(authority, WORKER)).start()
    settings = RouterSettings(
        workers=[worker.target],
        state_server=server.target,
        state_identity="state.test",
        state_timeout_s=1.0,
        **mounted.settings(WORKER),
    )
    tls = RouterTls.load(settings)
    async with tls.watched(), Router(settings, dial=tls.dial, dial_state=tls.dial_state) as router:
        client = router.mirrored.client
        if name == "state.test":
            assert await router.journals.find("tenant/key") is None
            assert server.backend.calls == ["bound"]
        else:
            while not client.requests.is_open:
                await router.journals.find("tenant/key")
            assert not server.backend.calls
    await server.kill()
    await worker.kill()


def test_state_server_with_tls_needs_a_name(mounted):
    with pytest.raises(ValidationError, match="state_identity"):
        RouterSettings(workers=["a:1"], state_server="b:2", **mounted.settings(WORKER))


@pytest.mark.parametrize("impostor", ["another name", "another authority", "expired", "plain text"])
async def test_impostors_hear_nothing(tmp_path, authority, mounted, impostor):
    shown = {
        "another name": lambda: credentials(authority, "impostor.test"),
        "another authority": lambda: credentials(Authority(), WORKER),
        "expired": lambda: credentials(authority, WORKER, expired=True),
        "plain text": lambda: None,
    }[impostor]()
    async with routed(tmp_path, mounted, shown) as (router, worker):
        (link,) = await wait_links(router)
        await eventually(lambda: link.problem)
        await asyncio.sleep(0.5)  # some dials
        assert not link.is_connected
        assert not worker.connected


async def wait_links(router):
    await eventually(lambda: router.workers.links)
    return router.workers.links


async def test_next_dial_uses_the_newest_certificates(tmp_path, authority, mounted):
    async with routed(tmp_path, mounted, credentials(authority, WORKER)) as (router, worker):
        await eventually(router.workers.ready)
        newer = Authority()
        worker.credentials = credentials(newer, WORKER)
        await worker.restart()
        await eventually(lambda: not router.workers.ready())
        mounted.write(newer, ROUTER)
        await eventually(router.workers.ready)


def client_context(authority: Authority, *shown: str, signed_by: Authority | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.ca.cert_pem.bytes().decode())
    if shown:
        (signed_by or authority).issue(*shown).configure_cert(context)
    return context


@contextlib.asynccontextmanager
async def process(tmp_path, *flags):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock").start()
    running = await start("--workers", worker.target, "--port", "0", *flags)
    try:
        yield running, await listening(running), worker
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
        await worker.kill()


async def test_https_from_the_first_request_through_a_rotation_to_the_drain(tmp_path, authority, mounted):
    flags = ("--http-tls-cert", mounted.cert, "--http-tls-key", mounted.key)
    async with process(tmp_path, *flags) as (running, entry, worker):
        url = f"https://localhost:{entry['port']}"
        async with httpx.AsyncClient(base_url=url, verify=client_context(authority), timeout=30) as client:
            async with asyncio.timeout(30):
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.02)
            worker.script = Script(delay_s=0.05)
            async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                newer = Authority()
                mounted.write(newer, "localhost")
                async with httpx.AsyncClient(base_url=url, verify=client_context(newer), timeout=30) as other:
                    async with asyncio.timeout(30):
                        while True:
                            with contextlib.suppress(httpx.ConnectError):
                                assert (await other.get("/healthz")).status_code == 200
                                break
                            await asyncio.sleep(0.1)
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            worker.script = Script()
            plain = httpx.AsyncClient(base_url=f"http://localhost:{entry['port']}", timeout=30)
            async with plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get("/healthz")
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 30) == 0


@contextlib.asynccontextmanager
async def stalled(port: int, count: int):
    """Connections that never begin their handshake."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def test_stalled_handshakes_keep_nobody_out_and_end_in_time(tmp_path, authority, mounted):
    flags = ("--http-tls-cert", mounted.cert, "--http-tls-key", mounted.key, "--max-connections", "8")
    async with process(tmp_path, *flags, "--header-timeout-s", "3") as (running, entry, _):
        async with stalled(entry["port"], 40) as readers:
            for _ in range(3):
                async with httpx.AsyncClient(verify=client_context(authority), timeout=30) as client:
                    assert (await client.get(f"https://localhost:{entry['port']}/healthz")).status_code == 200
            assert len(psutil.Process(running.pid).net_connections("tcp")) < 8 + 10
            async with asyncio.timeout(30):
                assert [await reader.read() for reader in readers] == [b""] * 40
        async with stalled(entry["port"], 3):
            await asyncio.sleep(0.1)
            running.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(running.wait(), 30) == 0


async def test_clients_without_a_certificate_are_refused_if_they_must_have_one(tmp_path, authority, mounted):
    flags = ("--http-tls-cert", mounted.cert, "--http-tls-key", mounted.key, "--http-tls-client-ca", mounted.ca)
    async with process(tmp_path, *flags) as (_, entry, _):

        async def health(context: ssl.SSLContext) -> int:
            async with httpx.AsyncClient(verify=context, timeout=30) as client:
                return (await client.get(f"https://localhost:{entry['port']}/healthz")).status_code

        assert await health(client_context(authority, "client.test")) == 200
        for stranger in (
            client_context(authority),
            client_context(authority, "client.test", signed_by=Authority()),
        ):
            with pytest.raises(httpx.TransportError):
                await health(stranger)


async def test_management_port_takes_tls(tmp_path, authority, mounted):
    flags = [word for key, value in mounted.settings(WORKER).items() for word in (f"--{key.replace('_', '-')}", value)]
    async with (
        process(tmp_path, *flags, "--management-tls") as (_, entry, _),
        httpx.AsyncClient(verify=client_context(authority), timeout=30) as client,
    ):
        root = f"https://localhost:{entry['management_port']}"
        assert (await client.get(f"{root}/healthz")).status_code == 200
        assert (await client.get(f"{root}/metrics")).status_code == 403
        shown = client_context(authority, "prometheus.test")
        async with httpx.AsyncClient(verify=shown, timeout=30) as prometheus:
            assert "lockstep_tls_certificate_expiry_timestamp_seconds" in (await prometheus.get(f"{root}/metrics")).text
            assert (await prometheus.get(f"{root}/status")).status_code == 200


async def test_files_that_cannot_be_used_end_the_process(tmp_path, authority, mounted):
    mounted.write(authority, ROUTER, expired=True)
    running = await start("--workers", "a:1", "--http-tls-cert", mounted.cert, "--http-tls-key", mounted.key)
    _, errors = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 2
    (sentence,) = errors.decode().splitlines()
    assert sentence.startswith(f"http_tls_cert ({mounted.cert}) has expired at ")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}, "peer_identity"),
        ({"peer_identity": "a.test"}, "peer_identity"),
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "peer_identity": "spiffe://a/b"}, "peer_identity"),
        ({"http_tls_cert": "c"}, "http_tls_key"),
        ({"http_tls_client_ca": "c"}, "http_tls_client_ca"),
        ({"management_tls": True}, "management_tls"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, field):
    with pytest.raises(ValidationError) as caught:
        RouterSettings(workers="a:1", **settings)
    assert caught.value.errors()[0]["loc"] == (field,)
