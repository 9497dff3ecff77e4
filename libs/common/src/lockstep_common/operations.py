"""What only operators may ask of a process, on its management port: where it is, its newest log lines, its settings,
and another log level.

    GET /debug/stacks     threads and tasks of this process; a worker adds its ranks
    GET /debug/logs       the newest lines of the log
    GET /debug/trace/ID   the newest spans of a trace or of a request, if traces are on
    GET /debug/settings   the settings without secrets, and versions
    GET /loglevel
    POST /loglevel?level=debug&for_s=600
    POST /debug/profile?steps=20    a worker's: what its ranks do in the next steps

An operator has shown a certificate or, without TLS, connects from this machine or pod: `kubectl port-forward` and
`kubectl exec` do. A mesh's sidecar connects from the pod for others, so a mesh has to leave the port
out, or the port has to have TLS; requests with a proxy's headers are refused.

Nothing here but a profile waits for the event loop, which may be what is stuck.
"""

import asyncio
import ipaddress
import logging
import os
import platform
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from importlib import metadata
from typing import Any
from urllib.parse import parse_qs

from lockstep_common.answers import Answer, as_json, not_found
from lockstep_common.errors import LockstepError
from lockstep_common.log_level import DEFAULT_CHANGE_S, LOG_LEVEL
from lockstep_common.stacks import task_places, thread_stacks
from lockstep_common.telemetry import recent_lines
from lockstep_common.tracing.kept import KEPT_SPANS

logger = logging.getLogger("lockstep.management")

PROFILED_STEPS = 20
PROFILE_S = 60.0
"""A service has to end a profile earlier."""

Profile = Callable[[int], Coroutine[Any, Any, bytes]]
"""Profiles a number of steps, in the service's loop; returns a tar archive."""

_TRACE = "/debug/trace/"
_CONSOLE = "/console"
_PROXY_HEADERS = frozenset({"forwarded", "x-forwarded-for"})
_MESH_HEADERS = ("x-envoy-", "l5d-")
_PACKAGES = ("lockstep-common", "lockstep-engine", "torch", "numpy", "grpcio", "protobuf", "transformers", "uvloop")
"""Those whose versions are reported, where they are installed."""


def is_for_operators(path: str) -> bool:
    """Whether a path is one of those above."""
    name = path.partition("?")[0]
    return name == "/loglevel" or name.startswith("/debug/")


def is_for_browsers(path: str) -> bool:
    """Whether a path is of a web page or its data, of which another site's page may want to read as much."""
    name = path.partition("?")[0]
    return name == _CONSOLE or name.startswith(f"{_CONSOLE}/")


def is_local(host: str) -> bool:
    """Whether a peer's address is of this machine or pod itself."""
    return host in (
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "::1",
    )  # not all of 127.0.0.0/8: Istio's sidecar connects from 127.0.0.6


def is_relayed(headers: Iterable[str]) -> bool:
    """Whether a proxy, such as a mesh's sidecar, has passed the request on: its peer is then not the sender."""
    names = [name.lower() for name in headers]
    return any(name in _PROXY_HEADERS or name.startswith(_MESH_HEADERS) for name in names)


def names_this_host(host: str) -> bool:
    """Whether a Host header is localhost or an address. Another name may be a web page's, which its owner has let
    point to this machine (DNS rebinding).
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def names_another_host() -> Answer:
    """The answer to a request for a page by a name that may be another site's."""
    return as_json(403, {"error": "without TLS the console is at localhost or an IP address only, under no other name"})


def refused() -> Answer:
    """The answer to others."""
    return as_json(
        403, {"error": "only for operators: from this machine or pod, without a proxy, or with a client certificate"}
    )


class Operations:
    """Answers of this process. They are made in many threads.

    Args:
        loop: the event loop of the process.
        parts: what a service adds to `/debug/stacks`, by name: functions that any thread may call.
        settings: the service's settings without secrets, as JSON types.
        profile: profiles the service; None: it cannot.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parts: Mapping[str, Callable[[], Any]],
        settings: Mapping[str, Any],
        profile: Profile | None = None,
    ) -> None:
        self._loop = loop
        self._parts = parts
        self._settings = settings
        self._profile = profile
        self._profiling = threading.Lock()

    def of(self, method: str, path: str) -> Answer:
        """The answer to a GET or a POST."""
        name, _, query = path.partition("?")
        if method == "GET":
            return self._page(name)
        match name:
            case "/loglevel":
                return _change_level(query)
            case "/debug/profile":
                return self._profiled(query)
        return not_found()

    def _page(self, name: str) -> Answer:
        match name:
            case "/debug/stacks":
                own = {"pid": os.getpid(), "threads": thread_stacks(), "tasks": task_places(self._loop)}
                return as_json(200, own | {part: function() for part, function in self._parts.items()})
            case "/debug/logs":
                return Answer(200, "application/x-ndjson", "".join(f"{line}\n" for line in recent_lines()).encode())
            case "/debug/settings":
                return as_json(200, {"settings": dict(self._settings), "versions": versions()})
            case "/loglevel":
                return _level()
            case _ if name.startswith(_TRACE):
                return as_json(200, KEPT_SPANS.find(name.removeprefix(_TRACE)))
        return not_found()

    def _profiled(self, query: str) -> Answer:
        if self._profile is None:
            return as_json(404, {"error": "this process has no ranks; profile a worker"})
        if not self._profiling.acquire(blocking=False):
            return as_json(409, {"error": "a profile runs already; try again in a minute"})
        try:
            return Answer(200, "application/x-tar", self._wait_for_profile(self._profile, _steps(query)))
        except ValueError as error:
            return as_json(400, {"error": str(error)})
        except LockstepError as error:
            return as_json(error.meaning.http_status, {"error": error.message})
        except (TimeoutError, CancelledError) as error:
            late = f"no profile within {PROFILE_S:g} s; `lockstep debug` shows what is stuck"
            ends = "no profile: the service is ending"
            return as_json(503, {"error": late if isinstance(error, TimeoutError) else ends})
        finally:
            self._profiling.release()

    def _wait_for_profile(self, profile: Profile, steps: int) -> bytes:
        logger.warning("an operator has asked for a profile of the ranks", extra={"steps": steps})
        made = profile(steps)
        try:
            future = asyncio.run_coroutine_threadsafe(made, self._loop)
        except RuntimeError:  # the loop is closed
            made.close()
            raise CancelledError from None
        try:
            return future.result(PROFILE_S)
        finally:
            future.cancel()


def versions() -> dict[str, str]:
    """Of Python, the kernel, and the packages that matter."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _steps(query: str) -> int:
    given = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    if unknown := sorted(given.keys() - {"steps"}):
        raise ValueError(f"unknown parameter {unknown[0][:32]!r}: there is steps")
    text = given.get("steps", str(PROFILED_STEPS))
    if not (text.isascii() and text.isdigit()):
        raise ValueError("steps must be a whole number")
    return int(text[:9])


def _level() -> Answer:
    return as_json(200, {"level": LOG_LEVEL.level, "left_s": LOG_LEVEL.left_s})


def _change_level(query: str) -> Answer:
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    unknown = sorted(given.keys() - {"level", "for_s"})
    try:
        if unknown:
            raise ValueError(f"unknown parameter {unknown[0][:32]!r}: there are level and for_s")
        try:
            for_s = float(given.get("for_s", DEFAULT_CHANGE_S))
        except ValueError:
            raise ValueError("for_s must be a number of seconds") from None
        LOG_LEVEL.change(given.get("level", ""), for_s)
    except ValueError as error:
        return as_json(400, {"error": str(error)})
    fields = {"name": logger.name, "levelno": logging.WARNING, "levelname": "WARNING", "new_level": LOG_LEVEL.level}
    # `handle` does not ask the level, which may be above that of this line now.
    logger.handle(logging.makeLogRecord(fields | {"msg": "an operator has changed the log level", "for_s": for_s}))
    return _level()
