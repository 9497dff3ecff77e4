"""`lockstep_client` over gRPC on real routers: the same answers as over REST, whatever happens to connections."""

import asyncio
import contextlib
import json
import random
import socket
from dataclasses import replace

import grpc
import pytest
from lockstep_api.v1 import inference_pb2
from lockstep_client import (
    AsyncLockstepClient,
    DeadlineExceededError,
    Finish,
    InvalidRequestError,
    LockstepClient,
    NotFoundError,
    Policy,
    ReasoningPiece,
    TextPiece,
    ToolCallPiece,
    Usage,
)
from lockstep_client.fields import ChatFields, CompletionFields, StructuredOutputs
from lockstep_client.grpc_answers import Streamed
from lockstep_client.grpc_calls import _Channel
from lockstep_client.grpc_messages import generate_message, grpc_request
from lockstep_client.steps import Outgoing
from lockstep_client.transcript import Transcript
from lockstep_router.faces.openai import schemas
from lockstep_router.faces.openai.fields import IGNORED
from router_cluster import eventually
from router_process import listening, start
from scripted_worker import Script, ScriptedWorker
from test_router_deaths import prefer
from test_tool_calls import ASK, TOOLS, TWO_CALLS
from tool_models import model_of, prompt_of, says

POLICY = Policy(backoff_s=0.02, timeout_s=60.0, retries=30, connect_timeout_s=5.0)
TEXT = {"prompt": ["hello world", "two"], "model": "reference", "max_tokens": 30, "seed": 7, "n": 2, "logprobs": 2}
CHAT = {"messages": ASK, "model": "reference", "max_tokens": 30, "seed": 7, "logprobs": True, "top_logprobs": 1}


class Sync:
    """The blocking client, for tests of both."""

    def __init__(self, urls, policy=POLICY):
        self.client = LockstepClient(urls, policy=policy)

    async def whole(self, name, fields):
        return await asyncio.to_thread(lambda: getattr(self.client, name)(**fields))

    async def events(self, name, fields):
        return await asyncio.to_thread(lambda: list(getattr(self.client, name)(**fields, stream=True)))

    async def first(self, name, fields, count):
        def leave():
            with getattr(self.client, name)(**fields, stream=True) as stream:
                events = iter(stream)
                return [next(events) for _ in range(count)]

        return await asyncio.to_thread(leave)

    async def close(self):
        await asyncio.to_thread(self.client.close)


class Async:
    """The same of the client for asyncio."""

    def __init__(self, urls, policy=POLICY):
        self.client = AsyncLockstepClient(urls, policy=policy)

    async def whole(self, name, fields):
        return await getattr(self.client, name)(**fields)

    async def events(self, name, fields):
        return [event async for event in await getattr(self.client, name)(**fields, stream=True)]

    async def first(self, name, fields, count):
        async with await getattr(self.client, name)(**fields, stream=True) as stream:
            events = aiter(stream)
            return [await anext(events) for _ in range(count)]

    async def close(self):
        await self.client.aclose()


@pytest.fixture(params=[Sync, Async])
async def connect(request):
    async with contextlib.AsyncExitStack() as stack:

        def make(urls, **options):
            client = request.param(urls, **options)
            stack.push_async_callback(client.close)
            return client

        yield make


def pieces(events):
    """What a stream's events give together, whatever pieces they come in."""
    texts, logprobs, finishes, usage = {}, {}, {}, None
    for event in events:
        match event:
            case TextPiece():
                texts[event.choice] = texts.get(event.choice, "") + event.text
                logprobs.setdefault(event.choice, []).extend(event.logprobs)
            case Finish():
                assert event.choice not in finishes
                finishes[event.choice] = event.reason
            case Usage():
                assert usage is None
                usage = (event.prompt_tokens, event.completion_tokens)
    return texts, logprobs, finishes, usage


@contextlib.asynccontextmanager
async def relay(port, cuts, *, scheme="grpc", vanish=False):
    """A port whose connections end after so many bytes to the client, in turn; later ones do not. Connections that
    vanish stay open, and nothing passes any more.
    """
    tasks = set()

    async def pump(reader, writer, left):
        with contextlib.suppress(OSError):
            while left > 0 and (data := await reader.read(min(4096, left))):
                left -= len(data)
                writer.write(data)
                await writer.drain()
        if left <= 0 and vanish:
            await asyncio.Event().wait()
        writer.transport.abort()

    async def connected(reader, writer):
        task = asyncio.current_task()
        tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        left = cuts.pop(0) if cuts else 1 << 30
        there = asyncio.create_task(pump(reader, there_writer, 1 << 30))
        await pump(there_reader, writer, left)
        there_writer.transport.abort()
        await there
        tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, family=socket.AF_INET)
    try:
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()


async def over_rest(cluster, name, fields):
    """What the client gets over HTTP."""
    async with cluster.over_http() as http:
        client = Async(str(http.base_url))
        try:
            return await client.whole(name, fields), pieces(await client.events(name, fields))
        finally:
            await client.close()


@pytest.mark.parametrize(("name", "fields"), [("complete", TEXT), ("chat", CHAT)], ids=["text", "chat"])
async def test_answers_are_those_of_rest(cluster, connect, name, fields):
    whole, streamed = await over_rest(cluster, name, fields)
    async with cluster.over_grpc():
        client = connect(f"grpc://{cluster.grpc_address}")
        answer = await client.whole(name, fields)
        assert (answer.choices, answer.model, answer.usage) == (whole.choices, whole.model, whole.usage)
        assert pieces(await client.events(name, fields)) == streamed


async def test_tools_and_reasoning_are_those_of_rest(make_cluster, connect):
    cluster = await make_cluster(1, model=model_of("thinking"))
    says(cluster, "Rain?</think>" + TWO_CALLS["hermes"])
    fields = CHAT | {"tools": TOOLS, "max_tokens": 300, "logprobs": None, "top_logprobs": None}
    whole, _ = await over_rest(cluster, "chat", fields)
    async with cluster.over_grpc():
        client = connect(f"grpc://{cluster.grpc_address}")
        answer = await client.whole("chat", fields)
        events = await client.events("chat", fields)
    (choice,), (expected,) = answer.choices, whole.choices
    assert (choice.reasoning, choice.text, choice.finish_reason) == ("Rain?", expected.text, "tool_calls")
    names = [(call.name, call.arguments) for call in expected.tool_calls]
    assert [(call.name, call.arguments) for call in choice.tool_calls] == names
    assert "".join(event.text for event in events if isinstance(event, ReasoningPiece)) == "Rain?"
    calls = [event for event in events if isinstance(event, ToolCallPiece)]
    assert [event.name for event in calls if event.id] == [name for name, _ in names]
    assert "".join(event.arguments for event in calls) == "".join(arguments for _, arguments in names)


@pytest.mark.parametrize(("name", "fields"), [("complete", TEXT), ("chat", CHAT)], ids=["text", "chat"])
async def test_connections_that_break_anywhere_change_nothing(cluster, connect, name, fields):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    whole, streamed = await over_rest(cluster, name, fields)
    for worker in cluster.workers:
        worker.submits.clear()
        worker.script = Script(delay_s=0.002)
    async with cluster.over_grpc():
        port = int(cluster.grpc_address.rpartition(":")[2])
        for _ in range(4):
            cuts = [chance.randrange(1, 4000) for _ in range(chance.randrange(1, 5))]
            async with relay(port, cuts) as url:
                assert pieces(await connect(url).events(name, fields)) == streamed
        async with relay(port, [chance.randrange(1, 2000)]) as url:
            assert (await connect(url).whole(name, fields)).choices == whole.choices


async def test_router_that_is_killed_is_replaced_by_another(tmp_path, connect, tokenizer):
    worker = await ScriptedWorker("w0", tmp_path / "w0.sock", script=Script(delay_s=0.02, hang_after=20)).start()
    fields = {"prompt": "hello world", "model": "reference", "max_tokens": 40, "seed": 7}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.kill)
        processes, urls = [], []
        for _ in range(2):
            process = await start("--workers", worker.target, "--port", "0", "--grpc-port", "0")
            stack.push_async_callback(_end, process)
            processes.append(process)
            urls.append(f"grpc://127.0.0.1:{(await listening(process))['grpc_port']}")
        client = connect(urls)
        prefer(client.client._transport, urls[0] + "/")
        streaming = asyncio.create_task(client.events("complete", fields))
        await eventually(lambda: worker.hung_streams)
        worker.script = Script(delay_s=0.02)
        processes[0].kill()
        await processes[0].wait()
        texts, _, finishes, usage = pieces(await streaming)
        assert len(worker.submits) == 2
        assert finishes == {0: "length"}
        assert usage == (len(tokenizer.encode("hello world")), 40)
        rest = await client.whole("complete", fields)
        assert texts[0] == rest.text


@contextlib.asynccontextmanager
async def ports(cluster):
    """Those of both faces."""
    async with cluster.over_grpc(), cluster.over_http() as http:
        yield {"grpc": int(cluster.grpc_address.rpartition(":")[2]), "http": http.base_url.port}


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_embeddings_come_whatever_happens_to_connections(make_cluster, connect, scheme):
    model = model_of("plain")
    model["card"].embedding.size, model["card"].embedding.any_dimension = 8, True
    cluster = await make_cluster(1, model=model)
    ids = [cluster.tokenizer.encode(text) for text in ("one", "two two")]
    plain = await cluster.client.post("/v1/embeddings", json={"model": "reference", "input": ids})
    wanted = tuple(tuple(each["embedding"]) for each in plain.json()["data"])
    async with ports(cluster) as port, relay(port[scheme], [1, 90, 300], scheme=scheme) as url:
        for given, vectors in (("one", wanted[:1]), (ids[0], wanted[:1]), (["one", "two two"], wanted), (ids, wanted)):
            answer = await connect(url).whole("embed", {"input": given, "model": "reference"})
            assert (answer.vectors, answer.model) == (vectors, "reference")
            assert answer.prompt_tokens == sum(map(len, ids[: len(vectors)]))
        async with relay(port[scheme], [90] * 1000, scheme=scheme) as broken:
            client = connect([broken, url])
            prefer(client.client._transport, f"{broken}/")
            short = await client.whole("embed", {"input": "one", "model": "reference", "dimensions": 4})
            assert len(short.vectors[0]) == 4


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_typed_fields_arrive_or_are_refused_by_name(make_cluster, connect, scheme):
    model = model_of("thinking")
    model["card"].grammar_engine, model["card"].embedding.size = "compiler 1", 8
    cluster = await make_cluster(1, model=model)
    says(cluster, "Yes.")
    text, ask = {"prompt": "x", "model": "reference"}, {"input": "x", "model": "reference"}
    async with ports(cluster) as port:
        client = connect(f"{scheme}://127.0.0.1:{port[scheme]}")
        await client.whole("complete", text | {"structured_outputs": {"regex": "Y.*"}, "n": 2, "best_of": 2})
        assert [submit.sampling.grammar.text for submit in cluster.workers[0].submits] == ["Y.*"] * 2
        await client.whole("chat", CHAT | {"chat_template_kwargs": {"enable_thinking": False}})
        assert prompt_of(cluster).endswith("<think>\n\n</think>\n\n")
        for name, fields, field in (
            ("complete", text | {"suffix": "y"}, "suffix"),
            # More than `n` are refused over gRPC alone.
            ("complete", text | {"best_of": 3, "n": 4 if scheme == "http" else 1}, "best_of"),
            ("complete", text | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ("chat", CHAT | {"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs.unknown"),
            ("chat", CHAT | {"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
            ("embed", ask | {"dimensions": 3}, "dimensions"),
            ("embed", ask | {"dimensions": -1}, "dimensions"),
            ("embed", ask | {"user": 5}, "user"),
            ("embed", ask | {"input": ["a", ""]}, "input[1]"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await client.whole(name, fields)
            assert (refused.value.code, refused.value.field) == ("invalid_request", field)


def test_every_field_is_typed():
    own = {"messages", "prompt", "model", "stream", "stream_options", "resumable"}  # arguments, or headers
    chat, text, outputs = schemas.ChatCompletionRequest, schemas.CompletionRequest, schemas.StructuredOutputs
    for schema, fields in ((chat, ChatFields), (text, CompletionFields), (outputs, StructuredOutputs)):
        assert {each.alias or name for name, each in schema.model_fields.items()} - own == set(fields.__annotations__)


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        (schemas.ChatCompletionRequest, {"messages": [{"role": "user", "content": "hi"}]}),
        (schemas.CompletionRequest, {"prompt": "hi"}),
    ],
)
def test_fields_that_change_nothing_are_left_out(schema, given):
    """As over HTTP: which kind of router gets a request is chance."""
    body, is_chat = {"model": "reference"} | given, "messages" in given
    ignored = IGNORED - schema.model_fields.keys()
    assert ignored
    for name in ignored:
        assert generate_message(body | {name: {"mode": "x"}}, is_chat=is_chat) == generate_message(
            body, is_chat=is_chat
        )


async def _end(process):
    if process.returncode is None:
        process.kill()
        await process.communicate()


async def test_leaving_a_stream_cancels_it(cluster, connect):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with cluster.over_grpc():
        client = connect(f"grpc://{cluster.grpc_address}")
        events = await client.first("complete", {"prompt": "hello", "model": "reference", "max_tokens": 200}, 3)
        assert len(events) == 3
        await eventually(lambda: cluster.router.streams == 0)


@pytest.mark.parametrize("face", ["grpc", "http"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_id_is_known_cancels_the_answer(cluster, face, stream):
    for worker in cluster.workers:
        worker.script = Script(delay_s=20)
    async with cluster.over_grpc(), cluster.over_http() as http:
        url = f"grpc://{cluster.grpc_address}" if face == "grpc" else str(http.base_url)
        async with AsyncLockstepClient(url, policy=POLICY) as client:
            fields = {"prompt": "hello", "model": "reference", "max_tokens": 200, "stream": stream}

            async def ask():
                answer = await client.complete(**fields)
                if stream:
                    _ = [event async for event in answer]

            asking = asyncio.create_task(ask())
            await eventually(lambda: cluster.router.streams == 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await eventually(lambda: cluster.router.streams == 0)
            assert cluster.router.runs.running == 0


async def test_silent_call_is_waited_for_while_its_router_lives(cluster, connect):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.4)
    policy = Policy(silence_timeout_s=0.1, retries=1, timeout_s=60)
    fields = {"prompt": "hello", "model": "reference", "max_tokens": 4, "seed": 1}
    async with cluster.over_grpc():
        client = connect(f"grpc://{cluster.grpc_address}", policy=policy)
        texts, *_ = pieces(await client.events("complete", fields))
        assert texts[0] == cluster.undisturbed("hello", 1, 4)
        assert (await client.whole("complete", fields)).text == texts[0]
    assert sum(len(worker.submits) for worker in cluster.workers) == 2


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_connection_that_vanishes_is_noticed_and_its_stream_resumed(make_cluster, connect, scheme):
    cluster = await make_cluster(keepalive_interval_s=0.2)
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01)
    # Without the checks that a router lives, it would be noticed after ten minutes.
    policy = replace(POLICY, silence_timeout_s=600.0, probe_after_s=0.3, keepalive_slack_s=0.3, connect_timeout_s=1.0)
    async with cluster.over_grpc(), cluster.over_http() as http:
        port = http.base_url.port if scheme == "http" else int(cluster.grpc_address.rpartition(":")[2])
        async with relay(port, cuts := [1500], scheme=scheme, vanish=True) as url:
            client = connect(url, policy=policy)
            fields = {"prompt": "hello", "model": "reference", "max_tokens": 40, "seed": 1}
            texts, *_ = pieces(await client.events("complete", fields))
            assert not cuts
            assert texts[0] == cluster.undisturbed("hello", 1, 40)
            # The next request gets another connection.
            assert (await client.whole("complete", fields)).text == texts[0]
    assert sum(len(worker.submits) for worker in cluster.workers) == 2, "nothing was computed again"


async def test_refusals_are_typed(cluster, connect):
    async with cluster.over_grpc():
        client = connect(f"grpc://{cluster.grpc_address}")
        with pytest.raises(NotFoundError) as missing:
            await client.whole("complete", {"prompt": "x", "model": "nobody"})
        assert (missing.value.code, missing.value.field, missing.value.status) == ("model_not_found", "model", 404)
        for name in ("whole", "events"):
            with pytest.raises(InvalidRequestError) as invalid:
                await getattr(client, name)("complete", {"prompt": "x", "model": "reference", "max_tokens": 0})
            assert (invalid.value.code, invalid.value.field) == ("invalid_request", "max_tokens")
        with pytest.raises(InvalidRequestError) as unknown:
            await client.whole("complete", {"prompt": "x", "model": "reference", "extra": {"colour": "red"}})
        assert unknown.value.field == "colour"
    assert not any(worker.submits for worker in cluster.workers)


@pytest.mark.parametrize("url", ["grpc://host", "grpc://host:1/path", "grpc://user:word@host:1", "ftp://host:1"])
def test_addresses_that_cannot_be_used_are_refused(url):
    with pytest.raises(ValueError, match="base_urls"):
        LockstepClient(url)


def test_connections_over_grpc_are_always_verified():
    with pytest.raises(ValueError, match="verify"):
        LockstepClient("grpcs://host:1", verify=False)


def test_a_continued_answer_has_its_first_chunks_role_and_time():
    body = {"model": "reference", "messages": [], "n": 2, "stream": True}
    asked = Outgoing("POST", "/v1/chat/completions", content=json.dumps(body).encode(), made_at=5)
    again = Outgoing("GET", "/v1/streams/r", {"Last-Event-ID": "r:3,-"}, continues=asked)
    chunks = {}
    for name, request in (("first", asked), ("rest", again)):
        answer = grpc_request(request).answer
        events = [
            answer.take(inference_pb2.GenerateEvent(request_id="r", choice=choice, text="a")) for choice in (0, 1)
        ]
        chunks[name] = [json.loads(event.data) for [event] in events]
    roles = {name: ["role" in each["choices"][0]["delta"] for each in given] for name, given in chunks.items()}
    assert roles == {"first": [True, True], "rest": [False, True]}
    assert {each["created"] for given in chunks.values() for each in given} == {5}


def test_nothing_is_asked_for_after_a_finish_that_has_the_usage():
    body = TEXT | {"prompt": "hello", "n": 1, "stream": True, "stream_options": {"include_usage": True}}
    answer, transcript = Streamed(body, 0, is_chat=False), Transcript.of(body)
    usage = inference_pb2.Usage(prompt_tokens=1, completion_tokens=2)
    last = inference_pb2.GenerateEvent(
        request_id="r", text="hi", finish=inference_pb2.FINISH_REASON_LENGTH, event_id="r:2f", final_usage=usage
    )
    [event] = answer.take(last)
    transcript.pass_on(event, json.loads(event.data))
    reported, end = transcript.ending()
    assert json.loads(reported.data)["usage"]["total_tokens"] == 3
    assert end.data == "[DONE]"


async def test_failed_question_for_health_ends_no_other_stream(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    fields = {"prompt": "hello", "model": "reference", "max_tokens": 60, "seed": 1}
    async with cluster.over_grpc(), AsyncLockstepClient(f"grpc://{cluster.grpc_address}", policy=POLICY) as client:
        stream = await client.complete(**fields, stream=True)
        events = aiter(stream)
        received = [await anext(events)]
        [channel] = client._transport._network._grpc._channels.values()
        # A question to which the answer came too late: the router was merely slow.
        assert not await channel.lives(-1.0)
        assert (await client.complete(**fields)).text == cluster.undisturbed("hello", 1, 60)
        assert channel.calls == 1
        assert channel._closing is None
        received += [event async for event in events]
        await stream.aclose()
        assert channel.calls == 0
        await channel._closing
    assert pieces(received)[0][0] == cluster.undisturbed("hello", 1, 60)
    assert sum(len(worker.submits) for worker in cluster.workers) == 2


@pytest.mark.parametrize("is_begun", [True, False])
async def test_call_that_ends_with_its_channel_is_a_broken_connection(cluster, is_begun):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.3)
    fields = {"prompt": "hello", "model": "reference", "max_tokens": 6, "seed": 1}
    async with cluster.over_grpc(), AsyncLockstepClient(f"grpc://{cluster.grpc_address}", policy=POLICY) as client:
        if is_begun:
            stream = await client.complete(**fields, stream=True)
            reading = asyncio.create_task(_all(stream))
        else:
            reading = asyncio.create_task(client.complete(**fields))
        await eventually(lambda: cluster.router.streams == 1)
        network = client._transport._network._grpc
        router, channel = network._channels.popitem()
        await channel.channel.close()
        answer = await reading
        text = pieces(answer)[0][0] if is_begun else answer.text
        assert text == cluster.undisturbed("hello", 1, 6)
        # A connection that has been closed is dead for all further calls.
        network._channels[router] = channel
        assert not await channel.lives(1.0)
        assert (await client.complete(**fields)).text == text


async def _all(stream):
    return [event async for event in stream]


@pytest.mark.parametrize(("code", "is_alive"), [("INTERNAL", True), ("UNKNOWN", True), ("UNAVAILABLE", False)])
async def test_only_a_missing_answer_for_health_means_a_dead_router(code, is_alive):
    async def check(_, context):
        await context.abort(grpc.StatusCode[code], "no")

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = _Channel(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    try:
        assert await channel.lives(5.0) is is_alive
        assert channel.is_dead is not is_alive
    finally:
        await channel.channel.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def hanging_router():
    """Its address, and an event that is set when it is asked for its health. It answers nothing but that."""
    asked = asyncio.Event()

    async def check(*_):
        asked.set()
        return b""

    async def hang(*_):
        await asyncio.Event().wait()
        yield b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            is_question = details.method.endswith("/Check")
            return (
                grpc.unary_unary_rpc_method_handler(check)
                if is_question
                else grpc.unary_stream_rpc_method_handler(hang)
            )

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        await server.stop(0)


async def test_router_is_asked_for_its_health_in_time_for_an_answer_before_the_deadline():
    """So that one that hangs is avoided: after `probe_after_s` alone the request would have ended long before."""
    policy = replace(POLICY, timeout_s=600.0, connect_timeout_s=599.0, probe_after_s=3600.0, silence_timeout_s=3600.0)
    async with hanging_router() as (address, asked), AsyncLockstepClient(f"grpc://{address}", policy=policy) as client:
        asking = asyncio.create_task(client.complete(**TEXT))
        async with asyncio.timeout(60.0):
            await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("stream", [True, False])
async def test_deadline_of_a_call_is_no_failure_of_its_router(stream):
    policy = replace(POLICY, timeout_s=1.5, silence_timeout_s=0.3)
    async with hanging_router() as (address, _):
        urls = [f"grpc://{address}", f"grpc://localhost:{address.rpartition(':')[2]}"]
        async with AsyncLockstepClient(urls, policy=policy) as client:
            with pytest.raises(DeadlineExceededError):
                await client.complete(**TEXT, stream=stream)
            routers = client._transport._shared.routers
            assert {str(routers.pick(())) for _ in range(50)} == set(urls)
