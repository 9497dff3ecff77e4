"""`lockstep check`, which `helm test` runs: checks as a client that a served system works.

A chat, a stream, the readiness of every worker behind a name, and the state server. Each check is made again until it
holds or the time is over, so it can be started together with the system.
"""

import argparse
import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable

import httpx
from lockstep_common.address import check_host

from lockstep_tools.arguments import add_endpoint, real
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.load import endpoint
from lockstep_tools.load.endpoint import Endpoint, EndpointError, first_model
from lockstep_tools.load.generator import ROUTER_HEADER, record
from lockstep_tools.load.history import StreamRequest, violations

DESCRIPTION = """\
Check a served system: a chat, a stream, with --workers the readiness of every worker that the name resolves to, and
with --state that the state server is ready and uses its store. Where its metrics need a certificate and --client-cert
gives none, only that it is ready is checked, and said.
Prints a line for each check. Exit code 0 when all hold within --timeout, else 1."""

EXAMPLES = """\
  lockstep check
  lockstep check --url http://lockstep-router:8000/v1 --workers http://lockstep-workers:9001"""

_TOKENS = 16
_PROMPT = "It was a dark night, and"
_AGAIN_S = 1.0
_READYZ_TIMEOUT_S = 5.0
_MAX_REASON_CHARS = 200
_PORTS = {"http": 80, "https": 443}
_OK = 200
_FORBIDDEN = 403
_BREAKER_OPEN = re.compile(r"^lockstep_state_breaker_open 1", re.MULTILINE)


class CheckError(Exception):
    """A check failed; the message says why."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_endpoint(parser)
    parser.add_argument(
        "--workers", metavar="URL", help="of the workers' management ports: every address of its host is asked"
    )
    parser.add_argument("--workers-name", metavar="NAME", help="in the workers' certificates (default: the URL's host)")
    parser.add_argument("--state", metavar="URL", help="of the state server's management port")
    parser.add_argument(
        "--state-name", metavar="NAME", help="in the state server's certificate (default: the URL's host)"
    )
    parser.add_argument(
        "--timeout",
        type=real(1, 3600),
        default=120.0,
        metavar="S",
        help="time limit of all checks (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks one after the other."""
    target = endpoint.from_arguments(arguments)
    checks: dict[str, Callable[[], Awaitable[str]]] = {
        "chat": lambda: _chat(target, arguments.model),
        "stream": lambda: _stream(target, arguments.model),
    }
    if arguments.workers:
        workers = _management_url("--workers", arguments.workers)
        checks["workers"] = lambda: _workers(target, workers, arguments.workers_name)
    if arguments.state:
        state = _management_url("--state", arguments.state)
        checks["state"] = lambda: _state(target, state, arguments.state_name)
    return asyncio.run(_check_all(checks, arguments.timeout))


async def _check_all(checks: dict[str, Callable[[], Awaitable[str]]], timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    well = True
    for name, check in checks.items():
        holds, sentence = await _insist(check, deadline_s)
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {harmless(sentence)}", flush=True)
        well = well and holds
    return 0 if well else FAILED


async def _insist(check: Callable[[], Awaitable[str]], deadline_s: float) -> tuple[bool, str]:
    """The outcome of a check that may fail for as long as there is time."""
    while True:
        try:
            async with asyncio.timeout(max(_AGAIN_S, deadline_s - time.monotonic())):
                return True, await check()
        except (CheckError, EndpointError, httpx.HTTPError, OSError) as error:
            sentence = str(error) or type(error).__name__
        if time.monotonic() + _AGAIN_S > deadline_s:
            return False, sentence
        await asyncio.sleep(_AGAIN_S)


async def _chat(target: Endpoint, model: str | None) -> str:
    began_s = time.monotonic()
    async with target.client() as client:
        body = {
            "model": model or await first_model(client),
            "messages": [{"role": "user", "content": _PROMPT}],
            "max_tokens": _TOKENS,
            "temperature": 0,
        }
        answer = await client.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise CheckError(f"status {answer.status_code}")
    try:
        (choice,) = answer.json()["choices"]
        # A reasoning model may spend all tokens before its answer begins.
        said = choice["message"].get("content") or choice["message"].get("reasoning_content")
        tokens = answer.json()["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckError("the answer is no chat completion") from None
    if not said or not 0 < tokens <= _TOKENS:
        raise CheckError(f"{len(said or '')} characters in {tokens} tokens")
    by = answer.headers.get(ROUTER_HEADER, "an unnamed server")
    return f"{tokens} tokens of {body['model']} from {by} in {time.monotonic() - began_s:.2f} s"


async def _stream(target: Endpoint, model: str | None) -> str:
    async with target.client() as client:
        body = {
            "model": model or await first_model(client),
            "prompt": _PROMPT,
            "max_tokens": _TOKENS,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        history = await record(client, StreamRequest("/completions", body))
    found = violations(history)
    if found:
        raise CheckError("; ".join(found))
    if not history.spoken:
        raise CheckError("the stream said nothing")
    first_ms = 1e3 * (history.first_token_s or 0.0)
    return f"{history.tokens} tokens in order, one end, the first after {first_ms:.0f} ms"


async def _workers(target: Endpoint, url: httpx.URL, name: str | None = None) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(url.host, _port(url), type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    async with _management(target) as client:
        for address in addresses:
            await _ready(client, url, address, name)
    return f"{len(addresses)} behind {url.host}, each serving ({', '.join(addresses)})"


async def _state(target: Endpoint, url: httpx.URL, name: str | None = None) -> str:
    async with _management(target) as client:
        await _ready(client, url, url.host, name)
        # A pod whose Redis is away is ready: all state servers have the same one.
        answer = await client.get(url.copy_with(path="/metrics"), extensions=_named(url, name))
    if answer.status_code == _FORBIDDEN:
        # Whoever shows no certificate learns only whether it is ready.
        return f"{url.host} ready; whether it uses its store is not known: that needs --client-cert"
    if answer.status_code != _OK:
        raise CheckError(f"{url.host} answers /metrics with status {answer.status_code}")
    if _BREAKER_OPEN.search(answer.text):
        raise CheckError(f"{url.host} lives, but its Redis does not answer")
    return f"{url.host} serving"


def _management(target: Endpoint) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=target.tls or True, timeout=_READYZ_TIMEOUT_S, trust_env=False)


def _named(url: httpx.URL, name: str | None) -> dict[str, str]:
    """Have the certificate checked for a name: it is issued for one, not for the address that is asked."""
    return {"sni_hostname": name or url.host}


async def _ready(client: httpx.AsyncClient, url: httpx.URL, address: str, name: str | None) -> None:
    try:
        answer = await client.get(url.copy_with(host=address, path="/readyz"), extensions=_named(url, name))
    except httpx.HTTPError as error:
        raise CheckError(f"{address}:{_port(url)} does not answer: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise CheckError(f"{address}:{_port(url)} is not ready: {answer.text[:_MAX_REASON_CHARS]}")


def _port(url: httpx.URL) -> int:
    """The port of a URL; httpx drops one that is the scheme's own."""
    return url.port or _PORTS[url.scheme]


def _management_url(option: str, text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
        has_host = bool(check_host(url.raw_host.decode()) and url.host)
    except (httpx.InvalidURL, ValueError):
        has_host = False
    if not has_host or url.scheme not in _PORTS:
        raise CommandError(f"{option} {text}: not a URL such as http://lockstep-workers:9001", UNUSABLE)
    return url
