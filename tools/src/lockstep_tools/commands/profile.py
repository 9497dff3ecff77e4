"""`lockstep profile`: profiles some steps of a running worker's ranks, and names the rank that the others wait for."""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from lockstep_common.operations import PROFILE_S, PROFILED_STEPS

from lockstep_tools.arguments import DEFAULT_MANAGEMENT_URL, add_tls, integer
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import WORKER, Release
from lockstep_tools.debug import cluster, local
from lockstep_tools.debug.process import PART_S, Process
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.load.endpoint import checked_url, root_url, tls_context
from lockstep_tools.output_file import new_file
from lockstep_tools.profile.merge import merged
from lockstep_tools.profile.parts import MAX_ARCHIVE_BYTES, read_parts
from lockstep_tools.profile.summary import describe, summarize

DESCRIPTION = """\
Profile some steps of all ranks of a running worker with torch's profiler, while it serves. Writes one file for
https://ui.perfetto.dev, in which the ranks are on one clock, and prints where each rank's time goes: compute, transfer,
waiting for other ranks, idle. Names the rank that the others wait for, if one is clearly slower. It needs requests
that run meanwhile. Steps are a little slower while they are recorded, and pause for a moment when it begins and ends;
tokens do not change. The file has names of operators, and no prompts, outputs or token ids."""

EXAMPLES = """\
  lockstep profile --out decode.json.gz
  lockstep profile --worker w1 --steps 50
  lockstep profile --release lockstep -n serving --pod lockstep-worker-reference-0"""

_MAX_STEPS = 200
_OVERHEAD_S = 15.0
"""For the answer to begin, after the worker's own deadline."""
_MAX_WAIT_S = 300.0
"""For all of the answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--url", default=DEFAULT_MANAGEMENT_URL, help="the router's management port (default: %(default)s)"
    )
    parser.add_argument("--worker", metavar="ID", help="which worker; not needed if there is one")
    parser.add_argument("--release", help="a Helm release, by kubectl, in place of --url")
    parser.add_argument("-n", "--namespace", default="default", help="of the release (default: %(default)s)")
    parser.add_argument("--pod", help="which worker of the release; not needed if there is one")
    parser.add_argument(
        "--steps", type=integer(1, _MAX_STEPS), default=PROFILED_STEPS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: lockstep-profile-TIME.json.gz")
    add_tls(parser)


def run(arguments: argparse.Namespace) -> int:
    """Profile a worker, write the trace, and print the summary."""
    path = arguments.out or Path(f"lockstep-profile-{datetime.now(UTC):%Y%m%d-%H%M%S}.json.gz")
    context = tls_context(arguments)
    if context is not None and arguments.release:
        context.check_hostname = False  # kubectl's tunnel ends at the pod; the certificate is not for this address
    client = httpx.Client(verify=context or True, timeout=PART_S, trust_env=False)
    with client, new_file(path, "--out") as write:
        with _worker(arguments, client) as worker:
            profiles = read_parts(fetch_profile(client, worker, arguments.steps))
        summary = summarize(profiles)
        if not summary.steps:
            raise CommandError("the ranks have no step in common; try again")
        write(merged(profiles))
    print(f"{harmless(worker.name)}: {describe(summary, profiles)}")
    print(f"\ntrace: {path} ({path.stat().st_size / 1024:.0f} KiB); open it in https://ui.perfetto.dev")
    return 0


@contextmanager
def _worker(arguments: argparse.Namespace, client: httpx.Client) -> Iterator[Process]:
    """The worker that is meant."""
    if arguments.release:
        if arguments.worker:
            raise CommandError("--worker is for this machine; a worker of a release is named by --pod", UNUSABLE)
        release = Release(arguments.release, Kubectl(arguments.namespace))
        names = [pod.name for pod in release.require() if pod.component == WORKER]
        name = _chosen(names, arguments.pod, "--pod")
        with cluster.forwarded(release) as (found, failed):
            process = next((each for each in found if each.name == f"pod-{name}"), None)
            if process is None:
                raise CommandError(f"pod {name} cannot be reached: {failed.get(name, 'it is gone')}", UNUSABLE)
            yield process
        return
    if arguments.pod:
        raise CommandError("--pod needs --release; a worker of this machine is named by --worker", UNUSABLE)
    found = local.from_router(client, root_url(checked_url(arguments.url)))
    workers = {each.name.removeprefix("worker-"): each for each in found if each.name.startswith("worker-")}
    if not workers:
        raise CommandError("the router has no worker on this machine; give --release for one in a cluster", UNUSABLE)
    process = workers[_chosen(list(workers), arguments.worker, "--worker")]
    if not process.url:
        raise CommandError(f"worker {process.name} has no management port that answers; see `lockstep debug`", UNUSABLE)
    yield process


def _chosen(names: Sequence[str], wanted: str | None, option: str) -> str:
    listed = ", ".join(sorted(names)) or "none"
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None:
        raise CommandError(f"give {option}: there are {listed}", UNUSABLE)
    if wanted not in names:
        raise CommandError(f"{option} {wanted}: no such worker; there are {listed}", UNUSABLE)
    return wanted


def fetch_profile(client: httpx.Client, worker: Process, steps: int) -> bytes:
    """The worker's answer.

    Raises:
        CommandError: it gives no profile; the message says why.
    """
    body = bytearray()
    ends_at = time.monotonic() + _MAX_WAIT_S
    url = f"{worker.url}/debug/profile?steps={steps}"
    try:
        with client.stream("POST", url, timeout=PROFILE_S + _OVERHEAD_S) as answer:
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_ARCHIVE_BYTES:
                    raise CommandError(f"more than {MAX_ARCHIVE_BYTES >> 20} MiB; ask for fewer --steps")
                if time.monotonic() > ends_at:
                    raise CommandError(f"{harmless(worker.name)}: its answer is not complete after {_MAX_WAIT_S:g} s")
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(harmless(f"{worker.name} does not answer: {reason}")) from None
    if answer.is_success:
        return bytes(body)
    try:
        reason = str(httpx.Response(answer.status_code, content=bytes(body)).json()["error"])
    except (ValueError, KeyError, TypeError):
        reason = f"HTTP status {answer.status_code}; it may be of a version without profiles"
    raise CommandError(harmless(f"{worker.name}: {reason}"))
