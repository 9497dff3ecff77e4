"""Where spans are found: the services' own memory, or a Jaeger."""

import json
import re
import time
from collections.abc import Sequence
from urllib.parse import quote, urlencode

import httpx
from lockstep_common.tracing import names

from lockstep_tools.debug.process import PartError, Process, fetch
from lockstep_tools.failure import CommandError
from lockstep_tools.trace.spans import Span, of_jaeger, of_service

_TRACE_ID = re.compile("[0-9a-f]{32}")
_LOOKBACK_S = 7 * 86_400
_MAX_TRACES = 8
"""Of one request's id, the newest: clients choose it, and may choose the same one for all of their requests."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What readers of spans raise for what is none."""


def is_trace_id(text: str) -> bool:
    """Whether it names a trace, and not a request."""
    return _TRACE_ID.fullmatch(text) is not None


def from_services(client: httpx.Client, processes: Sequence[Process], wanted: str) -> tuple[list[Span], list[str]]:
    """The spans that processes have kept, and remarks on those that cannot tell.

    The router knows requests and streams by their ids; the workers' spans are found by the trace that it names.
    """
    remarks: dict[str, str] = {}
    found = _asked(client, processes, wanted, remarks)
    begun: dict[str, int] = {}
    for span in found:
        begun[span.trace_id] = max(begun.get(span.trace_id, 0), span.begin_ns)
    traces = sorted(begun, key=lambda each: begun[each])[-_MAX_TRACES:]
    if len(begun) > len(traces):
        remarks[""] = f"{len(begun)} traces have this id; these are the newest {len(traces)}"
    for trace_id in traces:
        if trace_id != wanted:
            found += _asked(client, processes, trace_id, remarks)
    chosen = {(span.trace_id, span.span_id): span for span in found if span.trace_id in traces}
    return list(chosen.values()), list(remarks.values())


def from_jaeger(client: httpx.Client, url: str, wanted: str) -> list[Span]:
    """The spans that a Jaeger has, by its HTTP API.

    Raises:
        CommandError: it does not answer as a Jaeger.
    """
    # Some proxies, such as ingress-nginx, give requests ids that look like a trace's.
    if is_trace_id(wanted) and (found := _of_jaeger(client, f"{url}/api/traces/{wanted}", url)):
        return found
    now_s = time.time()
    for name in (names.REQUEST_ID, names.STREAM):
        query = {
            "service": "lockstep-router",
            "tags": json.dumps({name: wanted}),
            "start": int((now_s - _LOOKBACK_S) * 1e6),
            "end": int(now_s * 1e6),
            "limit": 5,
        }
        if found := _of_jaeger(client, f"{url}/api/traces?{urlencode(query)}", url):
            return found
    return []


def _of_jaeger(client: httpx.Client, page: str, url: str) -> list[Span]:
    try:
        return of_jaeger(json.loads(fetch(client, page)) | {})
    except PartError as error:
        raise CommandError(f"--jaeger {url}: {error}") from None
    except MALFORMED:
        raise CommandError(f"--jaeger {url}: its answer is not that of Jaeger's HTTP API") from None


def _asked(client: httpx.Client, processes: Sequence[Process], wanted: str, remarks: dict[str, str]) -> list[Span]:
    found: list[Span] = []
    for process in processes:
        if process.name in remarks:
            continue
        try:
            body = json.loads(fetch(client, f"{process.url}/debug/trace/{quote(wanted, safe='')}"))
            # A router with several processes gives the answer of each.
            parts = [each for each in body.get("processes", {"": body}).values() if each is not None]
            if not any(part["tracing"] for part in parts):
                remarks[process.name] = f"{process.name} makes no traces"
            for part in parts:
                found += of_service(part)
        except PartError as error:
            remarks[process.name] = f"{process.name}: {error}"
        except MALFORMED:
            remarks[process.name] = f"{process.name}: its answer is not of this version"
    return found
