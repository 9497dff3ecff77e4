"""What a lane takes, what it leaves, and the bytes that it sends."""

import pytest
from lockstep_router.lanes import Lane, Outlet, push
from lockstep_router.text.pieces import Pieces

TEXTS = {1: " one", 2: 'say "2"\n', 3: None, 4: "100 %d"}


class Client:
    """Takes all bytes, or as many as `room` says."""

    def __init__(self, emitted=(), is_numbered=True):
        self.got, self.room, self.closed, self.failures = b"", None, 0, []
        self.is_behind = False
        self.emitted_ids = list(emitted)
        before = (b"id: 5%:", b"\ndata: {") if is_numbered else (b"data: {5%", None)
        outlet = Outlet(*before, b"}\n\n", send=self.send, send_later=self.send_later)
        self.lane = Lane(
            self.emitted_ids,
            Pieces(TEXTS.get),
            outlet,
            on_close=self.note_closed,
            on_failure=self.failures.append,
        )

    def send(self, data):
        assert not self.is_behind, "bytes that wait are overtaken"
        taken = data[: self.room]
        self.got += taken
        return len(taken)

    def send_later(self, data):
        assert self.closed, "the lane is closed before the connection is behind"
        self.got += data
        self.is_behind = True

    def note_closed(self):
        self.closed += 1


def chunk(text):
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def opened(lanes, handle=1, end=100, emitted=(), is_numbered=True):
    client = Client(emitted, is_numbered)
    client.lane.open(lanes, handle, end, at=0.0)
    return client


def test_events():
    lanes = {}
    client = opened(lanes)
    for position, token_id in enumerate([1, 2, 4]):
        assert push([1], [position], [token_id], lanes, 1.0) == []
    texts = [" one", r"say \"2\"\n", "100 %d"]
    assert client.got == b"".join(chunk(f"id: 5%:{n}\ndata: {{{text}}}\n\n") for n, text in enumerate(texts, 1))
    assert client.emitted_ids == [1, 2, 4]
    assert not client.closed


def test_events_without_numbers():
    """More digits change nothing."""
    lanes = {}
    client = opened(lanes, end=12, emitted=[1] * 8, is_numbered=False)
    for position, token_id in enumerate([1, 2, 4, 1], 8):
        assert push([1], [position], [token_id], lanes, 1.0) == []
    assert push([1], [12], [1], lanes, 1.0) == [(1, 12, 1)]
    texts = [" one", r"say \"2\"\n", "100 %d", " one"]
    assert client.got == b"".join(chunk(f"data: {{5%{text}}}\n\n") for text in texts)


@pytest.mark.parametrize(
    ("handle", "position", "token_id"),
    [(2, 0, 1), (1, 1, 1), (1, 0, 3), (1, 0, 99)],
    ids=["stranger", "gap", "text", "id"],
)
def test_what_no_lane_takes(handle, position, token_id):
    lanes = {}
    client = opened(lanes)
    assert push([handle], [position], [token_id], lanes, 1.0) == [(handle, position, token_id)]
    assert client.emitted_ids == []
    assert client.got == b""


def test_end_and_number_with_a_digit_more():
    lanes = {}
    client = opened(lanes, emitted=[1] * 8)
    assert push([1], [8], [1], lanes, 1.0) == []
    assert push([1], [9], [1], lanes, 1.0) == [(1, 9, 1)]
    client.lane.close()
    client.lane.open(lanes, 1, 10, at=1.0)
    assert push([1], [9], [1], lanes, 1.0) == []
    assert push([1], [10], [1], lanes, 1.0) == [(1, 10, 1)]
    assert client.got == b"".join(chunk(f"id: 5%:{n}\ndata: {{ one}}\n\n") for n in (9, 10))


def test_duplicate_is_left():
    lanes = {}
    client = opened(lanes)
    assert push([1, 1], [0, 0], [1, 1], lanes, 1.0) == [(1, 0, 1)]
    assert client.emitted_ids == [1]


def test_failure_closes_the_lane_and_leaves_the_others():
    lanes = {}
    broken, sound = opened(lanes, 1), opened(lanes, 2)
    broken.lane.pieces = {}
    assert push([1, 2], [0, 0], [1, 1], lanes, 1.0) == []
    assert [type(error) for error in broken.failures] == [KeyError]
    assert broken.closed == 1
    assert sound.got == chunk("id: 5%:1\ndata: { one}\n\n")
    assert list(lanes) == [2]


def test_connection_that_is_behind_closes_the_lane():
    lanes = {}
    client = opened(lanes)
    client.room = 7
    assert push([1], [0], [1], lanes, 1.0) == []
    assert client.got == chunk("id: 5%:1\ndata: { one}\n\n")
    assert client.closed == 1
    assert lanes == {}
    assert push([1], [1], [1], lanes, 1.0) == [(1, 1, 1)]


def test_two_tokens_of_a_step_for_a_connection_that_is_behind():
    lanes = {}
    client, other = opened(lanes), opened(lanes, 2)
    client.room = 7
    assert push([1, 2, 1], [0, 0, 1], [1, 1, 4], lanes, 1.0) == []
    assert client.got == b"".join(
        chunk(f"id: 5%:{n}\ndata: {{{text}}}\n\n") for n, text in ((1, " one"), (2, "100 %d"))
    )
    assert client.emitted_ids == [1, 4]
    assert (client.closed, client.failures) == (1, [])
    assert other.got == chunk("id: 5%:1\ndata: { one}\n\n")
    assert list(lanes) == [2]


def test_failure_to_send_leaves_the_others():
    def fail(_):
        raise RuntimeError

    lanes = {}
    broken, sound = opened(lanes, 1), opened(lanes, 2)
    broken.lane.send = fail
    assert push([1, 2], [0, 0], [1, 1], lanes, 1.0) == []
    assert [type(error) for error in broken.failures] == [RuntimeError]
    assert (broken.closed, sound.closed) == (1, 0)
    assert sound.got == chunk("id: 5%:1\ndata: { one}\n\n")
