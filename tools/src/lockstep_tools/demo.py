"""`lockstep demo`: a stream whose workers are killed under it, held against the same stream left in peace.

It passes only when both kills hit the worker that was serving the stream and its client can tell no difference but
time.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from lockstep_tools import console
from lockstep_tools.arguments import add_model, model_directory, real, whole
from lockstep_tools.endpoint import Endpoint, Piece
from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.history import History, StreamRequest, violations
from lockstep_tools.loadgen import record
from lockstep_tools.stack import Stack, StackSettings
from lockstep_tools.status import READY, state_of

DESCRIPTION = """\
Start two workers with two ranks each on the CPU and stream a completion twice: once in peace, and once while a rank and
then a whole worker are killed in the middle of it. Shows the gaps that the client saw and compares the texts.
Exit code 0 only when both kills hit the serving worker and no token was lost, doubled or different."""

EXAMPLES = """\
  lockstep demo
  lockstep demo /models/llama --prompt 'Once upon a time' --max-tokens 400 --seed 1"""

_START_TIMEOUT_S = 300.0
_FIRST_KILL = 0.15  # share of the tokens after which the rank is killed
_CALM_TOKENS = 40  # between being whole again and the next kill, so that the text is seen to go on
_SETTLED_PIECES = 12  # after a kill: the longest silence among them is the kill's
_POLL_S = 0.02


@dataclass(frozen=True)
class Kill:
    """A process that was killed under the stream."""

    victim: str
    at_s: float
    at_piece: int
    """Pieces of text that the client had by then."""
    at_token: int


@dataclass
class Story:
    """The disturbed run: what was done to it and what its client saw."""

    history: History
    kills: list[Kill] = field(default_factory=list)
    failovers: int = 0
    """How often the router moved the stream, by its own count."""

    def gap_ms(self, kill: Kill) -> float:
        """The longest silence that the client saw soon after a kill."""
        spoken = self.history.spoken[max(0, kill.at_piece - 1) : kill.at_piece + _SETTLED_PIECES]
        return max((after.at_s - before.at_s for before, after in pairwise(spoken)), default=0.0) * 1e3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    parser.add_argument("--prompt", default="It was a dark night, and", help="default: %(default)r")
    parser.add_argument("--max-tokens", type=whole(100), default=1200, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=real(0, 2), default=0.8, metavar="T", help="default: %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--port", type=whole(0, 65535), default=0, help="0: any free one (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Tell the story; 0 when it ends well."""
    out = console.output()
    settings = StackSettings(model_directory(arguments.model), workers=2, tp=2, port=arguments.port, device="cpu")
    with tempfile.TemporaryFile() as log:
        try:
            with Stack(settings, output=log) as stack:
                return asyncio.run(Demo(stack, arguments, out).run())
        except CommandError:
            log.seek(0)
            sys.stderr.buffer.write(log.read())
            raise


class Demo:
    """The three acts."""

    def __init__(self, stack: Stack, arguments: argparse.Namespace, out: Console) -> None:
        self._stack = stack
        self._out = out
        self._tokens: int = arguments.max_tokens
        self._body = {
            "prompt": arguments.prompt,
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "ignore_eos": True,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        }

    async def run(self) -> int:
        """Start, run in peace, run disturbed, compare."""
        self._start()
        status = await self._status()
        request = StreamRequest("/completions", {**self._body, "model": _model_name(status)})
        peace = await self._in_peace(request)
        story = await self._disturbed(request)
        return 0 if verdict(peace, story, self._out) else FAILED

    def _start(self) -> None:
        self._title("1", "start two workers with two ranks each, on the CPU")
        began_s = time.monotonic()
        spinner = self._out.status("  starting") if self._out.is_terminal else None
        if spinner:
            spinner.start()
        try:
            self._stack.wait_ready(_START_TIMEOUT_S)
        finally:
            if spinner:
                spinner.stop()
        pids = ", ".join(f"{worker} (pid {pid})" for worker, pid in self._stack.worker_pids.items())
        self._out.print(
            f"  router at {self._stack.url}, {pids}: ready after {time.monotonic() - began_s:.1f} s", style="dim"
        )

    async def _in_peace(self, request: StreamRequest) -> History:
        self._title("2", f"stream {self._tokens} tokens in peace, and keep the text")
        columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as progress:
            task = progress.add_task("", total=self._tokens)
            async with self._endpoint.client() as client:
                history = await record(
                    client, request, on_piece=lambda piece: progress.advance(task, piece.tokens or 0)
                )
        if history.error:
            raise CommandError(f"the undisturbed stream failed: {history.error}")
        seconds = (history.ended_s or 0.0) - history.started_s
        self._out.print(
            f"  {history.tokens} tokens in {seconds:.1f} s, {history.tokens / seconds:.0f} tokens/s", style="dim"
        )
        return history

    async def _disturbed(self, request: StreamRequest) -> Story:
        self._title("3", "stream the same again, and kill what serves it")
        failovers = _failovers(await self._status())
        story = Story(History(request))
        self._out.print(f"[bold]{request.body['prompt']}[/bold]", end="")
        self._narrator = Narrator(story, self._out)
        self._heard = asyncio.Event()
        async with self._endpoint.client() as client:
            reading = asyncio.create_task(
                record(client, request, history=story.history, on_piece=self._hear), name="stream"
            )
            killing = asyncio.create_task(self._kill_both(story), name="kills")
            await reading
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        self._narrator.close()
        story.failovers = _failovers(await self._status()) - failovers
        return story

    def _hear(self, piece: Piece) -> None:
        self._narrator.hear(piece)
        self._heard.set()

    async def _kill_both(self, story: Story) -> None:
        """First a rank of the worker that serves; when all are whole again, the process of the one that serves then."""
        await self._tokens_reach(story, int(self._tokens * _FIRST_KILL))
        worker = await self._serving()
        rank = worker["ranks"][-1]
        self._kill(story, rank["pid"], f"rank {rank['rank']} of worker {worker['id']}")
        await self._whole_again(worker["epoch"], worker["id"])
        await self._tokens_reach(story, story.history.position() or 0, more=_CALM_TOKENS)
        worker = await self._serving()
        self._kill(story, worker["pid"], f"worker {worker['id']} with all its ranks")

    def _kill(self, story: Story, pid: int, victim: str) -> None:
        os.kill(pid, signal.SIGKILL)
        kill = Kill(f"{victim} (pid {pid})", time.monotonic(), len(story.history.spoken), story.history.tokens)
        story.kills.append(kill)
        self._narrator.remark(f"✂ killed {kill.victim}", "bold red")

    async def _tokens_reach(self, story: Story, number: int, *, more: int = 0) -> None:
        while (story.history.position() or 0) < number + more:
            self._heard.clear()
            await self._heard.wait()

    async def _serving(self) -> dict[str, Any]:
        """The worker that runs the stream."""
        while True:
            for worker in (await self._status())["workers"]:
                if worker["running"]:
                    return dict(worker)
            await asyncio.sleep(_POLL_S)

    async def _whole_again(self, epoch: int, worker_id: str) -> None:
        """Until every worker is ready, and the one that lost a rank is in a later epoch."""
        while True:
            workers = (await self._status())["workers"]
            newer = all(worker["epoch"] > epoch for worker in workers if worker["id"] == worker_id)
            if newer and all(state_of(worker) == READY for worker in workers):
                return
            await asyncio.sleep(_POLL_S)

    async def _status(self) -> dict[str, Any]:
        # On a thread: while it waits for the router, the stream must be read on time.
        status = await asyncio.to_thread(self._stack.status)
        if status is None:
            raise CommandError("the router does not answer")
        return status

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(f"{self._stack.url}/v1")

    def _title(self, number: str, text: str) -> None:
        self._out.print(f"\n[bold cyan]{number}[/bold cyan] [bold]{text}[/bold]")


class Narrator:
    """Prints the stream as it comes, and remarks between."""

    def __init__(self, story: Story, out: Console) -> None:
        self._story = story
        self._out = out
        self._at_line_start = False
        self._told = 0

    def hear(self, piece: Piece) -> None:
        """Print a piece; some pieces after a kill say how long its gap was."""
        self._out.file.write(piece.text)
        self._out.file.flush()
        if piece.text:
            self._at_line_start = piece.text.endswith("\n")
        kills = self._story.kills
        if self._told < len(kills) and len(self._story.history.spoken) >= kills[self._told].at_piece + _SETTLED_PIECES:
            self._tell_gap()

    def remark(self, text: str, style: str) -> None:
        """A line of its own."""
        self._out.print(f"{'' if self._at_line_start else chr(10)}  {text}", style=style, markup=False)
        self._at_line_start = True

    def close(self) -> None:
        """End the text's last line."""
        if not self._at_line_start:
            self._out.print()

    def _tell_gap(self) -> None:
        kill = self._story.kills[self._told]
        self._told += 1
        self.remark(f"↻ went on; the client saw a gap of {self._story.gap_ms(kill):.0f} ms", "bold green")


def verdict(peace: History, story: Story, out: Console) -> bool:
    """Compare the runs, print the table, and say whether all is well.

    Args:
        peace: the undisturbed run.
        story: the disturbed one.
        out: where the table goes.
    """
    told = story.history
    wanted = peace.request.body["max_tokens"]
    problems = violations(told, reference=peace.text(), require_ids=True)
    problems += [f"undisturbed: {problem}" for problem in violations(peace, require_ids=True)]
    checks = {
        "text": (told.text() == peace.text(), f"{len(told.text())} characters", f"{len(peace.text())} characters"),
        "tokens, by usage": _same(_completion_tokens(told), _completion_tokens(peace), wanted),
        "tokens, by SSE id": _same(told.position(), peace.position(), wanted),
        "lost, doubled or out of order": (not problems, str(len(problems)), "0"),
        "kills": (len(story.kills) == 2, str(len(story.kills)), "2 wanted"),
        "failovers, by the router": (
            story.failovers == len(story.kills) == 2,
            str(story.failovers),
            "one for each kill",
        ),
    }
    table = Table(title="verdict", title_justify="left", title_style="bold")
    for name in ("", "disturbed", "in peace", ""):
        table.add_column(name)
    for name, (holds, disturbed, undisturbed) in checks.items():
        table.add_row(name, disturbed, undisturbed, "[green]✓[/green]" if holds else "[red]✗[/red]")
    for number, kill in enumerate(story.kills, start=1):
        table.add_row(f"gap of kill {number}", f"{story.gap_ms(kill):.0f} ms", "", "")
    table.add_row(
        "longest silence", f"{told.longest_gap_s() * 1e3:.0f} ms", f"{peace.longest_gap_s() * 1e3:.0f} ms", ""
    )
    out.print()
    out.print(table)
    for problem in problems:
        out.print(f"  {problem}", style="red", markup=False)
    well = all(holds for holds, _, _ in checks.values())
    sentence = "The client lost nothing: same text, same tokens." if well else "The demo failed."
    out.print(sentence, style="bold green" if well else "bold red")
    return well


def _same(disturbed: int | None, peace: int | None, wanted: int) -> tuple[bool, str, str]:
    return disturbed == peace == wanted, str(disturbed), str(peace)


def _completion_tokens(history: History) -> int | None:
    return (history.usage or {}).get("completion_tokens")


def _model_name(status: Mapping[str, Any]) -> str:
    model = (status.get("models") or [None])[0]
    if isinstance(model, Mapping):
        model = model.get("name") or model.get("id")
    if not model:
        raise CommandError("the router serves no model")
    return str(model)


def _failovers(status: Mapping[str, Any]) -> int:
    return int(status["router"]["failovers"])
