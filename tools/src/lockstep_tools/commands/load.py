"""`lockstep load`: steady streams whose histories go to stdout, one line of JSON each; what runs in a load pod.

First every request runs alone, and later streams are compared with these. Then the clients stream until a signal or the
time limit. With --management-url the routers' status is polled meanwhile, through a new connection each time, so that
every router is asked.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx
from lockstep_common.lifecycle import stop_event

from lockstep_tools.arguments import add_endpoint, integer, real
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.load import endpoint, logbook
from lockstep_tools.load.comparison import Comparison, run_undisturbed
from lockstep_tools.load.endpoint import Endpoint, EndpointError, checked_url, first_model
from lockstep_tools.load.generator import Traffic
from lockstep_tools.load.history import History
from lockstep_tools.load.mix import mixed_requests, with_sessions
from lockstep_tools.load.report import Tally

DESCRIPTION = """\
Put an endpoint under steady load and write the history of every stream as a line of JSON: positions, times,
fingerprints of the text, the router that served it; no word of any prompt or answer. Connections that cannot be made
are tried again twice, as the official client does, and counted. Exit code 1 when a stream failed or differed
from the undisturbed one, 2 when no server answers."""

EXAMPLES = """\
  lockstep load --clients 8 --seconds 60
  lockstep load --url http://lockstep-router:8000/v1 --until-signal > histories.jsonl
  lockstep load --management-url http://lockstep-router-management:8001 …"""

_CONNECT_TIMEOUT_S = 2.0
_CONNECT_RETRIES = 2
_POLL_S = 0.25
_STATUS_TIMEOUT_S = 1.0
_Result = TypeVar("_Result")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_endpoint(parser)
    parser.add_argument("--management-url", help="of the routers: watch what they report of their workers")
    parser.add_argument("--clients", type=integer(1), default=8, metavar="N", help="streams at a time (default: 8)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=real(0, 1e6), default=30.0, metavar="S", help="duration of the load (default: 30)"
    )
    length.add_argument("--until-signal", action="store_true", help="until SIGTERM or Ctrl-C; running streams end well")
    parser.add_argument(
        "--resume", action="store_true", help="streams survive routers that die, as those of lockstep-client do"
    )
    parser.add_argument(
        "--silence-limit",
        type=real(1, 600),
        default=30.0,
        metavar="S",
        help="silence after which a stream has failed (default: 30)",
    )
    parser.add_argument(
        "--wait", type=real(0, 3600), default=60.0, metavar="S", help="wait for a server that answers (default: 60)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the load; its lines go to stdout as they come."""
    target = from_arguments(arguments)
    watched = arguments.management_url and checked_url(arguments.management_url, "--management-url")
    try:
        return asyncio.run(_load(arguments, target, watched))
    except EndpointError as error:
        raise CommandError(error.message, UNUSABLE) from None


def from_arguments(arguments: argparse.Namespace) -> Endpoint:
    """The endpoint, with the retries of the official client."""
    given = endpoint.from_arguments(arguments)
    return Endpoint(
        given.url,
        given.api_key,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        connect_retries=_CONNECT_RETRIES,
        silence_limit_s=arguments.silence_limit,
        resumes=arguments.resume,
        tls=given.tls,
    )


async def _load(arguments: argparse.Namespace, target: Endpoint, watched: str | None) -> int:
    stop = stop_event()
    model = await _unless(stop, _await_model(target, arguments.wait, arguments.model))
    requests = mixed_requests(model)
    offset_s = logbook.wall_offset_s()
    undisturbed = await _unless(stop, run_undisturbed(target, requests))
    for history in undisturbed:
        _print(logbook.to_line(logbook.UNDISTURBED, history, offset_s))

    comparison, tally = Comparison(), Tally()
    connect_failures = 0

    def ended(history: History) -> None:
        nonlocal connect_failures
        comparison.add(history, undisturbed)
        tally.add(history, require_ids=True)
        connect_failures += history.connect_failures
        _print(logbook.to_line(logbook.STREAM, history, offset_s))

    async with (
        _watching_status(watched, target),
        Traffic(target, with_sessions(requests), clients=arguments.clients, on_end=ended, keeps=False) as traffic,
    ):
        await _first(stop.wait(), traffic.ended(), within_s=None if arguments.until_signal else arguments.seconds)
    return _sum_up(comparison, tally, connect_failures)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of what precedes the load.

    Raises:
        CommandError: a signal has come first.
    """
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CommandError("stopped before the load began")
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def _first(*works: Coroutine[Any, Any, object], within_s: float | None) -> None:
    """Wait until one of these has ended, or for a time."""
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _await_model(target: Endpoint, wait_s: float, given: str | None) -> str:
    """The given model, or the first that the server lists, once it answers.

    Raises:
        EndpointError: it does not, in time.
    """
    deadline_s = time.monotonic() + wait_s
    async with target.client() as client:
        while True:
            try:
                listed = await first_model(client)
            except EndpointError as error:
                is_over = time.monotonic() > deadline_s
                has_answered = not isinstance(error.__cause__, httpx.HTTPError)
                if given and has_answered and (is_over or (error.status or 500) < 500):
                    return given  # not every server lists its models
                if is_over:
                    raise
            else:
                return given or listed
            await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def _watching_status(url: str | None, target: Endpoint) -> AsyncIterator[None]:
    if url is None:
        yield
        return
    task = asyncio.create_task(_watch_status(url, target))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch_status(root: str, target: Endpoint) -> None:
    """Write a line whenever what a router reports of its workers changes."""
    # Routers show one certificate at both ports, and the address of this one need not be in it.
    extensions = {"sni_hostname": httpx.URL(target.url).host}
    reported: dict[str, Any] = {}
    fresh = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        verify=target.tls or True, timeout=_STATUS_TIMEOUT_S, limits=fresh, trust_env=False
    ) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                answer = await client.get(f"{root}/status", extensions=extensions)
                body = answer.raise_for_status().json()
                router, workers = body["router"]["id"], _lives(body["workers"])
                if reported.get(router) != workers:
                    reported[router] = workers
                    entry = {"kind": logbook.STATUS, "at": round(time.time(), 3), "router": router, "workers": workers}
                    _print(json.dumps(entry, separators=(",", ":")))
            await asyncio.sleep(_POLL_S)


def _lives(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state and the life of each worker."""
    return {
        worker["id"] or worker["target"]: [worker["state"], worker["incarnation"], worker["epoch"]]
        for worker in workers
    }


def _sum_up(comparison: Comparison, tally: Tally, connect_failures: int) -> int:
    report = tally.report() if comparison.streams else None
    entry = {
        "kind": logbook.SUMMARY,
        "holds": comparison.holds,
        "connect_failures": connect_failures,
        "comparison": comparison.as_json(),
        "report": report.as_json() if report is not None else None,
    }
    _print(json.dumps(entry, separators=(",", ":")))
    return 0 if comparison.holds else FAILED


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
