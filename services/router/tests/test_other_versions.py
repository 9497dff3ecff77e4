"""What routers and state servers of other versions have written, and this router does not know."""

import contextlib
import json
from dataclasses import replace

import pytest
from journal_store_contract import record
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import dial_plain
from lockstep_router import metrics
from lockstep_router.generation.parsing import Parsing
from lockstep_router.journals import MemoryJournalStore, MirroredJournalStore, Piece
from lockstep_router.journals.stored_form import Key, tenant_of, to_message
from lockstep_state.keys import Kind, key_of
from router_cluster import eventually
from state_server import StateServer

UNKNOWN_OUTCOME = 77
UNKNOWN_FINISH = 99


def store_at(server, owner):
    return MirroredJournalStore(
        MemoryJournalStore(max_streams=4, max_bytes=1 << 20),
        server.target,
        dial_plain,
        owner=owner,
        window_s=100.0,
        timeout_s=5.0,
        max_lag_s=0.01,
    )


@pytest.fixture
async def server(tmp_path):
    server = StateServer(tmp_path / "state")
    await server.start()
    yield server
    await server.kill()


@pytest.mark.parametrize(
    ("parsing", "is_known"),
    [
        (None, True),
        (Parsing("think", tool_format="hermes"), True),
        (Parsing(tool_format="of tomorrow"), False),
        (Parsing(reasoning="of tomorrow"), False),
    ],
)
async def test_stream_with_a_format_that_is_not_known_is_left_to_other_routers(server, parsing, is_known):
    """They go on with it. It is not taken for one that does not exist, and can be deleted here."""
    written = replace(record("r-1"), parsing=parsing)
    async with contextlib.AsyncExitStack() as stack:
        stores = [store_at(server, owner) for owner in ("router-1", "router-2")]
        for store in stores:
            store.start()
            stack.push_async_callback(store.close)
        theirs, ours = stores
        await theirs.open(written)
        await eventually(lambda: theirs.mirror.is_idle)
        if is_known:
            assert (await ours.look_up("r-1", written.owner)).record.parsing == parsing
        else:
            with pytest.raises(LockstepError) as refused:
                await ours.look_up("r-1", written.owner)
            assert refused.value.code is ErrorCode.UNAVAILABLE
        assert await ours.discard("r-1", written.owner)
        await eventually(lambda: ours.mirror.is_idle)
        assert await ours.look_up("r-1", written.owner) is None


async def test_stream_whose_end_is_not_known_is_left_to_other_routers(server):
    """A state server of another version has stored a reason that neither this one nor this router knows."""
    written = record("r-1")
    async with contextlib.AsyncExitStack() as stack:
        stores = [store_at(server, owner) for owner in ("router-1", "router-2")]
        for store in stores:
            store.start()
            stack.push_async_callback(store.close)
        theirs, ours = stores
        await theirs.open(written)
        theirs.append("r-1", Piece(0, 0, [5, 6]))
        await eventually(lambda: theirs.mirror.is_idle)
        key = key_of(Kind.STREAM, tenant_of(written.owner), b"r-1")
        stored = await server.backend.backend.read(key)
        stored.logs[0].finish = UNKNOWN_FINISH
        with pytest.raises(LockstepError) as refused:
            await ours.look_up("r-1", written.owner)
        assert (refused.value.code, "another version" in refused.value.message) == (ErrorCode.UNAVAILABLE, True)
        assert not ours.is_away
        assert await ours.discard("r-1", written.owner)
        await eventually(lambda: ours.mirror.is_idle)
        assert await ours.look_up("r-1", written.owner) is None


async def test_outcome_that_is_not_known_is_asked_for_again_and_disturbs_no_other_stream(server, monkeypatch):
    before = metrics.JOURNAL_WRITES.labels("other")._value.get()
    store = store_at(server, "router-1")
    append, calls = store.client.append, []

    async def strange(request):
        """The first outcome of `r-1` is of another version."""
        response = await append(request)
        calls.append([write.stream_id for write in request.writes])
        if len(calls) == 1:
            response.results[calls[0].index("r-1")].outcome = UNKNOWN_OUTCOME
        return response

    monkeypatch.setattr(store.client, "append", strange)
    async with contextlib.AsyncExitStack() as stack:
        for request_id in ("r-1", "r-2"):
            await store.open(record(request_id))
            store.append(request_id, Piece(0, 0, [5, 6]))
        store.start()
        stack.push_async_callback(store.close)
        await eventually(lambda: store.mirror.is_idle)
        assert [store.mirror.entries[each].written for each in ("r-1", "r-2")] == [[2, 0], [2, 0]]
    assert calls == [["r-1", "r-2"], ["r-1"]]
    assert metrics.JOURNAL_WRITES.labels("other")._value.get() == before + 1


NEWER_FIELD = b"\xfa\x01\x05newer"
"""Of a message: the field 31 with a text."""


async def test_fields_that_are_not_known_are_written_again(server):
    """A newer router has begun the stream, and goes on with it after the state server has forgotten everything."""
    begun = to_message(record("r-1"), Key("tenant/key", "ab"))
    request = json.loads(begun.request)
    begun.request = json.dumps(request | {"newer": 1, "style": request["style"] | {"newer": 2}}).encode()
    begun.choices[1].sampling.MergeFromString(NEWER_FIELD)
    begun.choices[1].MergeFromString(NEWER_FIELD)
    begun.MergeFromString(NEWER_FIELD)
    newer = state_pb2.StreamWrite(tenant=tenant_of("tenant"), stream_id="r-1", epoch=1, record=begun, owner="router-1")
    async with contextlib.AsyncExitStack() as stack:
        ours = store_at(server, "router-2")
        ours.start()
        stack.push_async_callback(ours.close)
        (result,) = (await ours.client.append(state_pb2.AppendRequest(writes=[newer]))).results
        assert result.outcome == state_pb2.WRITE_OUTCOME_OK
        assert await ours.take(await ours.look_up("r-1", "tenant")) is not None
        await server.restart()
        ours.append("r-1", Piece(0, 0, [5, 6]))
        await eventually(lambda: not ours.is_away and ours.mirror.is_idle)
        read = await ours.client.read(state_pb2.ReadRequest(tenant=tenant_of("tenant"), stream_id="r-1"))
    assert list(read.logs[0].ids) == [5, 6]
    assert read.record.SerializeToString(deterministic=True) == begun.SerializeToString(deterministic=True)
