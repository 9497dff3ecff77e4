"""What routers and state servers of other versions have written, and this router does not know."""

import contextlib
from dataclasses import replace

import pytest
from journal_store_contract import record
from lockstep_api.v1 import state_pb2
from lockstep_common.grpc_tls import dial_plain
from lockstep_router import metrics
from lockstep_router.generation.parsing import Parsing
from lockstep_router.journals import MemoryJournalStore, MirroredJournalStore, Piece
from lockstep_router.journals.stored_form import from_response, to_message
from router_cluster import eventually
from state_server import StateServer

UNKNOWN_OUTCOME = 77


def read_back(parsing):
    """A record with this parsing, as it is read from the state server."""
    written = replace(record(), parsing=parsing)
    message = to_message(written, None)
    response = state_pb2.ReadResponse(record=message, logs=[state_pb2.ChoiceLog() for _ in message.choices], epoch=1)
    return from_response(written.request_id, response)


@pytest.mark.parametrize("parsing", [Parsing(tool_format="of tomorrow"), Parsing(reasoning="of tomorrow")])
def test_record_with_a_format_that_is_not_known_is_absent(parsing):
    assert read_back(parsing) is None


@pytest.mark.parametrize("parsing", [None, Parsing(), Parsing("think", tool_format="hermes")])
def test_record_with_known_formats_is_there(parsing):
    assert read_back(parsing).stream.record.parsing == parsing


async def test_outcome_that_is_not_known_is_asked_for_again_and_disturbs_no_other_stream(tmp_path, monkeypatch):
    before = metrics.JOURNAL_WRITES.labels("other")._value.get()
    server = StateServer(tmp_path / "state")
    store = MirroredJournalStore(
        MemoryJournalStore(max_streams=4, max_bytes=1 << 20),
        server.target,
        dial_plain,
        owner="router-1",
        window_s=100.0,
        timeout_s=5.0,
        max_lag_s=0.01,
    )
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
        await server.start()
        stack.push_async_callback(server.kill)
        for request_id in ("r-1", "r-2"):
            await store.open(record(request_id))
            store.append(request_id, Piece(0, 0, [5, 6]))
        store.start()
        stack.push_async_callback(store.close)
        await eventually(lambda: store.mirror.is_idle)
        assert [store.mirror.entries[each].written for each in ("r-1", "r-2")] == [[2, 0], [2, 0]]
    assert calls == [["r-1", "r-2"], ["r-1"]]
    assert metrics.JOURNAL_WRITES.labels("other")._value.get() == before + 1
