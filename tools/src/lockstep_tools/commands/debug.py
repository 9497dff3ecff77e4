"""`lockstep debug`: collects a bundle of a system that hangs or crawls, and names a rank that is stopped or stuck."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from lockstep_tools import __version__
from lockstep_tools.arguments import DEFAULT_MANAGEMENT_URL, add_tls, integer, real
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import Release
from lockstep_tools.debug import cluster, local
from lockstep_tools.debug.bundle import Bundle
from lockstep_tools.debug.findings import Finding, of_log, of_worker
from lockstep_tools.debug.process import PART_S, PartError, Process, RefusedError, fetch
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.load.endpoint import checked_url, root_url, tls_context

DESCRIPTION = """\
Collect what explains a request or a worker that hangs or crawls: status, stacks of routers, workers and every rank
(twice, so that a rank without progress is seen), newest log lines, metrics, settings without secrets, versions. Of a
`lockstep serve` on this machine, or of a release in a cluster. Writes one tar.gz; it has no prompts, outputs or keys.
Parts that fail are named in it. Prints what is unusual. A hung rank is killed after its deadline (5 s for decoding
steps): then its stack is in the log."""

EXAMPLES = """\
  lockstep debug
  lockstep debug --pid $(pgrep -of 'lockstep: serve')
  lockstep debug --release lockstep -n serving --output /tmp/hang.tar.gz"""

_PARTS = {
    "status.json": "/status",
    "metrics.txt": "/metrics",
    "readiness.json": "/readyz",
    "settings.json": "/debug/settings",
    "log.jsonl": "/debug/logs",
}
_STACKS = "/debug/stacks"
_MAX_FINDINGS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--url", default=DEFAULT_MANAGEMENT_URL, help="the router's management port (default: %(default)s)"
    )
    parser.add_argument("--pid", type=integer(1, 1 << 22), help="of `lockstep serve`, in place of --url")
    parser.add_argument("--release", help="a Helm release, by kubectl, in place of --url")
    parser.add_argument("-n", "--namespace", default="default", help="of the release (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: lockstep-debug-TIME.tar.gz")
    parser.add_argument(
        "--interval", type=real(0.1, 60), default=1.0, metavar="S", help="between two looks (default: %(default)s)"
    )
    add_tls(parser)


def run(arguments: argparse.Namespace) -> int:
    """Collect a bundle and print its summary."""
    now = datetime.now(UTC)
    path = arguments.output or Path(f"lockstep-debug-{now:%Y%m%d-%H%M%S}.tar.gz")
    context = tls_context(arguments)
    if context is not None and arguments.release:
        context.check_hostname = False  # kubectl's tunnel ends at the pod; the certificate is not for this address
    client = httpx.Client(verify=context or True, timeout=PART_S, trust_env=False)
    with client, _processes(arguments, client) as (processes, unreached):
        try:
            bundle = Bundle(path)
        except OSError as error:
            raise CommandError(f"--output {path}: {error.strerror or error}", UNUSABLE) from None
        with bundle:
            bundle.failed |= {f"pod-{name}": reason for name, reason in unreached.items()}
            if arguments.release:
                _add_cluster(bundle, Kubectl(arguments.namespace))
            findings = _collect(bundle, client, processes, arguments.interval)
            summary = _summary(processes, findings, bundle)
            bundle.conclude(summary, {"made_at": now.isoformat(), "lockstep": __version__})
    print(summary)
    print(f"\nbundle: {path} ({path.stat().st_size / 1024:.0f} KiB)")
    return 0


@contextmanager
def _processes(arguments: argparse.Namespace, client: httpx.Client) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """The system's processes, and why others cannot be reached."""
    if arguments.release and arguments.pid:
        raise CommandError("give --release or --pid", UNUSABLE)
    if arguments.release:
        with cluster.forwarded(Release(arguments.release, Kubectl(arguments.namespace))) as found:
            yield found
    elif arguments.pid:
        yield local.below(client, arguments.pid), {}
    else:
        yield local.from_router(client, root_url(checked_url(arguments.url))), {}


def _collect(bundle: Bundle, client: httpx.Client, processes: Sequence[Process], interval_s: float) -> list[Finding]:
    """Add all parts. The stacks come first and last: between them lies time in which ranks should move."""
    began = time.monotonic()
    bodies: dict[tuple[str, str], bytes | None] = {}
    first = {each.name: _stacks(bundle, client, each, "stacks-1.json") for each in processes}
    for process in processes:
        if first[process.name].is_silent:
            continue  # it does not answer: no more waits
        for part, page in _PARTS.items():
            if part == "status.json" and "engine" in first[process.name].found:
                continue  # a worker's is in the router's, and in its stacks
            bodies[process.name, part] = bundle.add(
                f"{process.name}/{part}", partial(fetch, client, process.url + page)
            )
    time.sleep(max(0.0, began + interval_s - time.monotonic()))
    findings = []
    for process in processes:
        before = first[process.name]
        last = _stacks(bundle, client, process, "stacks-2.json") if before.found else before
        if last.refusal:
            findings.append(Finding(f"{process.name} {last.refusal}"))
        elif last.is_silent:
            state = "" if process.pid is None else local.process_state(process.pid)
            detail = f"; its process {process.pid} is {state or 'gone'}" if process.pid is not None else ""
            findings.append(Finding(f"{process.name} does not answer{detail}"))
        elif "engine" in last.found and "engine" in before.found:
            findings += of_worker(process.name, before.found["engine"], last.found["engine"])
            log = bodies.get((process.name, "log.jsonl")) or b""
            findings += of_log(process.name, log.decode(errors="replace").splitlines())
        silent = [number for number, found in last.found.get("processes", {}).items() if found is None]
        findings += [Finding(f"{process.name}: its process {number} does not answer") for number in silent]
    return findings


@dataclass(frozen=True)
class _Look:
    """What a process says to the question for its stacks."""

    found: dict[str, Any] = field(default_factory=dict)
    """The stacks, of it or of its processes; empty: there are none."""
    refusal: str = ""
    """Why it gives none, although it answers."""

    @property
    def is_silent(self) -> bool:
        """Whether it does not answer."""
        return not (self.found or self.refusal)


def _stacks(bundle: Bundle, client: httpx.Client, process: Process, name: str) -> _Look:
    refusal = ""

    def get() -> bytes:
        nonlocal refusal
        try:
            return fetch(client, process.url + _STACKS)
        except RefusedError as error:
            refusal = str(error)
            raise

    body = bundle.add(f"{process.name}/{name}", get)
    if body is None:
        return _Look(refusal=refusal)
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and found.keys() & {"threads", "processes"}:
        return _Look(found)
    error = found.get("error") if isinstance(found, dict) else None
    return _Look(refusal=f"has no stacks: {error or 'its answer is not of this version'}")


def _add_cluster(bundle: Bundle, kubectl: Kubectl) -> None:
    for name, command in {
        "pods.txt": ("get", "pods", "-o", "wide"),
        "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
        "workloads.txt": ("get", "statefulsets,deployments", "-o", "wide"),
    }.items():
        bundle.add(f"cluster/{name}", partial(_said, kubectl, command))


def _said(kubectl: Kubectl, command: Sequence[str]) -> bytes:
    try:
        return kubectl.run(*command, timeout_s=PART_S).encode()
    except CommandError as error:
        raise PartError(error.message) from None


def _summary(processes: Sequence[Process], findings: Sequence[Finding], bundle: Bundle) -> str:
    lines = [f"looked into {len(processes)} processes: {', '.join(each.name for each in processes)}"]
    lines += [] if findings else ["nothing unusual: every process answers, and no rank is stopped or stuck"]
    for finding in findings[:_MAX_FINDINGS]:
        lines.append(f"! {finding.sentence}")
        lines += [f"    {frame}" for frame in finding.stack.splitlines()]
    if len(findings) > _MAX_FINDINGS:
        lines.append(f"! and {len(findings) - _MAX_FINDINGS} more, in the bundle's stacks")
    lines += [f"not collected: {name}: {reason}" for name, reason in list(bundle.failed.items())[:_MAX_FINDINGS]]
    return "\n".join(map(harmless, lines))
