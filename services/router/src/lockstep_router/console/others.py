"""The other routers: each is asked on its management port, while a page of the console is open here.

Their addresses are those of DNS names. A router answers with its name, version, state and counts. No request, text,
tenant or key is sent in either direction. Every question has a deadline and a limit for its answer. No page waits for
it: pages show the last answer. A router that does not answer is shown as such for as long as DNS has its address.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep_common.address import split_host_port
from lockstep_common.tls import Certificates, client_context

from lockstep_router.discovery.dns import Dns
from lockstep_router.settings import RouterSettings

if TYPE_CHECKING:
    from lockstep_router.console.router_facts import RouterFacts

MAX_OTHERS = 64
"""Routers that are asked and shown, in the order of their addresses."""
_EVERY_S = 1.0


@dataclass(slots=True)
class _Other:
    """What is known of the router at an address."""

    facts: "RouterFacts | None" = None
    """Its last answer; None: there was none."""
    heard_at: float = 0.0
    problem: str = ""
    """Why it does not answer now; empty: it does."""


class OtherRouters:
    """The routers at the addresses of `console_routers`, this one among them.

    Args:
        settings: the router's settings.
        certificates: for HTTPS with a certificate of both sides; None: plain HTTP.
        clock: gives seconds.
    """

    def __init__(
        self,
        settings: RouterSettings,
        certificates: Certificates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = {name: Dns([name], _EVERY_S) for name in settings.console_routers}
        if self._names:  # at the start, since loading aiohttp would hold up streams
            from lockstep_router.console.router_facts import ask  # noqa: PLC0415

            self._ask_routers = ask
        self._own_id = settings.router_id
        self._certificates = certificates
        self._clock = clock
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._problem = ""
        self._others: dict[str, _Other] = {}
        """By address."""

    def body(self) -> dict[str, Any]:
        """What is known of them, as JSON types; if that is older than a second, they are asked meanwhile."""
        now = self._clock()
        if self._names and now - self._asked_at >= _EVERY_S and (self._asking is None or self._asking.done()):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        rows = [
            {"address": address, "problem": other.problem}
            | {"heard_s": None if other.facts is None else round(now - other.heard_at, 1)}
            | {"facts": None if other.facts is None else other.facts.model_dump()}
            for address, other in self._others.items()
            if other.facts is None or other.facts.id != self._own_id
        ]
        return {"problem": self._problem, "rows": rows}

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        """Ask all of them, a few at a time."""
        addresses: dict[str, str] = {}
        problems = []
        for name, dns in self._names.items():
            found, problem = await dns.resolve()
            addresses |= {each.target: split_host_port(name)[0] for each in found}
            problems += [problem] if problem else []
        self._problem = "; ".join(problems)
        asked = sorted(addresses)[:MAX_OTHERS]
        self._others = {address: self._others.get(address, _Other()) for address in asked}
        tls = None if self._certificates is None else client_context(self._certificates.current())
        await self._ask_routers({address: addresses[address] for address in asked}, tls, self._note_answer)

    def _note_answer(self, address: str, answer: "RouterFacts | str") -> None:
        """Keep what the router at an address answers, or why it does not answer."""
        other = self._others[address]
        if isinstance(answer, str):
            other.problem = answer
        else:
            other.facts, other.heard_at, other.problem = answer, self._clock(), ""
