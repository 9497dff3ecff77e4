"""The facts about a router, asked for on its management port over HTTP.

Import this module only where it is used: aiohttp takes 0.2 s and 15 MiB.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Literal

from aiohttp import ClientError, ClientOSError, ClientPayloadError, ClientResponse, ClientSession, ClientSSLError
from pydantic import BaseModel, Field, ValidationError

from lockstep_router.console.files import ROUTER

DEADLINE_S = 3.0
"""For the answer of one router, connecting and TLS included. One with `processes` waits up to 2 s for each of them."""
MAX_ANSWER_BYTES = 16 << 10
_AT_A_TIME = 8

_Count = Annotated[int, Field(ge=0, le=1 << 53)]


class RouterFacts(BaseModel):
    """The facts about a router; anything else in its answer is dropped."""

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


async def ask(
    addresses: Mapping[str, str], tls: ssl.SSLContext | None, on_answer: Callable[[str, RouterFacts | str], None]
) -> None:
    """Ask routers, a few at a time.

    Args:
        addresses: of each router's management port, and the name that its certificate has to be for.
        tls: for HTTPS; None: plain HTTP.
        on_answer: is called once for each address, with the facts about its router or why it does not answer.
    """
    turn = asyncio.Semaphore(_AT_A_TIME)

    async def ask_one(address: str, name: str) -> None:
        async with turn:
            on_answer(address, await _answer(session, tls, address, name))

    async with ClientSession(auto_decompress=False) as session:
        await asyncio.gather(*(ask_one(*each) for each in addresses.items()))


async def _answer(session: ClientSession, tls: ssl.SSLContext | None, address: str, name: str) -> RouterFacts | str:
    """The facts about the router at an address, or why it does not answer."""
    url = f"{'https' if tls else 'http'}://{address}{ROUTER}"
    server_hostname = name if tls else None
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            session.get(url, ssl=tls or True, server_hostname=server_hostname, allow_redirects=False) as answer,
        ):
            return await _facts(answer)
    except TimeoutError:
        return "no answer in time"
    except ClientSSLError as error:
        cause = error.__cause__
        reason = cause.reason if isinstance(cause, ssl.SSLError) else ""
        return f"TLS: {reason or 'the handshake failed'}"
    except ClientOSError as error:
        return os.strerror(error.errno) if error.errno else "no connection"
    except (ClientError, ValidationError):
        return "its answer is none of a router"


async def _facts(answer: ClientResponse) -> RouterFacts:
    """The facts in an answer.

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
