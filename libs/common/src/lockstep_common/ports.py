"""Free TCP ports for servers that are started a moment later.

A port that the kernel chose (port 0) is free again as soon as it is asked for, and the kernel may give it to any other
process before the server listens. So ports are taken from below those that it gives away.
"""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

_PORTS = range(10_000, 22_768)
"""Nodes of a Redis Cluster listen on the port that is higher by 10,000, too."""
_TRIES = 100
RANGE_PATH = "/proc/sys/net/ipv4/ip_local_port_range"


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens.

    Raises:
        OSError: the host is not an address of this machine.
    """
    for port in candidates():
        with suppress(OSError):
            return probe(host, port)
    return probe(host, 0)


def candidates() -> Iterator[int]:
    """Ports to try, in random order."""
    if first_given() >= _PORTS.stop:
        yield from random.SystemRandom().sample(_PORTS, _TRIES)


def probe(host: str, port: int) -> int:
    """The port, if a server can listen on it; one that the kernel chooses for 0.

    Raises:
        OSError: it is taken, or the host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as bound:
        # As servers do: connections of an earlier server in TIME_WAIT do not block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return int(bound.getsockname()[1])


def first_given() -> int:
    """The lowest port that the kernel gives to who asks for any."""
    try:
        with open(RANGE_PATH) as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
