"""The decoder follows the specification, wherever chunks end."""

import pytest
from lockstep_client.sse import Decoder, EventTooLongError, ServerSentEvent

STREAM = (
    "\ufeff: comment\n"
    "data: one\n\n"
    "id: 1\rdata:two\r\rdata: é\u2028\u0085🙂\r\ndata\r\ndata:  three\r\n\r\n"
    "event: add\ndata: x\nid: a\0b\nretry: 5\nunknown: y\n\n"
    "id\ndata: y\n\nid: 9\n\ndata: z\n\ndata: incomplete\nid: 10\n"
).encode()
EVENTS = [
    ServerSentEvent("one"),
    ServerSentEvent("two", "1"),
    ServerSentEvent("é\u2028\u0085🙂\n\n three", "1"),
    ServerSentEvent("x", "1", "add"),
    ServerSentEvent("y"),
    ServerSentEvent("z", "9"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_do_not_depend_on_chunks(size):
    decoder = Decoder()
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for chunk in chunks for event in decoder.feed(chunk)] == EVENTS


def test_what_is_encoded_is_decoded():
    assert [event for each in EVENTS for event in Decoder().feed(each.encode())] == EVENTS


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 2000, b"data: xxxxxxxxx\n" * 200, b"x" * 2000])
def test_lengths_are_bounded(stream):
    decoder = Decoder(max_event_bytes=1000)
    with pytest.raises(EventTooLongError):
        list(map(decoder.feed, (stream[at : at + 10] for at in range(0, len(stream), 10))))
