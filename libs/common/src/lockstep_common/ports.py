"""Free TCP ports for servers that are started a moment later.

A port that the kernel chose (port 0) is free again as soon as it is asked for, and the kernel may give it to any other
process before the server listens. So ports are taken from below those that it gives away, and two processes that choose
at the same time never choose the same one: each leaves a connection in TIME_WAIT on its port. For a minute only servers
can listen on it that set SO_REUSEADDR, as all common ones do, and this module, which does not set it, passes it over
(the idea is that of Yelp's ephemeral-port-reserve).
"""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

_PORTS = range(10_000, 22_768)
"""Nodes of a Redis Cluster listen on the port that is higher by 10,000, too."""
_TRIES = 100
_CONNECT_TIMEOUT_S = 1.0
RANGE_PATH = "/proc/sys/net/ipv4/ip_local_port_range"


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens, and which no other caller gets for a minute.

    Raises:
        OSError: the host is not an address of this machine.
    """
    for port in candidates():
        with suppress(OSError):
            return _reserve(host, port)
    return _reserve(host, 0)


def candidates() -> Iterator[int]:
    """Ports to try, in random order."""
    if first_given() >= _PORTS.stop:
        yield from random.SystemRandom().sample(_PORTS, _TRIES)


def probe(host: str, port: int) -> int:
    """The port, if a server can listen on it; one that the kernel chooses for 0.

    Raises:
        OSError: it is taken, or the host is not an address of this machine.
    """
    # As servers do: connections of an earlier server in TIME_WAIT do not block the port.
    with _bound(host, port, reuse=True) as probed:
        return int(probed.getsockname()[1])


def _reserve(host: str, port: int) -> int:
    """`probe`, where no process has reserved the port within the last minute either; reserves it."""
    with _bound(host, port, reuse=False) as server:
        # The connection has this too, and only then do servers that set it get its port.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.settimeout(_CONNECT_TIMEOUT_S)
        server.listen(1)
        address = server.getsockname()
        with socket.create_connection(address[:2], _CONNECT_TIMEOUT_S):
            server.accept()[0].close()  # the side that closes first is left in TIME_WAIT
        return int(address[1])


def _bound(host: str, port: int, *, reuse: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def first_given() -> int:
    """The lowest port that the kernel chooses for port 0."""
    try:
        with open(RANGE_PATH) as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
