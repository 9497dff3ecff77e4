"""The workers behind DNS names: each address that a name has is a worker.

A name without any address and a server that does not answer look the same to a resolver, so both count as no answer,
and what the name had before stays.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from lockstep_router.discovery.found import Found
from lockstep_router.discovery.report import Report

_DEADLINE_S = 5.0

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class Dns:
    """Resolves names again and again.

    Args:
        names: `host:port` each.
        interval_s: between two answers; spread by a tenth, so that replicas do not ask at once.
        look_up: gives the addresses of (host, port), or raises OSError.
    """

    def __init__(self, names: Sequence[str], interval_s: float, look_up: LookUp | None = None) -> None:
        self._names = names
        self._interval_s = interval_s
        self._look_up = look_up or _ask_system
        self._known: dict[str, frozenset[Found]] = {}

    async def run(self, report: Report) -> None:
        """Resolve until cancelled."""
        while True:
            workers, problem = await self.resolve()
            if problem:
                report.failed(problem)
            else:
                report.working()
            # One name of several may have been resolved.
            if self._known:
                (report.suppose if problem else report.found)(workers)
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))

    async def resolve(self) -> tuple[frozenset[Found], str]:
        """All addresses that the names have or, where there is no answer, last had; and why one has none."""
        answers = await asyncio.gather(*(self._resolve(name) for name in self._names), return_exceptions=True)
        problem = ""
        for name, found in zip(self._names, answers, strict=True):
            if isinstance(found, BaseException):
                problem = f"{name}: {_describe(found)}"
            else:
                self._known[name] = found
        return frozenset().union(*self._known.values()), problem

    async def _resolve(self, name: str) -> frozenset[Found]:
        host, _, port = name.rpartition(":")
        async with asyncio.timeout(_DEADLINE_S):
            addresses = await self._look_up(host.strip("[]"), int(port))
        return frozenset(Found(join_host_port(address, port)) for address in addresses)


async def _ask_system(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[0]) for *_, address in entries]


def join_host_port(host: object, port: object) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error)
