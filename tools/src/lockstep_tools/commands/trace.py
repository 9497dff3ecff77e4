"""`lockstep trace`: draws a request's timeline over router, workers and ranks."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx

from lockstep_tools.arguments import DEFAULT_MANAGEMENT_URL, add_tls
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import Release
from lockstep_tools.console import output
from lockstep_tools.debug import cluster, local
from lockstep_tools.debug.process import PART_S, Process
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.load.endpoint import checked_url, root_url, tls_context
from lockstep_tools.logs.lines import request_of
from lockstep_tools.output_file import new_file
from lockstep_tools.trace.drawing import lines, page
from lockstep_tools.trace.files import from_file
from lockstep_tools.trace.sources import from_jaeger, from_services
from lockstep_tools.trace.spans import Span

DESCRIPTION = """\
Draw where a request's time went: router, attempts on workers, queue, prefill, decode, and each rank. REQUEST is the
X-Request-ID of the answer, the id of a resumable stream, or that of a trace. The spans come from the memory of the
running services, which keep the newest ones of the traces that are kept, from a Jaeger, or from a file: OTLP in JSON, a
message a line, as a collector's file exporter writes it, or the JSON that a Jaeger gives. Traces have to be on: with a
collector in the settings, with `otlp_endpoint: memory`, the chart's default, or with OTEL_TRACES_EXPORTER=memory in the
services' environment. Which are kept: those that failed, were slow or moved to another worker, and a part of the others
(trace_ratio): a tenth with a collector and in the chart, else all."""

EXAMPLES = """\
  lockstep trace 4f0c2a9b1d7e
  lockstep trace 4f0c2a9b1d7e --release lockstep -n serving --html trace.html
  lockstep trace 0af7651916cd43dd8448eb211c80319c --jaeger http://127.0.0.1:16686
  lockstep trace 4f0c2a9b1d7e --file traces.jsonl"""

_MAX_ID_CHARS = 64


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="X-Request-ID or id of an answer, the id of a stream, or the 32 digits of a trace",
    )
    parser.add_argument(
        "--url", default=DEFAULT_MANAGEMENT_URL, help="the router's management port (default: %(default)s)"
    )
    parser.add_argument("--release", help="a Helm release, by kubectl, in place of --url")
    parser.add_argument("-n", "--namespace", default="default", help="of the release (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--jaeger", metavar="URL", help="take the spans from a Jaeger, in place of the services")
    source.add_argument("--file", type=Path, metavar="FILE", help="take the spans from a file of OTLP or Jaeger's JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    add_tls(parser)


def run(arguments: argparse.Namespace) -> int:
    """Find the spans, draw them, and write the page."""
    wanted = request_of(arguments.request)
    if not 0 < len(wanted) <= _MAX_ID_CHARS or not wanted.isascii() or not wanted.isprintable():
        raise CommandError(f"REQUEST must be an id of 1 to {_MAX_ID_CHARS} characters", UNUSABLE)
    with new_file(arguments.html, "--html") if arguments.html else nullcontext() as write:
        spans = _draw(arguments, wanted)
        if write is not None:
            write(page(spans, wanted).encode(errors="replace"))
    if arguments.html:
        output().print(f"page: {arguments.html}", markup=False)
    return 0


def _draw(arguments: argparse.Namespace, wanted: str) -> list[Span]:
    """Draw the spans on the terminal, and return them."""
    spans, remarks = _found(arguments, wanted)
    console = output()
    for remark in remarks:
        console.print(f"not complete: {harmless(remark)}", markup=False)
    if not spans:
        raise CommandError(
            f"no spans of {wanted} in {arguments.file}"
            if arguments.file
            else f"no spans of {wanted}: its trace was not kept, or is too old; `lockstep trace --help` says which are "
            "kept"
        )
    for line in lines(spans, console.width):
        console.print(line, soft_wrap=True)
    return spans


def _found(arguments: argparse.Namespace, wanted: str) -> tuple[list[Span], list[str]]:
    """The spans, and remarks on what cannot be asked for them."""
    if arguments.file:
        return from_file(arguments.file, wanted), []
    context = tls_context(arguments)
    if context is not None and arguments.release:
        context.check_hostname = False  # kubectl's tunnel ends at the pod; the certificate is not for this address
    with httpx.Client(verify=context or True, timeout=PART_S, trust_env=False) as client:
        if arguments.jaeger:
            return from_jaeger(client, checked_url(arguments.jaeger).rstrip("/"), wanted), []
        with _processes(arguments, client) as (processes, unreached):
            spans, remarks = from_services(client, processes, wanted)
        return spans, remarks + [f"{name}: {reason}" for name, reason in unreached.items()]


@contextmanager
def _processes(arguments: argparse.Namespace, client: httpx.Client) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """The system's processes, and why others cannot be reached."""
    if arguments.release:
        with cluster.forwarded(Release(arguments.release, Kubectl(arguments.namespace))) as found:
            yield found
    else:
        yield local.from_router(client, root_url(checked_url(arguments.url))), {}
