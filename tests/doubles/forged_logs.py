"""A peer of a gRPC port whose text would be a line of its own in the log, if gRPC's core wrote it there."""

import json
import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _GOAWAY = 4, 7
_ENHANCE_YOUR_CALM = 11
_FORGED = b'too_many_pings\n{"level": "error", "message": "forged"}\n\xb0'


def say_forged_goodbye(connection: socket.socket) -> None:
    """Say goodbye as a peer of HTTP/2 with such a text, and wait until the other side has read it and hung up."""
    goodbye = struct.pack(">II", 0, _ENHANCE_YOUR_CALM) + _FORGED
    connection.sendall(_PREFACE + _frame(_SETTINGS, b"") + _frame(_GOAWAY, goodbye))
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass


def _frame(kind: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, 0]) + bytes(4) + content


def assert_only_own_lines(log: str) -> None:
    """Each line is a JSON object of the service's own."""
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines
    assert {line["message"] for line in lines}.isdisjoint({"forged"})
