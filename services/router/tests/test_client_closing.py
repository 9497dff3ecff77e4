"""Streams of `lockstep_client` that are closed from elsewhere while somebody reads them, on real routers."""

import asyncio

import pytest
from lockstep_client import AsyncLockstepClient, ConnectionFailedError, LockstepClient
from router_cluster import eventually
from scripted_worker import Script
from test_client_over_grpc import POLICY, ports, relay

FIELDS = {"prompt": "hello", "model": "reference", "max_tokens": 50}
LONG = FIELDS | {"max_tokens": 200, "seed": 1}
"""It does not end meanwhile."""


async def close_blocking(url, received):
    """Read a stream in a thread, and close it in another one."""
    with LockstepClient(url, policy=POLICY) as client:
        stream = await asyncio.to_thread(lambda: client.complete(**FIELDS, stream=True))
        reading = asyncio.create_task(asyncio.to_thread(lambda: received.extend(stream)))
        await eventually(lambda: received)
        await asyncio.to_thread(stream.close)
        await asyncio.wait_for(reading, 20)


async def close_with_asyncio(url, received):
    """Read a stream in a task, and close it in another one."""
    async with AsyncLockstepClient(url, policy=POLICY) as client:
        stream = await client.complete(**FIELDS, stream=True)

        async def read():
            async for event in stream:
                received.append(event)

        reading = asyncio.create_task(read())
        await eventually(lambda: received)
        await stream.aclose()
        await asyncio.wait_for(reading, 20)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("close", [close_blocking, close_with_asyncio])
async def test_reader_gets_an_error_and_the_router_ends_the_answer(cluster, scheme, close):
    for worker in cluster.workers:
        worker.script = Script(hang_after=3)
    received = []
    async with ports(cluster) as port:
        with pytest.raises(ConnectionFailedError, match="was closed") as closed:
            await close(f"{scheme}://127.0.0.1:{port[scheme]}", received)
        await eventually(lambda: cluster.router.streams == 0)
    text = "".join(event.text for event in received if hasattr(event, "text"))
    assert text
    assert closed.value.received.texts[0] == text


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_client_that_is_closed_resumes_nothing(cluster, is_resumed):
    """Nobody would close the connection that it would make, nor the one that a resumed stream has for itself."""
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.05)
    async with cluster.over_grpc():
        port = int(cluster.grpc_address.rpartition(":")[2])
        # The first connection of the second case ends after a few events.
        async with relay(port, [700] if is_resumed else []) as url:
            client = AsyncLockstepClient(url, policy=POLICY)
            events = aiter(await client.complete(**LONG, stream=True))
            received = [await anext(events) for _ in range(15)]
            await client.aclose()
            with pytest.raises(ConnectionFailedError, match="is closed") as closed:
                async with asyncio.timeout(20):
                    received += [await anext(events) for _ in range(1000)]
            await eventually(lambda: cluster.router.runs.readings == 0)
    assert closed.value.received.texts[0].startswith("".join(event.text for event in received))
