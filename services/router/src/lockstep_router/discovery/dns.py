"""Worker addresses from DNS: each address of each name in `workers_dns` is a worker.

A resolver does not distinguish a name without addresses from a server that does not answer. Both count as no answer,
and the addresses that the name had before are kept.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from lockstep_common.address import join_host_port, split_host_port

from lockstep_router.discovery.report import Report, WorkerAddress

_DEADLINE_S = 5.0

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class Dns:
    """Resolves names periodically.

    Args:
        names: the names, each as `host:port`.
        interval_s: seconds between two resolutions, with 10 % jitter so that replicas do not ask at the same time.
        look_up: returns the addresses of (host, port), or raises OSError.
    """

    def __init__(self, names: Sequence[str], interval_s: float, look_up: LookUp | None = None) -> None:
        self._names = names
        self._interval_s = interval_s
        self._look_up = look_up or _resolve_with_system
        self._known: dict[str, frozenset[WorkerAddress]] = {}

    async def run(self, report: Report) -> None:
        """Resolve until cancelled."""
        while True:
            workers, problem = await self.resolve()
            if problem:
                report.fail(problem)
                if self._known:  # other names have been resolved, now or before
                    report.update_partially(workers)
            else:
                report.succeed()
                report.update(workers)
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))

    async def resolve(self) -> tuple[frozenset[WorkerAddress], str]:
        """All addresses of the names, and a problem if any. A name without an answer keeps its last addresses."""
        answers = await asyncio.gather(*(self._resolve(name) for name in self._names), return_exceptions=True)
        problem = ""
        for name, answer in zip(self._names, answers, strict=True):
            if isinstance(answer, BaseException):
                problem = f"{name}: {_describe(answer)}"
            else:
                self._known[name] = answer
        return frozenset().union(*self._known.values()), problem

    async def _resolve(self, name: str) -> frozenset[WorkerAddress]:
        host, port = split_host_port(name)
        async with asyncio.timeout(_DEADLINE_S):
            addresses = await self._look_up(host, port)
        return frozenset(WorkerAddress(join_host_port(address, port)) for address in addresses)


async def _resolve_with_system(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[0]) for *_, address in entries]


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error)
