"""The other routers: each is asked on its management port, while somebody looks at the console here.

Their addresses are those of DNS names. A router tells its name, version, state and counts: no request, text, tenant or
key crosses, and none is sent along. Every question has a deadline and a largest answer, and nobody waits for it: what
is shown was told before. A router that does not answer is shown as such for as long as DNS has its address.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

from aiohttp import ClientError, ClientOSError, ClientPayloadError, ClientResponse, ClientSession, ClientSSLError
from lockstep_common.address import split_host_port
from lockstep_common.tls import Certificates, client_context
from pydantic import BaseModel, Field, ValidationError

from lockstep_router.console.files import ROUTER
from lockstep_router.discovery.dns import Dns
from lockstep_router.settings import RouterSettings

MAX_OTHERS = 64
"""Routers that are asked and shown, in the order of their addresses."""
DEADLINE_S = 1.5
"""For the answer of one router, connecting and TLS included."""
MAX_ANSWER_BYTES = 16 << 10
_EVERY_S = 1.0
_AT_A_TIME = 8

_Count = Annotated[int, Field(ge=0, le=1 << 53)]


class RouterFacts(BaseModel):
    """What a router tells of itself; anything else in its answer is dropped."""

    id: str = Field(min_length=1, max_length=128)
    version: str = Field(max_length=64)
    state: Literal["serving", "leaving", "draining"]
    unready: str = Field(max_length=256)
    uptime_s: float = Field(ge=0, allow_inf_nan=False)
    requests: _Count
    streams: _Count
    max_streams: _Count
    failovers: _Count
    sessions: _Count


@dataclass(slots=True)
class _Other:
    """What is known of the router at an address."""

    facts: RouterFacts | None = None
    """As it was told last; None: it never was."""
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
        turn = asyncio.Semaphore(_AT_A_TIME)
        async with ClientSession(auto_decompress=False) as session:
            await asyncio.gather(*(self._ask_one(session, tls, turn, each, addresses[each]) for each in asked))

    async def _ask_one(
        self, session: ClientSession, tls: ssl.SSLContext | None, turn: asyncio.Semaphore, address: str, name: str
    ) -> None:
        """Ask the router at an address, whose certificate has to be for this name."""
        other = self._others[address]
        url = f"{'https' if tls else 'http'}://{address}{ROUTER}"
        async with turn:
            try:
                async with (
                    asyncio.timeout(DEADLINE_S),
                    session.get(
                        url, ssl=tls or True, server_hostname=name if tls else None, allow_redirects=False
                    ) as answer,
                ):
                    other.facts, other.heard_at, other.problem = await _facts(answer), self._clock(), ""
            except TimeoutError:
                other.problem = "no answer in time"
            except ClientSSLError as error:
                cause = error.__cause__
                reason = cause.reason if isinstance(cause, ssl.SSLError) else ""
                other.problem = f"TLS: {reason or 'the handshake failed'}"
            except ClientOSError as error:
                other.problem = os.strerror(error.errno) if error.errno else "no connection"
            except (ClientError, ValidationError):
                other.problem = "its answer is none of a router"


async def _facts(answer: ClientResponse) -> RouterFacts:
    """What a router tells.

    Raises:
        ClientError: the answer is an error, too large, or cut short.
        ValidationError: it says something else.
    """
    if answer.status != HTTPStatus.OK:
        raise ClientPayloadError("an error")
    body = b""
    async for part in answer.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise ClientPayloadError("too large")
    return RouterFacts.model_validate_json(body)
