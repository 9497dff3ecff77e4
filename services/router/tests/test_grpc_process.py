"""The gRPC port of the router's process: its certificates, its place in the drain, and settings that cannot be used."""

import asyncio
import signal
import socket

import grpc
import pytest
from authority import Authority, Mounted
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from router_cluster import eventually
from router_process import listening, start
from scripted_worker import Script, ScriptedWorker

REQUEST = inference_pb2.GenerateRequest(
    model="reference", prompt="hello", sampling=inference_pb2.Sampling(max_tokens=60, seed=1)
)


def credentials(trusted: Authority, shown: Authority | None = None) -> grpc.ChannelCredentials:
    root = trusted.ca.cert_pem.bytes()
    if shown is None:
        return grpc.ssl_channel_credentials(root)
    leaf = shown.issue("client.test")
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    return grpc.ssl_channel_credentials(root, leaf.private_key_pem.bytes(), chain)


async def is_served(channel: grpc.aio.Channel) -> bool:
    async with channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_certificates_of_https_and_the_drain_hold_for_grpc(tmp_path):
    authority = Authority()
    mounted = Mounted(tmp_path / "tls", authority, "localhost")
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", script=Script(delay_s=0.02)).start()
    tls = ("--http-tls-cert", mounted.cert, "--http-tls-key", mounted.key, "--http-tls-client-ca", mounted.ca)
    process = await start("--workers", worker.target, "--port", "0", "--grpc-port", "0", *tls)
    try:
        address = f"localhost:{(await listening(process))['grpc_port']}"
        assert not await is_served(grpc.aio.insecure_channel(address))
        for refused in (
            credentials(authority),
            credentials(authority, Authority()),
            credentials(Authority(), authority),
        ):
            assert not await is_served(grpc.aio.secure_channel(address, refused))
        async with grpc.aio.secure_channel(address, credentials(authority, authority)) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)
            events = [await anext(aiter(call))]
            process.send_signal(signal.SIGTERM)
            events += [event async for event in call]
        assert events[-1].usage.completion_tokens == 60
        await eventually(lambda: not worker.connected)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await worker.kill()


async def test_call_that_outlasts_the_drain_ends_with_a_typed_error(tmp_path):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", script=Script(hang_after=2)).start()
    process = await start("--workers", worker.target, "--port", "0", "--grpc-port", "0", "--drain-timeout-s", "0.2")
    try:
        address = f"127.0.0.1:{(await listening(process))['grpc_port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST, timeout=60, wait_for_ready=True)
            await anext(aiter(call))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in caught.value.details()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await worker.kill()


async def test_port_in_use_ends_the_process():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await start("--workers", "a:1", "--port", "0", "--grpc-port", port)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}".encode() in errors


@pytest.mark.parametrize("flags", [(), ("--grpc-port", "0")])
async def test_port_is_there_if_it_is_set(flags):
    process = await start("--workers", "a:1", "--port", "0", *flags)
    try:
        assert ("grpc_port" in await listening(process)) is bool(flags)
    finally:
        process.kill()
        await process.wait()
