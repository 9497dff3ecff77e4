"""`lockstep bench`: steady clients against an endpoint, and a table of the delays that they saw.

`lockstep bench state` measures the state server as the prefix cache's third tier.
"""

import argparse
import asyncio
import json

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lockstep_tools import console
from lockstep_tools.arguments import add_endpoint, integer, real
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.load import endpoint
from lockstep_tools.load.endpoint import Endpoint, EndpointError, first_model
from lockstep_tools.load.generator import Prompts, drive
from lockstep_tools.load.history import History
from lockstep_tools.load.report import Percentiles, Report, summarize
from lockstep_tools.state_bench import options

DESCRIPTION = """\
Put an OpenAI endpoint under steady load and measure it: time to first token, time between tokens, longest silence,
tokens/s. Every stream is also checked: positions in order, one end, usage equal to the tokens delivered.
Exit code 1 when a request failed or a check found something, 2 when no server answers.
`lockstep bench state` measures KV blocks in the state server instead, and when it pays to fetch them."""

EXAMPLES = """\
  lockstep bench --clients 8 --requests 64
  lockstep bench --url http://gateway/v1 --prompt-tokens 512 --max-tokens 64 --json > run.json
  lockstep bench state"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_endpoint(parser)
    parser.add_argument("--clients", type=integer(1), default=8, metavar="N", help="streams at a time (default: 8)")
    parser.add_argument("--requests", type=integer(1), default=32, metavar="N", help="requests in all (default: 32)")
    parser.add_argument(
        "--prompt-tokens",
        type=integer(1),
        default=64,
        metavar="N",
        help="length of a prompt, approximately (default: 64)",
    )
    parser.add_argument("--max-tokens", type=integer(1), default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=real(0, 2), default=0.8, metavar="T", help="default: 0.8")
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of prompts and sampling (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    subjects = parser.add_subparsers(title="other subjects", metavar="SUBJECT", dest="subject")
    summary = "KV blocks in the state server: MB/s, round trip, break-even"
    options.configure(subjects.add_parser("state", help=summary, description=options.DESCRIPTION))


def run(arguments: argparse.Namespace) -> int:
    """Run the load and print its report."""
    if arguments.subject == "state":
        from lockstep_tools.state_bench import command  # noqa: PLC0415 - it needs the engine

        return command.run(arguments)
    try:
        report = asyncio.run(_measure(arguments, endpoint.from_arguments(arguments)))
    except EndpointError as error:
        raise CommandError(error.message, UNUSABLE) from None
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        render(report, arguments.clients, console.output())
    return 0 if report.clean else FAILED


def render(report: Report, clients: int, out: Console) -> None:
    """Print a report for people."""
    table = Table(
        title=f"{report.streams} requests from {clients} clients in {report.seconds:.1f} s", title_justify="left"
    )
    for name in ("", "p50", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    for name, percentiles in (
        ("time to first token", report.first_token_ms),
        ("between tokens", report.inter_token_ms),
        ("longest silence of a stream", report.longest_silence_ms),
    ):
        table.add_row(name, *_cells(percentiles))
    out.print(table)
    out.print(
        f"{report.tokens} tokens, [bold]{report.tokens_per_s:.1f} tokens/s[/bold]; "
        f"{report.prompt_tokens} prompt tokens; {report.failed} failed, {len(report.violations)} wrong"
    )
    for sentence, count in report.errors.items():
        out.print(f"  {count} times: {harmless(sentence)}", style="red", markup=False)
    for sentence in report.violations:
        out.print(f"  {harmless(sentence)}", style="red", markup=False)


def _cells(percentiles: Percentiles | None) -> list[str]:
    if percentiles is None:
        return ["-"] * 3
    return [f"{value:.1f} ms" for value in (percentiles.p50, percentiles.p99, percentiles.max)]


async def _measure(arguments: argparse.Namespace, target: Endpoint) -> Report:
    async with target.client() as client:
        model = arguments.model or await first_model(client)
    make = Prompts(
        model,
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    requests = [make(number) for number in range(arguments.requests)]
    notes = console.notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("requests", total=len(requests))

        def ended(_: History) -> None:
            progress.advance(task)

        histories = await drive(target, requests, clients=arguments.clients, on_end=ended)
    return summarize(histories)
