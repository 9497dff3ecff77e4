"""`lockstep logs`: the log lines of files or of a whole release, filtered and in the order of time."""

import argparse
import sys
from datetime import UTC, datetime

from lockstep_tools.arguments import integer, real
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import Release
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.logs.lines import LEVELS, Choice, moment, readable
from lockstep_tools.logs.sources import from_files, from_release, in_order

_MAX_READ = 1_000_000
"""Lines of each pod that are searched; kubelets keep 10 MiB of a container's log by default."""

_MAX_SHOWN = 10_000

DESCRIPTION = """\
Show log lines of routers, workers, their ranks and state servers: from files, from stdin (-), or with --release from
all pods of a release at once. Characters that a terminal would act on are shown escaped.
Exit code 1 when no line is found, or when the lines of a pod could not be read; stderr says which."""

EXAMPLES = """\
  lockstep logs serve.log --level warning
  lockstep logs --release lockstep -n serving --request chatcmpl-7f3a --since 15m
  lockstep logs --release lockstep --rank 1 --follow 600
  tail -f serve.log | lockstep logs - --level warning
  kubectl logs lockstep-worker-reference-0 --previous | lockstep logs - --rank 1"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="- is stdin")
    parser.add_argument("--release", help="read the pods of this Helm release, by kubectl")
    parser.add_argument("-n", "--namespace", default="default", help="of the release (default: %(default)s)")
    parser.add_argument("--request", metavar="ID", help="lines about a request: its id, its answer's, or its trace's")
    parser.add_argument("--rank", type=integer(0, 65_535), metavar="N", help="lines of and about a rank")
    parser.add_argument("--level", choices=LEVELS, help="least level")
    parser.add_argument("--service", metavar="NAME", help="router, worker, `worker w0` or state")
    parser.add_argument(
        "--since", metavar="TIME", help="an age (90s, 15m, 2h) or an ISO time; without an offset in UTC"
    )
    parser.add_argument("--until", metavar="TIME", help="the same")
    parser.add_argument(
        "--tail",
        type=integer(1, 1_000_000),
        metavar="N",
        help="most lines shown: the newest of all sources by time "
        f"(default: {_MAX_SHOWN}; of stdin alone all, as they come)",
    )
    parser.add_argument(
        "--follow", type=real(1, 86_400), metavar="S", help="show new lines of a release for so many seconds"
    )
    parser.add_argument("--json", action="store_true", help="the lines as they are, one JSON object each")


def run(arguments: argparse.Namespace) -> int:
    """Show the lines that are wanted."""
    if bool(arguments.files) == bool(arguments.release):
        raise CommandError("give either files (- is stdin) or --release", UNUSABLE)
    if arguments.follow and not arguments.release:
        raise CommandError("--follow needs --release; for a file: tail -f FILE | lockstep logs -", UNUSABLE)
    choice = Choice(
        arguments.request,
        arguments.rank,
        arguments.level,
        arguments.service,
        _moment("--since", arguments.since),
        _moment("--until", arguments.until),
    )
    failures: list[str] = []
    most = arguments.tail or _MAX_SHOWN
    if arguments.files:
        lines = from_files(arguments.files)
    else:
        release = Release(arguments.release, Kubectl(arguments.namespace))
        # A pod's newest lines need not be what is asked for: the limit is for those that are.
        wants_all = choice == Choice(since=choice.since) and not arguments.json
        read = most if arguments.follow or wants_all else _MAX_READ
        lines = from_release(
            release, tail=read, since=choice.since, follow_s=arguments.follow, on_failure=failures.append
        )
    # Lines that are not JSON are not shown with --json, and so they do not count for --tail.
    wanted = (line for line in lines if choice.wants(line) and (line.fields or not arguments.json))
    shown = 0
    # What is followed is shown as it comes: only what is complete can be sorted.
    is_followed = arguments.follow or (arguments.files == ["-"] and arguments.tail is None)
    for line in wanted if is_followed else in_order(wanted, most):
        print(line.text if arguments.json else readable(line), flush=True)
        shown += 1
    for failure in failures:
        print(f"lockstep: {failure}", file=sys.stderr)
    return 0 if shown and not failures else 1


def _moment(option: str, text: str | None) -> str:
    if text is None:
        return ""
    try:
        return moment(text, datetime.now(UTC))
    except ValueError:
        raise CommandError(
            f"{option} {text}: neither an age such as 15m nor a time such as 2026-01-31T10:00:00", UNUSABLE
        ) from None
