"""A router with as many busy connections as it takes: others are refused at once, nobody else notices, and room that
is free again is used.
"""

import contextlib
import json
import socket
import time

from lockstep_tools.hostile.attacks import MODEL, request
from target import Target

_CONNECTIONS = 40
_REFUSED = 100
_WAIT_S = 60.0
_REFUSED_S = 5.0
"""Half of the time for which a connection without headers may stay: refusals do not wait for that."""

STREAM = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 100_000, "stream": True}).encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n"


def goes_on(line: socket.socket) -> bool:
    """Whether a stream's connection gets more than what has come so far."""
    line.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while line.recv(1 << 16):
            pass
    line.settimeout(_WAIT_S)
    return bool(line.recv(1 << 16))


def test_busy_connections_beyond_the_limit_are_refused_at_once() -> None:
    with Target(flags=["--max-connections", str(_CONNECTIONS)]) as target, contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(target.address, _WAIT_S))

        def answer() -> bytes:
            with connect() as line:
                line.settimeout(_REFUSED_S)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    line.sendall(HEALTH)
                return line.recv(1 << 12)

        busy = [connect() for _ in range(_CONNECTIONS)]
        for line in busy:
            line.sendall(request(STREAM))
        for line in busy:
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert {answer().partition(b"\r\n")[0] for _ in range(_REFUSED)} == {b"HTTP/1.1 503 Service Unavailable"}
        assert target.streams() == _CONNECTIONS
        for line in busy:
            assert goes_on(line), "a stream has ended"
        for line in busy[::2]:
            line.close()
        end = time.monotonic() + _WAIT_S
        while not answer().startswith(b"HTTP/1.1 200 "):
            assert time.monotonic() < end, "the room is not free again"
        for line in busy[1::2]:
            assert goes_on(line), "a stream has ended"
