"""`lockstep_client` on real router processes that are killed: the streams of its users continue."""

import asyncio
import contextlib
import dataclasses
import socket
from contextlib import AsyncExitStack
from functools import partial

import pytest
from lockstep_client import AsyncLockstepClient, Finish, Policy, StreamDiverged, StreamLost, TextPiece, Usage
from lockstep_client.openai import AsyncOpenAI
from lockstep_common.ports import free_port
from lockstep_router.text.tokenizer import Tokenizer
from router_cluster import Cluster, eventually
from router_process import listening, start
from scripted_worker import Script, ScriptedWorker
from test_responses_api import ASK, CALLS, WEATHER
from tool_models import ids_of, model_of

TOKENS = 40
FIELDS = {"model": "reference", "prompt": "hello world", "max_tokens": TOKENS, "seed": 7}
POLICY = Policy(backoff_s=0.05, timeout_s=60.0, retries=20)
HELD = Script(delay_s=0.02, hang_after=20)
"""A stream has not ended when its router is killed, however late its client reads."""


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
        """Kill one; what is asked for later does not hang."""
        self.worker.script = dataclasses.replace(self.worker.script, hang_after=None)
        await self._end(self._processes.pop(url))

    async def _end(self, process):
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def routers(tmp_path):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", script=Script(delay_s=0.02)).start()
    async with AsyncExitStack() as stack:
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
    routers.worker.script = HELD
    doomed, _ = await routers.start(), await routers.start()
    async with AsyncLockstepClient(routers.urls, policy=POLICY) as client:
        prefer(client._transport, doomed)
        text, others = await text_with_death(client, lambda: routers.kill(doomed))
    assert text == expected
    assert [type(each) for each in others] == [Finish, Usage]
    assert len(routers.worker.submits) == 2


async def test_killed_router_is_a_typed_error_without_a_repeat(routers, expected):
    routers.worker.script = HELD
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
    routers.worker.script = HELD
    port = free_port()  # no connection of another process gets it while no router listens
    url = await routers.start(port)

    async def restart():
        await routers.kill(url)
        assert await routers.start(port) == url

    async with AsyncLockstepClient(url, policy=POLICY) as client:
        text, _ = await text_with_death(client, restart)
    assert text == expected


async def test_official_client_survives(routers, expected):
    routers.worker.script = HELD
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


async def test_killed_router_after_the_last_finish_costs_no_repeat(routers):
    """The client knows the usage by then."""
    doomed, _ = await routers.start(), await routers.start()
    chat = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with AsyncExitStack() as stack:
        through, cut = await stack.enter_async_context(relay(doomed, until=b'"length"'))
        client = await stack.enter_async_context(AsyncLockstepClient([through, *routers.urls], policy=POLICY))
        prefer(client._transport, through)
        stream = await stack.enter_async_context(await client.chat(**chat, stream=True))
        events = []
        async for event in stream:
            events.append(event)
            if isinstance(event, Finish):
                await routers.kill(doomed)
                cut()
    assert [type(each) for each in events[-2:]] == [Finish, Usage]
    assert events[-1].completion_tokens == 5
    assert events[-1].prompt_tokens == len(routers.worker.submits[0].prompt_ids)
    assert len(routers.worker.submits) == 1


@contextlib.asynccontextmanager
async def thinking(tmp_path):
    """Router processes on a worker that thinks, speaks and calls a function."""
    worker = await ScriptedWorker("w0", tmp_path / "thinks.sock", **model_of("thinking")).start()
    ids = ids_of(Tokenizer(model_of("thinking")["files"]), f"Hm, 漢字.</think>I look. {CALLS}")
    worker.script = Script(token=lambda _prompt, _seed, at: ids[at], stop_after=len(ids), delay_s=0.01)
    try:
        async with AsyncExitStack() as stack:
            yield Routers(worker, stack)
    finally:
        await worker.kill()


def without_ids(response):
    """What of a response must not depend on which router gives it."""
    body = response.model_dump(mode="json", exclude={"id", "created_at"})
    for item in body["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return body


async def streamed(client, after, die):
    """The events and the last response of a stream during which something happens."""
    events = []
    async with client.responses.stream(**ASK, tools=[WEATHER]) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == after:
                await die()
        final = await stream.get_final_response()
    numbers = [event.sequence_number for event in events if event.sequence_number is not None]
    assert numbers == list(range(len(numbers)))
    for index, item in enumerate(final.output):
        named = [each for each in events if getattr(each, "output_index", None) == index and hasattr(each, "item_id")]
        assert {each.item_id for each in named} == {item.id}
    return [(event.type, getattr(event, "delta", None)) for event in events], final


@pytest.mark.slow
async def test_responses_of_the_official_client_survive(tmp_path):
    async with thinking(tmp_path) as routers:
        doomed = await routers.start()

        async def nothing():
            pass

        async with AsyncOpenAI(base_url=doomed, api_key="k", policy=POLICY) as client:
            expected, undisturbed = await streamed(client, 0, nothing)
        submits = len(routers.worker.submits)
        assert [item.type for item in undisturbed.output] == ["reasoning", "message", "function_call", "function_call"]
        for after in (1, 5, 12, len(expected) - 3):
            async with (
                relay(doomed) as (through, cut),
                AsyncOpenAI(base_url=through, api_key="k", policy=POLICY) as client,
            ):

                async def die(cut=cut):
                    cut()

                events, final = await streamed(client, after, die)
            assert events == expected
            assert without_ids(final) == without_ids(undisturbed)
        assert len(routers.worker.submits) == submits + 4
        await routers.start()
        for after in (12, len(expected) - 8):
            async with AsyncOpenAI(base_url=routers.urls, api_key="k", policy=POLICY) as client:
                prefer(client._client._transport._transport, doomed)
                events, final = await streamed(client, after, partial(routers.kill, doomed))
            assert events == expected
            assert without_ids(final) == without_ids(undisturbed)
            doomed, _ = routers.urls[-1], await routers.start()
        async with relay(doomed) as (through, cut), AsyncOpenAI(base_url=through, api_key="k", policy=POLICY) as client:
            submits = len(routers.worker.submits)
            asking = asyncio.create_task(client.responses.create(**ASK, tools=[WEATHER]))
            await eventually(lambda: len(routers.worker.submits) > submits)
            cut()
            assert without_ids(await asking) == without_ids(undisturbed)
        assert len(routers.worker.submits) == submits + 1


async def test_leaving_cancels_in_the_worker(routers):
    routers.worker.script = HELD
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
async def relay(url, until=None):
    """Connections to a router that can be cut: gives its URL and what cuts all of them. They pass nothing on after the
    event with the bytes `until`.
    """
    port = int(url.rpartition(":")[2].removesuffix("/v1"))
    writers = set()

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if until is not None and (at := data.find(until)) >= 0:
                    writer.write(data[: data.index(b"\n\n", at) + 2])
                    await writer.drain()
                    await asyncio.Event().wait()
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
