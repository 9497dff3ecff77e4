"""The gRPC face: one service with the rules of the REST API, within limits."""

import asyncio
import contextlib
import logging
import time

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from key_files import KEY, OTHER_KEY, tenant, write
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from lockstep_common import health_service
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import JsonFormatter, exposition_for
from lockstep_router.faces.bodies import BodyBudget
from lockstep_router.faces.grpc import health, inbound, service
from lockstep_router.faces.grpc.caller import abort
from lockstep_router.faces.grpc.server import GrpcServer
from lockstep_router.faces.grpc.wire import MAX_ENTRIES, MAX_RECORDS, check_structure
from lockstep_router.memory import MemoryTrimmer
from minutes import until_room_s
from router_cluster import eventually, leaves_as_it_begins
from scripted_worker import Script

COMPLETIONS, DESCRIPTION = "/v1/completions", "/openapi.json"
DESCRIPTOR = inference_pb2.GenerateRequest.DESCRIPTOR


def request(prompt="hello world", *, max_tokens=12, seed=7, n=None, resumable=None, stop=(), **sampling):
    return inference_pb2.GenerateRequest(
        model="reference",
        prompt=prompt,
        sampling=inference_pb2.Sampling(max_tokens=max_tokens, seed=seed, **sampling),
        user="u",
        n=n,
        stop=stop,
        resumable=resumable,
    )


def stub_of(channel):
    return inference_pb2_grpc.InferenceStub(channel)


async def events_of(call):
    return [event async for event in call]


def text_of(events, choice=0):
    return "".join(event.text for event in events if event.choice == choice and not event.HasField("usage"))


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await events_of(call)
    trailing = dict(failed.value.trailing_metadata())
    return failed.value.code(), trailing.get("lockstep-error-code"), trailing.get("lockstep-field")


async def test_answer_has_text_ids_positions_and_usage(cluster):
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=20, n=2, logprobs=2))
        metadata = dict(await call.initial_metadata())
        events = await events_of(call)
    assert metadata["x-lockstep-router"] == cluster.router.settings.router_id
    assert {event.request_id for event in events} == {metadata["x-lockstep-stream-id"]}
    assert text_of(events) == cluster.undisturbed("hello world", 7, 20)
    for choice in (0, 1):
        mine = [event for event in events[:-1] if event.choice == choice]
        ids = []
        for event in mine:
            assert event.index == len(ids)
            ids.extend(event.ids)
        assert cluster.tokenizer.decode(ids) == text_of(events, choice)
        assert [entry.chosen.id for event in mine for entry in event.logprobs] == ids
        assert [event.finish for event in mine if event.finish] == [inference_pb2.FINISH_REASON_LENGTH]
    assert events[-1].usage.completion_tokens == 40
    assert len({event.event_id for event in events}) == len(events)


async def test_defaults_are_those_of_the_rest_api(cluster):
    async with cluster.over_grpc() as channel:
        message = inference_pb2.GenerateRequest(model="reference", prompt="hello")
        assert (await events_of(stub_of(channel).Generate(message)))[-1].usage.completion_tokens == 16
        (submit,) = [each for worker in cluster.workers for each in worker.submits]
        assert not submit.sampling.HasField("temperature")
        assert submit.sampling.HasField("seed")


async def test_conversations_use_the_chat_template(cluster):
    message = request()
    message.conversation.messages.add(role="user", content="hi")
    async with cluster.over_grpc() as channel:
        events = await events_of(stub_of(channel).Generate(message))
    response = await cluster.chat()
    assert text_of(events) == response.json()["choices"][0]["message"]["content"]


async def test_client_that_breaks_off_comes_back(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01)
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=60))
        seen = [await anext(aiter(call)) for _ in range(5)]
        call.cancel()
        last = seen[-1]
        resumed = inference_pb2.ResumeRequest(request_id=last.request_id, last_event_id=last.event_id)
        rest = await events_of(stub_of(channel).Resume(resumed))
        assert rest[0].index == sum(len(event.ids) for event in seen)
        assert text_of(seen) + text_of(rest) == cluster.undisturbed("hello world", 7, 60)
        assert rest[-1].usage.completion_tokens == 60
        whole = await events_of(stub_of(channel).Resume(inference_pb2.ResumeRequest(request_id=last.request_id)))
        assert text_of(whole) == cluster.undisturbed("hello world", 7, 60)
        wrong = inference_pb2.ResumeRequest(request_id=last.request_id, last_event_id=f"{last.request_id}:99")
        code = grpc.StatusCode.INVALID_ARGUMENT
        assert await error_of(stub_of(channel).Resume(wrong)) == (code, "invalid_request", "last_event_id")
        unknown = inference_pb2.ResumeRequest(request_id="r-nobody")
        assert (await error_of(stub_of(channel).Resume(unknown)))[:2] == (
            grpc.StatusCode.NOT_FOUND,
            "stream_not_found",
        )
    assert sum(len(worker.submits) for worker in cluster.workers) == 1


async def test_cancel_ends_the_request(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=200))
        first = await anext(aiter(call))
        await stub_of(channel).Cancel(inference_pb2.CancelRequest(request_id=first.request_id))
        assert (await error_of(call))[:2] == (grpc.StatusCode.CANCELLED, "cancelled")
        assert cluster.router.streams == 0
        again = inference_pb2.ResumeRequest(request_id=first.request_id)
        assert (await error_of(stub_of(channel).Resume(again)))[1] == "stream_not_found"


@pytest.mark.parametrize("begun", [True, False])
async def test_client_that_leaves_for_good_ends_the_request(cluster, begun):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02 if begun else 20)
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=200, resumable=False))
        if begun:
            await anext(aiter(call))
        await eventually(lambda: cluster.router.streams == 1)
        call.cancel()
        await eventually(lambda: cluster.router.streams == 0)
    await eventually(lambda: sum(len(worker.cancels) for worker in cluster.workers) == 1)


async def test_client_that_leaves_for_good_at_the_moment_when_the_stream_begins_ends_it(cluster, monkeypatch):
    for worker in cluster.workers:
        worker.script = Script(delay_s=20)
    left = asyncio.Event()

    async def leave():
        left.set()
        call.cancel()

    leaves_as_it_begins(cluster.router, monkeypatch, leave)
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=200, resumable=False))
        await left.wait()
        await eventually(lambda: (cluster.router.streams, cluster.router.runs.detached) == (0, 0))


async def test_client_that_has_gone_when_it_is_refused_is_no_error():
    """gRPC cancels the task of its call a moment later, and logs any other error until then."""

    class Gone:
        async def abort(self, *_):
            raise grpc.aio.InternalError("the call is over")

    with pytest.raises(asyncio.CancelledError):
        await abort(Gone(), LockstepError(ErrorCode.UNAVAILABLE, "there is no worker"), "router")


async def test_deadline_is_that_of_the_request(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.05)
    async with cluster.over_grpc() as channel:
        call = stub_of(channel).Generate(request(max_tokens=200), timeout=0.5)
        assert (await error_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: cluster.router.streams == 0)


async def test_health_is_readiness_and_needs_no_key(make_cluster, tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY))
    cluster = await make_cluster(1, keys_file=str(path))
    async with cluster.over_grpc() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "lockstep.v1.Inference"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watching = aiter(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watching)).status == health_pb2.HealthCheckResponse.SERVING
        cluster.router.leaving = True
        assert (await anext(watching)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_watches_are_bounded(make_cluster, monkeypatch):
    monkeypatch.setattr(health_service, "MAX_WATCHES", 4)
    cluster = await make_cluster(1)
    async with cluster.over_grpc() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            assert (await anext(aiter(watch))).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest())))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()

        async def is_watched():
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest())))

        async with asyncio.timeout(30):
            while not await is_watched():
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["Check", "Watch"])
async def test_health_calls_without_a_message_leave_the_port_to_others(make_cluster, name):
    """They need no key, and there are more of them than the port has calls."""
    cluster = await make_cluster(1, max_streams=8, grpc_max_calls_per_connection=1000)
    async with (
        asyncio.timeout(60),
        cluster.over_grpc() as other,
        grpc.aio.insecure_channel(cluster.grpc_address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel,
    ):
        silent = [channel.stream_stream(f"/grpc.health.v1.Health/{name}")() for _ in range(600)]
        # Those that are refused by then raise.
        await asyncio.gather(*(call.wait_for_connection() for call in silent), return_exceptions=True)
        await eventually(lambda: any(call.done() for call in silent))
        await eventually(lambda: sum(not call.done() for call in silent) <= health.MAX_SILENT)
        for _ in range(3):
            assert text_of(await events_of(stub_of(other).Generate(request())))
        stub = health_pb2_grpc.HealthStub(other)

        async def is_served():
            with contextlib.suppress(grpc.aio.AioRpcError):  # its message may come late on a busy machine
                reply = await stub.Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                return (await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest())))).status == reply.status

        while not await is_served():
            await asyncio.sleep(0.01)
        for call in silent:
            call.cancel()


UNREAD = {"grpc__http2__lookahead_bytes": 0, "grpc__http2__bdp_probe": 0, "grpc__use_local_subchannel_pool": 1}
"""Options of a channel without room for messages that are not read."""


async def unread_calls(channel, name, count, metadata=lambda _: None):
    """Calls with an empty message whose answers are not read."""
    calls = [channel.stream_stream(name)(metadata=metadata(number)) for number in range(count)]
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it is refused already
            await call.write(b"")
    return calls


async def refusals(calls, held):
    """The codes and sentences of calls of which all but so many have ended."""
    await eventually(lambda: sum(not call.done() for call in calls) == held)
    return {(await call.code(), await call.details()) for call in calls if call.done()}


@contextlib.asynccontextmanager
async def from_address(source, address):
    """The port at which connections reach an address from another one."""

    async def carry(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader, writer):
        host, port = address.split(":")
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_health_checks_whose_answer_nobody_reads_leave_others_to_other_addresses(make_cluster, monkeypatch):
    monkeypatch.setattr(health_service, "MAX_CHECKS", 4)
    cluster = await make_cluster(1)
    options = [(name.replace("__", "."), value) for name, value in UNREAD.items()]
    async with (
        asyncio.timeout(60),
        cluster.over_grpc() as other,
        from_address("127.0.0.2", cluster.grpc_address) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        unread = await unread_calls(channel, "/grpc.health.v1.Health/Check", 20)
        sentence = "2 health checks of this client are in progress already, the limit for one"
        assert await refusals(unread, held=2) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)}
        stub = health_pb2_grpc.HealthStub(other)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        for call in unread:
            call.cancel()
        again = health_pb2_grpc.HealthStub(channel)

        async def is_served():
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await again.Check(health_pb2.HealthCheckRequest())

        while not await is_served():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("owner", ["address", "tenant"])
async def test_calls_that_nobody_reads_leave_the_port_to_others(make_cluster, tmp_path, owner):
    """Also after the time for a write, since gRPC keeps such a call until its client or its connection ends."""
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY))
    settings = {"keys_file": str(path)} if owner == "tenant" else {}
    cluster = await make_cluster(
        1,
        max_streams=1,
        write_timeout_s=0.3,
        grpc_max_calls_per_connection=1000,
        trusted_proxies="127.0.0.1",
        **settings,
    )

    def by(key, address):
        return (("authorization", f"Bearer {key}"), ("x-forwarded-for", address))

    def theirs(number):
        return by(KEY, "10.0.0.1" if owner == "address" else f"10.0.{number // 250}.{number % 250 + 1}")

    ours = by(OTHER_KEY, "10.1.0.1")
    options = [(name.replace("__", "."), value) for name, value in UNREAD.items()]
    async with (
        asyncio.timeout(60),
        cluster.over_grpc() as other,
        grpc.aio.insecure_channel(cluster.grpc_address, options=options) as channel,
    ):
        unread = await unread_calls(channel, "/lockstep.v1.Inference/ListModels", 450, theirs)
        sentence = f"193 calls of this {owner} are in progress already, the limit for one"
        assert await refusals(unread, held=193) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)}
        await asyncio.sleep(0.5)
        assert text_of(await events_of(stub_of(other).Generate(request(), metadata=ours)))
        assert (await error_of(stub_of(other).Generate(request(), metadata=theirs(0))))[1] == "overloaded"
        for call in unread:
            call.cancel()

        async def is_served():
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await events_of(stub_of(other).Generate(request(), metadata=theirs(0)))

        while not await is_served():
            await asyncio.sleep(0.01)


async def test_health_call_whose_message_is_none_is_an_error(cluster):
    async with cluster.over_grpc() as channel:
        for name in ("Check", "Watch"):
            raw = channel.unary_stream(f"/grpc.health.v1.Health/{name}")
            assert (await error_of(raw(b"\x0a\x01\xff")))[1] == "invalid_request"
        assert cluster.app.state.bodies.used_bytes == 0


async def test_health_watches_end_with_the_server(cluster):
    server = GrpcServer(cluster.router, cluster.app.state.bodies, cluster.app.state.turns)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = aiter(watch)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(30):
            await server.stop(3600)
            assert [each.status async for each in states] == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_call_that_joined_a_stream_and_leaves_for_good_does_not_end_it(cluster):
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.02)
    async with cluster.over_grpc() as channel:
        key = (("idempotency-key", "k"),)
        first = stub_of(channel).Generate(request(max_tokens=60), metadata=key)
        events = aiter(first)
        await anext(events)
        second = stub_of(channel).Generate(request(max_tokens=60, resumable=False), metadata=key)
        await anext(aiter(second))
        second.cancel()
        rest = [event async for event in events]
        assert len(rest) > 10, "the first client has the rest"
        assert not any(worker.cancels for worker in cluster.workers)


async def described(channel, metadata=None):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = [each async for each in stub.ServerReflectionInfo(iter([asked]), metadata=metadata)]
    return {service.name for service in reply.list_services_response.service}


async def test_everything_else_needs_a_key(make_cluster, tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY, requests_per_minute=1))
    cluster = await make_cluster(1, keys_file=str(path))
    caplog.set_level(logging.INFO, logger="lockstep")
    good, other = [("authorization", f"Bearer {key}") for key in (KEY, OTHER_KEY)]
    async with cluster.over_grpc() as channel:
        stub = stub_of(channel)
        for metadata in ((), (("authorization", KEY),), (("authorization", "Bearer wrong"),), (good, good)):
            code, name, _ = await error_of(stub.Generate(request(), metadata=metadata))
            assert (code, name) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await described(channel, metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not cluster.workers[0].submits
        assert "lockstep.v1.Inference" in await described(channel, (good,))
        events = await events_of(stub.Generate(request(), metadata=(good,)))
        theirs = inference_pb2.ResumeRequest(request_id=events[0].request_id)
        await asyncio.sleep(until_room_s())
        assert (await error_of(stub.Resume(theirs, metadata=(other,))))[1] == "stream_not_found"
        call = stub.Generate(request(), metadata=(other,))
        code, name, field = await error_of(call)
        assert (code, name, field) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded", "requests_per_minute")
        assert int(dict(await call.trailing_metadata())["retry-after"]) > 0
    logged = "".join(JsonFormatter("router").format(record) for record in caplog.records)
    assert KEY not in logged
    audited = [record for record in caplog.records if record.name == "lockstep.audit"]
    assert {record.face for record in audited} == {"grpc"}
    reports = [(record.tenant, record.endpoint, record.status) for record in audited]
    assert reports[:8] == [("", COMPLETIONS, 401), ("", DESCRIPTION, 401)] * 4
    assert reports[8:] == [
        ("search", DESCRIPTION, 200),
        ("search", COMPLETIONS, 200),
        ("chat", "/v1/streams/{stream_id}", 404),
        ("chat", COMPLETIONS, 429),
    ]
    requests = [record for record in caplog.records if record.message == "request"]
    assert [(record.endpoint, record.status) for record in requests] == [report[1:] for report in reports]


def count_of(endpoint, code):
    labels = f'{{code="{code}",endpoint="{endpoint}",face="grpc"}}'
    found = [
        line
        for line in exposition_for("")[0].decode().splitlines()
        if line.startswith(f"lockstep_router_requests_total{labels}")
    ]
    return float(found[0].split()[-1]) if found else 0.0


async def test_calls_that_do_not_exist_need_a_key_and_are_reported(make_cluster, tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY))
    cluster = await make_cluster(1, keys_file=str(path))
    good = ("authorization", f"Bearer {KEY}")
    before = [count_of("other", code) for code in (401, 405)]
    async with cluster.over_grpc() as channel:
        for name in ("/lockstep.v1.Inference/Nothing", "/somebody.Else/Nothing"):
            nothing = channel.unary_stream(name)
            assert (await error_of(nothing(b"")))[0] is grpc.StatusCode.UNAUTHENTICATED
            # What clients expect of a server without the call: grpcurl goes on to another version of reflection then.
            assert (await error_of(nothing(b"", metadata=(good,))))[0] is grpc.StatusCode.UNIMPLEMENTED
    audited = [record for record in caplog.records if record.name == "lockstep.audit"]
    assert [(each.tenant, each.endpoint, each.status) for each in audited] == [
        ("", "other", 401),
        ("search", "other", 405),
    ] * 2
    assert [count_of("other", code) for code in (401, 405)] == [count + 2 for count in before]


async def test_reflection_counts_as_a_request(cluster):
    before = count_of(DESCRIPTION, 200)
    async with cluster.over_grpc() as channel:
        assert "grpc.health.v1.Health" in await described(channel)
    assert count_of(DESCRIPTION, 200) == before + 1


async def test_calls_of_reflection_leave_the_port_to_others(make_cluster):
    cluster = await make_cluster(1, max_streams=1)
    local = [("grpc.use_local_subchannel_pool", 1)]
    async with cluster.over_grpc() as channel, contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(3):
            theirs = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.grpc_address, options=local))
            stub = reflection_pb2_grpc.ServerReflectionStub(theirs)
            calls += [stub.ServerReflectionInfo() for _ in range(100)]
        async with asyncio.timeout(30):
            # More than the port takes in all: most are refused, and what is left is bounded.
            await eventually(lambda: sum(not call.done() for call in calls) <= service.MAX_DESCRIBING)
            assert (await stub_of(channel).ListModels(inference_pb2.ListModelsRequest())).models
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            assert text_of(await events_of(stub_of(channel).Generate(request())))
            code, name, _ = await error_of(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo())
            assert (code, name) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")


async def test_call_of_reflection_ends_after_a_time(cluster, monkeypatch):
    monkeypatch.setattr(service, "DESCRIBING_S", 0.1)
    monkeypatch.setattr(service, "MAX_DESCRIBING", 1)
    async with cluster.over_grpc() as channel, asyncio.timeout(30):
        silent = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert (await error_of(silent))[:2] == (grpc.StatusCode.CANCELLED, "cancelled")
        monkeypatch.setattr(service, "DESCRIBING_S", 10.0)
        assert "lockstep.v1.Inference" in await described(channel)


async def test_reflection_counts_in_the_limits_of_its_tenant(make_cluster, tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY, requests_per_minute=1))
    cluster = await make_cluster(1, keys_file=str(path))
    key = (("authorization", f"Bearer {KEY}"),)
    async with cluster.over_grpc() as channel:
        await asyncio.sleep(until_room_s())
        assert await described(channel, key)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await described(channel, key)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_count_by_face(cluster):
    async with cluster.over_grpc() as channel:
        await events_of(stub_of(channel).Generate(request()))
    await eventually(
        lambda: (
            'lockstep_router_requests_total{code="200",endpoint="/v1/completions",face="grpc"}'
            in exposition_for("")[0].decode()
        )
    )


async def test_large_messages_are_refused(make_cluster):
    cluster = await make_cluster(1, max_body_bytes=4096)
    async with cluster.over_grpc() as channel:
        code, *_ = await error_of(stub_of(channel).Generate(request("x" * 5000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text_of(await events_of(stub_of(channel).Generate(request())))


async def test_messages_that_do_not_arrive_are_given_up(make_cluster, monkeypatch):
    monkeypatch.setattr(inbound, "PATIENCE_S", 0.1)
    cluster = await make_cluster(1, body_timeout_s=6, max_bodies_bytes=4 << 20, max_body_bytes=1 << 20)
    async with cluster.over_grpc() as channel:
        stuck = [channel.stream_stream("/lockstep.v1.Inference/Generate")() for _ in range(4)]
        for call in stuck:
            await call.wait_for_connection()
        await asyncio.sleep(0.2)
        assert text_of(await events_of(stub_of(channel).Generate(request()))), "the oldest made room"
        found = sorted([(await error_of(call))[1] for call in stuck])
        assert found == ["invalid_request"] * 3 + ["overloaded"]
        assert cluster.app.state.bodies.used_bytes == 0


FEW_MESSAGES = {"body_timeout_s": 1000, "max_bodies_bytes": 4 << 20, "max_body_bytes": 1 << 20}
"""Settings with which four messages may arrive at a time."""


async def silent_calls(channel, count, metadata=None):
    """Calls without a message."""
    calls = [channel.stream_stream("/lockstep.v1.Inference/Generate")(metadata=metadata) for _ in range(count)]
    for call in calls:
        await call.wait_for_connection()
    return calls


async def test_calls_without_a_message_hold_up_no_others(make_cluster, monkeypatch):
    monkeypatch.setattr(inbound, "PATIENCE_S", 1000)
    monkeypatch.setattr(inbound, "MAX_WAITING", 3)
    cluster = await make_cluster(1, **FEW_MESSAGES)
    async with cluster.over_grpc() as channel, asyncio.timeout(60):
        silent = await silent_calls(channel, 20)
        await eventually(lambda: sum(call.done() for call in silent) == 20 - 4 - 3)
        refused = [await error_of(call) for call in silent if call.done()]
        assert {name for _, name, _ in refused} == {"overloaded"}
        assert (await stub_of(channel).ListModels(inference_pb2.ListModelsRequest())).models
        assert text_of(await events_of(stub_of(channel).Generate(request())))
        assert sum(not call.done() for call in silent) == 4 + 3
        assert cluster.app.state.bodies.used_bytes == 0


async def test_call_waits_for_room_no_longer_than_a_message_may_take(make_cluster, monkeypatch):
    monkeypatch.setattr(inbound, "PATIENCE_S", 0.3)
    cluster = await make_cluster(1, **FEW_MESSAGES)
    async with cluster.over_grpc() as channel, asyncio.timeout(60):
        silent = await silent_calls(channel, 20)
        assert text_of(await events_of(stub_of(channel).Generate(request())))
        await eventually(lambda: sum(not call.done() for call in silent) <= 4)


async def test_tenant_with_the_most_messages_on_their_way_makes_room(make_cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(inbound, "PATIENCE_S", 1000)
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(path), **FEW_MESSAGES)
    ours, theirs = [(("authorization", f"Bearer {key}"),) for key in (KEY, OTHER_KEY)]
    async with cluster.over_grpc() as channel, asyncio.timeout(60):
        silent = await silent_calls(channel, 4, metadata=theirs)
        assert text_of(await events_of(stub_of(channel).Generate(request(), metadata=ours)))
        await eventually(lambda: sum(call.done() for call in silent) == 1)
        assert (await error_of(next(call for call in silent if call.done())))[1] == "overloaded"


class Message:
    """A call whose message arrives when it is told."""

    def __init__(self):
        self.is_there = asyncio.Event()

    async def read(self):
        await self.is_there.wait()
        return b"message"


async def test_call_that_comes_as_the_time_of_a_message_is_over_gets_its_room():
    """Both in one turn of the event loop, the call first."""
    messages = inbound.Inbound(BodyBudget(1 << 20, 1 << 20, MemoryTrimmer()), max_messages=1, timeout_s=1.2)
    loop, comes = asyncio.get_running_loop(), asyncio.Event()
    late, prompt = Message(), Message()
    prompt.is_there.set()

    async def come():
        await comes.wait()
        return await messages.read(prompt, "prompt")

    began = loop.time()
    reading, coming = asyncio.create_task(messages.read(late, "late")), asyncio.create_task(come())
    await asyncio.sleep(0)
    over_at = loop.time() + 1.2

    def sleep_until_then():
        while loop.time() <= over_at:
            time.sleep(0.005)

    loop.call_at(began + 1.1, sleep_until_then)
    loop.call_at(began + 1.15, comes.set)
    raised, read = await asyncio.gather(reading, coming, return_exceptions=True)
    assert isinstance(raised, LockstepError)
    assert raised.code is ErrorCode.INVALID_REQUEST
    assert read[0] == b"message"


async def test_messages_beyond_the_room_are_read_if_they_are_there(make_cluster):
    cluster = await make_cluster(1, **FEW_MESSAGES)
    async with cluster.over_grpc() as channel:
        calls = [events_of(stub_of(channel).Generate(request(max_tokens=2))) for _ in range(100)]
        assert all(text_of(events) for events in await asyncio.gather(*calls))


async def test_slow_client_does_not_hold_others_up_and_is_cut_off(make_cluster):
    cluster = await make_cluster(1, write_timeout_s=0.3, resume_window_s=0.1)
    cluster.workers[0].script = Script(batch=8)
    async with cluster.over_grpc(grpc__http2__bdp_probe=0) as channel:
        call = stub_of(channel).Generate(request(max_tokens=200, n=16, logprobs=20))
        await call.initial_metadata()
        assert text_of(await events_of(stub_of(channel).Generate(request(seed=3))))
        await eventually(lambda: cluster.router.requests == 0)
        await eventually(lambda: cluster.router.runs.readings == 0)
        assert (await error_of(call))[1] == "cancelled"


async def test_message_in_the_wrong_form_is_an_error(cluster):
    async with cluster.over_grpc() as channel:
        raw = channel.unary_stream("/lockstep.v1.Inference/Generate")
        for message in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xff\xfe", b"\x0b\x0c"):
            assert (await error_of(raw(message)))[1] == "invalid_request"
        assert (await error_of(raw(b"")))[2] == "model"
        for message in (b"", b"\x0a\x01\xff", b"\x0a\xac\x02" + b"x" * 300):
            assert (await error_of(channel.unary_stream("/lockstep.v1.Inference/Resume")(message)))[1] == (
                "invalid_request"
            )


def test_structure_is_limited_before_parsing():
    ids = inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=[1, 300, 70_000] * 100))
    check_structure(ids.SerializeToString(), DESCRIPTOR, 300)
    with pytest.raises(LockstepError, match="more than 299 values"):
        check_structure(ids.SerializeToString(), DESCRIPTOR, 299)
    many = b"\x2a\x00" * (2 << 20)  # `stop`, two million times
    began = time.thread_time()
    with pytest.raises(LockstepError, match=f"stop has more than {MAX_ENTRIES} entries"):
        check_structure(many, DESCRIPTOR, 300)
    with pytest.raises(LockstepError, match=f"more than {MAX_RECORDS} fields"):
        check_structure(b"\xf8\x07\x01" * (2 << 20), DESCRIPTOR, 300)
    assert time.thread_time() - began < 0.5
    unpacked = inference_pb2.TokenIds.DESCRIPTOR
    with pytest.raises(LockstepError, match="fields"):
        check_structure(b"\x08\x01" * (MAX_RECORDS + 1), unpacked, 10)
    largest = inference_pb2.GenerateRequest(model="m")
    for _ in range(4096):
        largest.conversation.messages.add(role="user", content="x", name="n")
    check_structure(largest.SerializeToString(), DESCRIPTOR, 300)
    largest.conversation.messages.add()
    with pytest.raises(LockstepError, match=f"messages has more than {MAX_ENTRIES} entries"):
        check_structure(largest.SerializeToString(), DESCRIPTOR, 300)


def test_events_are_described_for_tools():
    assert MessageToDict(inference_pb2.GenerateEvent(text="x", event_id="r:1")) == {"text": "x", "eventId": "r:1"}
