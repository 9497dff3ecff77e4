"""Checks the address that a gRPC server will listen on.

gRPC would take over a Unix socket that another process serves, and reports a port in use without a reason.
"""

import os
import socket
import stat

from lockstep_common.address import is_unix, split_host_port, unix_path
from lockstep_common.errors import cannot_listen

_CONNECT_TIMEOUT_S = 1.0


def claim(listen: str) -> None:
    """Make sure that `listen` can be bound; remove a Unix socket that no process listens on.

    Raises:
        LockstepError: INVALID_REQUEST with the reason why it cannot be bound.
    """
    try:
        if is_unix(listen):
            _claim_path(unix_path(listen))
        else:
            _claim_port(listen)
    except OSError as error:
        raise cannot_listen("listen", listen, error.strerror or str(error)) from None


def _claim_path(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    if mode:
        if not stat.S_ISSOCK(mode):
            raise OSError(f"{path} is there and is not a socket")
        if _somebody_listens(path):
            raise OSError("another process listens there")
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
    os.unlink(path)


def _somebody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
    return True


def _claim_port(listen: str) -> None:
    host, port = split_host_port(listen)
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
