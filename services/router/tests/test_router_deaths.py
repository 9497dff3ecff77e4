"""`lockstep_client` on real router processes that are killed: the streams of its users continue."""

import asyncio
import contextlib
import socket

import pytest
from lockstep_client import AsyncLockstepClient, Finish, Policy, StreamDiverged, StreamLost, TextPiece, Usage
from lockstep_client.openai import AsyncOpenAI
from router_cluster import Cluster, eventually
from router_process import listening, start
from scripted_worker import Script, ScriptedWorker

TOKENS = 40
FIELDS = {"model": "reference", "prompt": "hello world", "max_tokens": TOKENS, "seed": 7}
POLICY = Policy(backoff_s=0.05, timeout_s=60.0, retries=20)


class Routers:
    """Router processes on one scripted worker."""

    def __init__(self, worker, stack):
        self.worker = worker
        self.urls = []
        self._stack = stack
        self._processes = {}

    async def start(self, port=0):
        process = await start("--workers", self.worker.target, "--port", str(port))
        self._stack.push_async_callback(self._end, process)
        url = f"http://127.0.0.1:{(await listening(process))['port']}/v1"
        self._processes[url] = process
        self.urls = list(self._processes)
        return url

    async def kill(self, url):
        await self._end(self._processes.pop(url))

    async def _end(self, process):
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def routers(tmp_path):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", script=Script(delay_s=0.02)).start()
    async with contextlib.AsyncExitStack() as stack:
        yield Routers(worker, stack)
    await worker.kill()


@pytest.fixture
def expected(tokenizer):
    return Cluster(None, None, [], None, tokenizer).undisturbed("hello world", 7, TOKENS)


async def text_with_death(client, die, after=5, **options):
    """The text of a stream during which something happens, and its other events."""
    text, others = "", []
    async with await client.complete(**FIELDS, stream=True, **options) as stream:
        number = 0
        async for event in stream:
            number += 1
            if number == after:
                await die()
            if isinstance(event, TextPiece):
                text += event.text
            else:
                others.append(event)
    return text, others


async def test_connection_that_breaks_is_resumed_on_the_same_router(routers, expected):
    url = await routers.start()
    async with relay(url) as (through, cut), AsyncLockstepClient(through, policy=POLICY) as client:

        async def die():
            cut()

        text, others = await text_with_death(client, die)
    assert text == expected
    assert [type(each) for each in others] == [Finish, Usage]
    assert others[1].completion_tokens == TOKENS
    assert len(routers.worker.submits) == 1
    assert not routers.worker.cancels


async def test_killed_router_is_replaced_by_another(routers, expected):
    doomed, _ = await routers.start(), await routers.start()
    async with AsyncLockstepClient(routers.urls, policy=POLICY) as client:
        prefer(client._transport, doomed)
        text, others = await text_with_death(client, lambda: routers.kill(doomed))
    assert text == expected
    assert [type(each) for each in others] == [Finish, Usage]
    assert len(routers.worker.submits) == 2


async def test_killed_router_is_a_typed_error_without_a_repeat(routers, expected):
    doomed, _ = await routers.start(), await routers.start()
    async with AsyncLockstepClient(routers.urls, policy=POLICY) as client:
        prefer(client._transport, doomed)
        with pytest.raises(StreamLost) as lost:
            await text_with_death(client, lambda: routers.kill(doomed), on_lost="error")
    assert not isinstance(lost.value, StreamDiverged)
    assert lost.value.received.events >= 5
    assert expected.startswith(lost.value.received.texts[0])
    assert len(routers.worker.submits) == 1


async def test_router_that_restarts_on_its_port(routers, expected):
    url = await routers.start()

    async def restart():
        await routers.kill(url)
        assert await routers.start(int(url.rpartition(":")[2].removesuffix("/v1"))) == url

    async with AsyncLockstepClient(url, policy=POLICY) as client:
        text, _ = await text_with_death(client, restart)
    assert text == expected


async def test_official_client_survives(routers, expected):
    doomed, _ = await routers.start(), await routers.start()
    async with AsyncOpenAI(base_url=routers.urls, api_key="k", policy=POLICY) as client:
        prefer(client._client._transport._transport, doomed)
        text = ""
        stream = await client.completions.create(**FIELDS, stream=True)
        number = 0
        async for chunk in stream:
            number += 1
            if number == 5:
                await routers.kill(doomed)
            text += chunk.choices[0].text
    assert text == expected
    assert len(routers.worker.submits) == 2


async def test_leaving_cancels_in_the_worker(routers):
    async with AsyncLockstepClient(await routers.start(), policy=POLICY) as client:
        async with await client.complete(**FIELDS, stream=True) as stream:
            await anext(aiter(stream))
        await eventually(lambda: routers.worker.cancels)


async def test_whole_answer_joins_its_generation(routers, expected):
    url = await routers.start()
    async with relay(url) as (through, cut), AsyncLockstepClient(through, policy=POLICY) as client:
        asking = asyncio.create_task(client.complete(**FIELDS))
        await eventually(lambda: routers.worker.submits)
        cut()
        assert (await asking).text == expected
    assert len(routers.worker.submits) == 1


def prefer(transport, url):
    """Let each round through the routers begin with one."""
    routers = transport._shared.routers
    pick = routers.pick

    def choose(tried):
        first = [each for each in routers.known() if url.startswith(each.root + "/") and each not in tried]
        return first[0] if first else pick(tried)

    routers.pick = choose


@contextlib.asynccontextmanager
async def relay(url):
    """Connections to a router that can be cut: gives its URL and what cuts all of them."""
    port = int(url.rpartition(":")[2].removesuffix("/v1"))
    writers = set()

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.update((writer, there_writer))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    def cut():
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, family=socket.AF_INET)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", cut
    finally:
        cut()
        server.close()
