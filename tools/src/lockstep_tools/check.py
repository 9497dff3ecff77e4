"""`lockstep check`: does a served system work, from where a client stands? What `helm test` runs.

A chat, a stream, and the gRPC health of every worker behind a name. Each check is made again until it holds or the time
is over, so it can be started together with the system.
"""

import argparse
import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_tools import endpoint
from lockstep_tools.arguments import add_endpoint, real
from lockstep_tools.endpoint import Endpoint, EndpointError, first_model
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.history import StreamRequest, violations
from lockstep_tools.loadgen import ROUTER_HEADER, record

DESCRIPTION = """\
Check a served system: a chat, a stream, and with --grpc the health of every worker that the name resolves to.
Prints a line for each check. Exit code 0 when all hold within --timeout, else 1."""

EXAMPLES = """\
  lockstep check
  lockstep check --url http://lockstep-router:8000/v1 --grpc lockstep-workers:9000"""

HEALTH_SERVICES = ("", "lockstep.v1.Worker")
"""What a ready worker says of itself: it lives, and it takes requests."""

_TOKENS = 16
_PROMPT = "It was a dark night, and"
_AGAIN_S = 1.0
_RPC_TIMEOUT_S = 5.0


class CheckError(Exception):
    """A check that does not hold, in words."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_endpoint(parser)
    parser.add_argument("--grpc", metavar="HOST:PORT", help="the workers' gRPC: every address of the name is asked")
    parser.add_argument(
        "--timeout", type=real(1, 3600), default=120.0, metavar="S", help="for all of it (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the checks one after the other."""
    target = endpoint.from_arguments(arguments)
    checks: dict[str, Callable[[], Awaitable[str]]] = {
        "chat": lambda: _chat(target, arguments.model),
        "stream": lambda: _stream(target, arguments.model),
    }
    if arguments.grpc:
        address = _host_and_port(arguments.grpc)
        checks["workers"] = lambda: _workers(*address)
    return asyncio.run(_check_all(checks, arguments.timeout))


async def _check_all(checks: dict[str, Callable[[], Awaitable[str]]], timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    well = True
    for name, check in checks.items():
        holds, sentence = await _insist(check, deadline_s)
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {sentence}", flush=True)
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
        said, tokens = choice["message"]["content"], answer.json()["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
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


async def _workers(host: str, port: int) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    for address in addresses:
        await _healthy(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    return f"{len(addresses)} behind {host}, each serving ({', '.join(addresses)})"


async def _healthy(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in HEALTH_SERVICES:
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=_RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise CheckError(f"{address} does not answer: {error.code().name}, {error.details()}") from None
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                raise CheckError(f"{address} says {name} of {service or 'itself'}")


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise CommandError(f"--grpc {text}: not an address such as lockstep-workers:9000", UNUSABLE)
    return host.strip("[]"), int(port)
