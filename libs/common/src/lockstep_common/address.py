"""The two forms of an address: `unix:/path` and `host:port`.

It owns parsing and formatting. It never resolves a name and never opens a socket.
"""

import os

UNIX_PREFIX = "unix:"
_MAX_UNIX_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux
_MAX_PORT = 65535


def is_unix(address: str) -> bool:
    """Whether the address is that of a Unix socket."""
    return address.startswith(UNIX_PREFIX)


def unix_path(address: str) -> str:
    """The path of a `unix:/path` address; raises ValueError for a path that no socket can have."""
    path = address.removeprefix(UNIX_PREFIX)
    if not path.startswith("/") or path.startswith("//"):
        raise ValueError("must have an absolute path after unix:")
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ValueError(f"has a socket path of more than {_MAX_UNIX_PATH_BYTES} bytes")
    return path


def split_host_port(address: str) -> tuple[str, int]:
    """Host, without the brackets of an IPv6 address, and port.

    Raises:
        ValueError: the address is not host:port, or the host is an IPv6 address without brackets or cannot be one.
    """
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port[:6]) <= _MAX_PORT
    has_brackets = host.startswith("[") and host.endswith("]")
    if not host or not is_port or (":" in host and not has_brackets):
        raise ValueError(f"must be host:port, with a port of at most {_MAX_PORT}")
    return check_host(host[1:-1] if has_brackets else host), int(port)


def check_host(host: str) -> str:
    """The host itself if it can be looked up: Python raises a UnicodeError, and no OSError, for one that cannot.

    Raises:
        ValueError: a part of it between dots is empty, or has more than 63 characters.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("must have a host that is a name or an address") from None
    return host


def join_host_port(host: object, port: object) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def check_listen_address(address: str) -> str:
    """The address itself if a server can listen on it; port 0 asks for a free port.

    Raises:
        ValueError: it is neither `unix:/path` nor `host:port`.
    """
    if is_unix(address):
        unix_path(address)
    else:
        split_host_port(address)
    return address


def check_target(address: str) -> str:
    """The address itself if a client can dial it.

    Raises:
        ValueError: it is neither `unix:/path` nor `host:port`, or the port is 0.
    """
    check_listen_address(address)
    if not is_unix(address) and split_host_port(address)[1] == 0:
        raise ValueError("must have a port above 0")
    return address
