"""Where the worker listens. gRPC takes over a live unix socket and says little of a taken port, so both are checked."""

import os
import socket
import stat

from lockstep_common.errors import ErrorCode, LockstepError

UNIX_PREFIX = "unix:"
_MAX_UNIX_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux
_CONNECT_TIMEOUT_S = 1.0


def check_address(listen: str) -> str:
    """The address itself; raises ValueError for one that is neither `host:port` nor `unix:/path`."""
    if listen.startswith(UNIX_PREFIX):
        path = listen.removeprefix(UNIX_PREFIX)
        if not path.startswith("/") or path.startswith("//"):
            raise ValueError("must have an absolute path after unix:")
        if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
            raise ValueError(f"has a socket path of more than {_MAX_UNIX_PATH_BYTES} bytes")
        return listen
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be host:port or unix:/path")
    return listen


def claim(listen: str) -> None:
    """Make sure that `listen` can be bound; remove a unix socket that nobody listens on.

    Raises:
        LockstepError: INVALID_REQUEST with the reason why it cannot.
    """
    try:
        if listen.startswith(UNIX_PREFIX):
            _claim_path(listen.removeprefix(UNIX_PREFIX))
        else:
            _claim_port(listen)
    except OSError as error:
        raise unusable(listen, error.strerror or str(error)) from None


def unusable(listen: str, reason: str) -> LockstepError:
    """The error for an address that cannot be listened on."""
    return LockstepError(ErrorCode.INVALID_REQUEST, f"cannot listen on {listen}: {reason}", field="listen")


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
    host, _, port = listen.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
