"""Worker addresses from DNS: each address of each name in `workers_dns` is a worker.

A resolver does not distinguish a name without addresses from a server that does not answer. Both count as no answer,
and the addresses that the name had before are kept.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Thread

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
        self._look_up = look_up or SystemResolver()
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


class SystemResolver:
    """Asks the system's resolver in threads that nothing waits for, one for each name. The loop's own look-ups would
    keep the process from ending for as long as the resolver takes, which without a DNS server is minutes.
    """

    def __init__(self) -> None:
        self._looking: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        """What threads look up now. Whoever asks meanwhile gets the same answer."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a name.

        Raises:
            OSError: there is no answer, or no address.
        """
        looking = self._looking.get((host, port))
        if looking is None:
            looking = asyncio.get_running_loop().create_future()
            Thread(target=self._look_up, args=(host, port, looking), name="dns", daemon=True).start()
            self._looking[host, port] = looking
            looking.add_done_callback(lambda _: self._looking.pop((host, port)))
        return await asyncio.shield(looking)

    @staticmethod
    def _look_up(host: str, port: int, looking: "asyncio.Future[list[str]]") -> None:
        loop = looking.get_loop()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            except Exception as error:  # as of a look-up that is awaited
                loop.call_soon_threadsafe(looking.set_exception, error)
            else:
                loop.call_soon_threadsafe(looking.set_result, [str(address[0]) for *_, address in entries])


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error)
