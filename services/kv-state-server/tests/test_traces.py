"""Spans of calls that come with a context, and of the commands to Redis that they lead to."""

import grpc
import pytest
from lockstep_api.v1 import state_pb2
from otlp_receiver import grpc_receiver
from state_serving import served
from test_journal_service import OK, append_one, record
from test_kv_service import key

CALLER = (("traceparent", f"00-{0xA:032x}-{0xB:016x}-01"), ("tracestate", "vendor=1"), ("baggage", "canary=1"))


async def read(client, stream_id, metadata=None):
    request = state_pb2.ReadRequest(tenant=client.tenant, stream_id=stream_id)
    return await client.journal.Read(request, metadata=metadata)


async def test_a_call_and_its_commands_are_spans_of_the_callers_trace(redis_server, tmp_path):
    with grpc_receiver() as receiver:
        async with served(
            tmp_path, store=redis_server.address, otlp_endpoint=receiver.address, trace_ratio=1
        ) as client:
            assert (await append_one(client, stream_id="canary", record=record())).outcome == OK
            await read(client, "canary")  # without a context: no span
            await read(client, "canary", CALLER)
            with pytest.raises(grpc.aio.AioRpcError):
                await read(client, "canary-2", CALLER)
        spans = receiver.wait({"Journal.Read": 2})
    calls = [span for span in spans if span.name == "Journal.Read"]
    commands = [span for span in spans if span.name.startswith("redis ")]
    assert len(calls) + len(commands) == len(spans)
    assert len(calls) == 2
    assert {(span.trace_id, span.state) for span in spans} == {(f"{0xA:032x}", "vendor=1")}
    assert {span.parent_id for span in calls} == {f"{0xB:016x}"}
    assert [span.attributes.get("error.type") for span in calls] == [None, "NOT_FOUND"]
    assert commands
    for command in commands:
        (call,) = [span for span in calls if span.span_id == command.parent_id]
        assert call.begin_ns <= command.begin_ns <= command.end_ns <= call.end_ns
    assert calls[0].resource["service.name"] == "lockstep-state"
    assert b"canary" not in receiver.raw


async def test_a_call_that_gives_a_stream_is_a_span(tmp_path):
    request = state_pb2.GetBlocksRequest(tenant="t", keys=[key("a")])
    with grpc_receiver() as receiver:
        async with served(tmp_path, otlp_endpoint=receiver.address, trace_ratio=1) as client:
            assert [message async for message in client.kv.Get(request, metadata=CALLER)] == []
        (call,) = receiver.wait({"Kv.Get": 1})
    assert (call.parent_id, call.is_error) == (f"{0xB:016x}", False)
