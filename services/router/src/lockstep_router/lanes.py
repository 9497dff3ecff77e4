"""The way of most tokens through the router: one function, from a worker's frame to the client's socket.

A lane is open while a stream needs nothing else: one choice of plain text, whose client keeps up, on a worker that
runs it. This is not checked for each token. What ends it closes the lane, and the stream's own path goes on where the
lane stopped: it is the only one that opens lanes, and it gives the same bytes.
"""

from collections.abc import Callable, Iterable

from lockstep_router import metrics
from lockstep_router.text.pieces import Pieces


class Outlet:
    """Where the lane of a stream sends its events, and what they have in common.

    Args:
        before: what precedes an event's number, or its text if events have no numbers.
        between: what stands between the number and the text; None: events have no numbers.
        after: what follows the text.
        send: sends what the client's connection takes at once, and returns how many bytes that was. OSError: none.
        send_later: sends what `send` has left.
    """

    def __init__(
        self,
        before: bytes,
        between: bytes | None,
        after: bytes,
        *,
        send: Callable[[bytes], int],
        send_later: Callable[[bytes], None],
    ) -> None:
        self.fixed_bytes = len(before) + len(between or b"") + len(after)
        self.is_numbered = between is not None
        number = b"" if between is None else b"%d" + between.replace(b"%", b"%%")
        self.event = b"%%x\r\n%b%b%%b%b\r\n" % (before.replace(b"%", b"%%"), number, after.replace(b"%", b"%%"))
        """A chunk of HTTP/1.1 with an event in it; to be filled in are its size, the event's number if it has one, and
        the text.
        """
        self.send = send
        self.send_later = send_later
        self.lane: Lane | None = None
        """Any other writer to the client closes it first."""


class Lane:
    """The lane of one stream.

    Args:
        emitted_ids: of the stream's journal; the lane appends to them.
        pieces: the texts of tokens.
        outlet: where it sends them.
        on_close: called after the lane was closed.
        on_failure: called with what the outlet has raised.
    """

    __slots__ = (
        "_fixed_bytes",
        "_handle",
        "_lanes",
        "_on_close",
        "at",
        "emitted_ids",
        "end",
        "event",
        "fail",
        "is_numbered",
        "pieces",
        "send",
        "send_later",
        "size",
        "trace_id",
    )

    def __init__(
        self,
        emitted_ids: list[int],
        pieces: Pieces,
        outlet: Outlet,
        *,
        on_close: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.emitted_ids = emitted_ids
        self.pieces = pieces
        self.event = outlet.event
        self.is_numbered = outlet.is_numbered
        self.send = outlet.send
        self.send_later = outlet.send_later
        self.size = 0
        """Bytes of an event without its text."""
        self.end = 0
        """The position from which on the lane takes no tokens; 0: it is closed."""
        self.at = 0.0
        """When the last token was sent, in the event loop's time."""
        self.trace_id = 0
        self.fail = on_failure
        self._fixed_bytes = outlet.fixed_bytes
        self._on_close = on_close
        self._lanes: dict[int, Lane] | None = None
        self._handle = 0
        outlet.lane = self

    def open(self, lanes: "dict[int, Lane]", handle: int, end: int, at: float, trace_id: int = 0) -> None:
        """Take the stream's tokens from now on.

        Args:
            lanes: of the worker.
            handle: of the stream's attempt.
            end: the position from which on it takes none.
            at: when the stream's last token was sent.
            trace_id: of the stream's trace if that is kept; else 0.
        """
        self.size, self.end = self._fixed_bytes, end
        if self.is_numbered:
            # Until the numbers have a digit more, all events have the same size.
            digits = len(str(len(self.emitted_ids) + 1))
            self.size += digits
            self.end = min(end, 10**digits - 1)
        self.at = at
        self.trace_id = trace_id
        self._lanes, self._handle = lanes, handle
        lanes[handle] = self

    def close(self) -> None:
        """Take no more tokens, unless it is opened again. Closing what is closed does nothing."""
        if self._lanes is not None:
            del self._lanes[self._handle]
            self._lanes, self.end = None, 0
            self._on_close()


def push(
    handles: Iterable[int], positions: Iterable[int], ids: Iterable[int], lanes: dict[int, Lane], now: float
) -> list[tuple[int, int, int]]:
    """Send the tokens of a step to the clients.

    Args:
        handles: of the streams' attempts, as many as there are positions and ids.
        positions: of the tokens in their streams.
        ids: the tokens.
        lanes: the worker's open lanes, by the handle.
        now: the event loop's time.

    Returns:
        What no lane takes, in order: handle, position and id.
    """
    others = []
    events: list[tuple[Lane, bytes]] = []
    alike = trace_id = 0
    at = now
    for handle, position, token_id in zip(handles, positions, ids, strict=True):
        lane = lanes.get(handle)
        if lane is None or not position == len(lane.emitted_ids) < lane.end:
            others.append((handle, position, token_id))
            continue
        try:
            piece = lane.pieces[token_id]
            if piece is None:
                others.append((handle, position, token_id))
                continue
            lane.emitted_ids.append(token_id)
            if lane.at != at:
                # Streams that run together have the same intervals: these are counted together, and the first one's
                # trace is the example of them.
                metrics.INTER_TOKEN_SECONDS.observe(now - at, alike, trace_id)
                at, alike, trace_id = lane.at, 0, lane.trace_id
            alike += 1
            lane.at = now
            size = lane.size + len(piece)
            event = lane.event % ((size, position + 1, piece) if lane.is_numbered else (size, piece))
            events.append((lane, event))
        except Exception as error:
            # The other streams of the worker go on.
            lane.close()
            lane.fail(error)
    # In a loop of their own the system calls take less time: nothing displaces the kernel's code and data between two.
    for lane, event in events:
        try:
            try:
                # A lane that an earlier event of this step has closed has bytes that wait.
                sent = lane.send(event) if lane.end else 0
            except OSError:
                sent = 0
            if sent != len(event):
                lane.close()
                lane.send_later(event[sent:])
        except Exception as error:
            lane.close()
            lane.fail(error)
    metrics.INTER_TOKEN_SECONDS.observe(now - at, alike, trace_id)
    metrics.GENERATED_TOKENS.inc(len(events))
    return others
