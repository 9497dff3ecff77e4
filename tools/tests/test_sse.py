import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_tools.load.sse import Decoder, ServerSentEvent

FIRST = 'id: r:1\ndata: {"a": "é\u2028\x85x"}\n\n'
STREAM = FIRST + ": a comment\r\n\r\ndata: two\r\ndata:lines\r\n\r\nid: r:2\rdata: [DONE]\r\r"
EVENTS = [
    ServerSentEvent('{"a": "é\u2028\x85x"}', "r:1"),
    ServerSentEvent("two\nlines", "r:1"),
    ServerSentEvent("[DONE]", "r:2"),
]


def test_events_of_a_whole_stream() -> None:
    decoder = Decoder()
    assert decoder.feed(STREAM.encode()) + decoder.feed(b"\n") == EVENTS


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_chunks_may_end_anywhere(cuts: list[int]) -> None:
    body = STREAM.encode()
    edges = [0, *sorted(cuts), len(body)]
    decoder = Decoder()
    found = [event for a, b in pairwise(edges) for event in decoder.feed(body[a:b])]
    assert found + decoder.feed(b"\n") == EVENTS


def test_unicode_line_separators_do_not_end_a_line() -> None:
    (event,) = Decoder().feed(FIRST.encode())
    assert json.loads(event.data) == {"a": "é\u2028\x85x"}


@pytest.mark.parametrize("body", [b"\n\n\n", b"id: 1\n\n", b": only a comment\n\n", b"data: unfinished"])
def test_what_is_no_event(body: bytes) -> None:
    assert Decoder().feed(body) == []
