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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from lockstep_common.lifecycle import name_process
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep_tools import console
from lockstep_tools.arguments import add_model, model_directory, real, whole
from lockstep_tools.endpoint import Endpoint, Piece
from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.history import History, StreamRequest
from lockstep_tools.loadgen import record
from lockstep_tools.stack import Stack, StackSettings
from lockstep_tools.status import READY, state_of
from lockstep_tools.story import Narrator, Story, verdict

DESCRIPTION = """\
Start two workers with two ranks each on the CPU and stream a completion twice: once in peace, and once while a rank and
then a whole worker are killed in the middle of it. Shows the gaps that the client saw and compares the texts.
Exit code 0 only when both kills hit the serving worker and no token was lost, doubled or different."""

EXAMPLES = """\
  lockstep demo
  lockstep demo /models/llama --prompt 'Once upon a time' --max-tokens 400 --seed 1"""

_START_TIMEOUT_S = 300.0
_STREAM_S = 7.0  # ranks start again in less, so the second kill finds the stream alive and both workers whole
_LEAST_TOKENS = 500
_WARM_UP_TOKENS = 100
_FIRST_KILL_TOKENS = 80
_CALM_TOKENS = 40  # between being whole again and the next kill, so that the text is seen to go on
_POLL_S = 0.02


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    parser.add_argument("--prompt", default="It was a dark night, and", help="default: %(default)r")
    parser.add_argument(
        "--max-tokens", type=whole(100), metavar="N", help=f"default: as many as take {_STREAM_S:.0f} s on this machine"
    )
    parser.add_argument("--temperature", type=real(0, 2), default=0.8, metavar="T", help="default: %(default)s")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--port", type=whole(0, 65535), default=0, help="0: any free one (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Tell the story; 0 when it ends well."""
    name_process("demo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        self._max_tokens: int | None = arguments.max_tokens
        self._body = {
            "prompt": arguments.prompt,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "ignore_eos": True,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        }

    async def run(self) -> int:
        """Start, run in peace, run disturbed, compare."""
        self._start()
        model = (await self._status())["models"][0]
        tokens = self._max_tokens or await self._fitting_tokens(model)
        request = self._request(model, tokens)
        peace = await self._in_peace(request)
        story = await self._disturbed(request)
        return 0 if verdict(peace, story, self._out) else FAILED

    def _start(self) -> None:
        self._title("1", "start two workers with two ranks each, on the CPU")
        began_s = time.monotonic()
        with self._out.status("  loading") if self._out.is_terminal else nullcontext():
            self._stack.wait_ready(_START_TIMEOUT_S)
        pids = ", ".join(f"{worker} (pid {pid})" for worker, pid in self._stack.worker_pids.items())
        self._aside(f"router at {self._stack.url}, {pids}: ready after {time.monotonic() - began_s:.1f} s")

    async def _fitting_tokens(self, model: Mapping[str, Any]) -> int:
        """Tokens of a stream that lasts long enough for both kills, within the model's context."""
        warm_up = await self._record(self._request(model, _WARM_UP_TOKENS))
        prompt_tokens = int((warm_up.usage or {}).get("prompt_tokens", 0))
        fitting = int(_STREAM_S * warm_up.tokens / _duration_s(warm_up))
        return min(max(_LEAST_TOKENS, fitting), int(model["context_length"]) - prompt_tokens)

    async def _in_peace(self, request: StreamRequest) -> History:
        tokens = request.body["max_tokens"]
        self._title("2", f"stream {tokens} tokens in peace, and keep the text")
        columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as progress:
            task = progress.add_task("", total=tokens)
            history = await self._record(request, progress=lambda piece: progress.advance(task, piece.tokens or 0))
        duration_s = _duration_s(history)
        self._aside(f"{history.tokens} tokens in {duration_s:.1f} s, {history.tokens / duration_s:.0f} tokens/s")
        return history

    async def _disturbed(self, request: StreamRequest) -> Story:
        self._title("3", "stream the same again, and kill what serves it")
        failovers = _failovers(await self._status())
        story = Story(History(request))
        narrator = Narrator(story, self._out)
        narrator.begin(request.body["prompt"])
        killing = asyncio.create_task(Killer(self._stack, story, narrator).run())
        async with self._endpoint.client() as client:
            await record(client, request, history=story.history, on_piece=narrator.hear)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        narrator.end_line()
        story.failovers = _failovers(await self._status()) - failovers
        return story

    async def _record(self, request: StreamRequest, progress: Callable[[Piece], None] = lambda _: None) -> History:
        async with self._endpoint.client() as client:
            history = await record(client, request, on_piece=progress)
        if history.error:
            raise CommandError(f"the undisturbed stream failed: {history.error}")
        return history

    def _request(self, model: Mapping[str, Any], tokens: int) -> StreamRequest:
        return StreamRequest("/completions", {**self._body, "model": model["name"], "max_tokens": tokens})

    async def _status(self) -> dict[str, Any]:
        return await read_status(self._stack)

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(f"{self._stack.url}/v1")

    def _title(self, number: str, text: str) -> None:
        self._out.print(f"\n[bold cyan]{number}[/bold cyan] [bold]{text}[/bold]")

    def _aside(self, text: str) -> None:
        self._out.print(f"  {text}", style="dim", markup=False)


class Killer:
    """Kills what serves the stream: a rank first; when all is whole again, the process of the worker serving then."""

    def __init__(self, stack: Stack, story: Story, narrator: Narrator) -> None:
        self._stack = stack
        self._story = story
        self._narrator = narrator

    async def run(self) -> None:
        """Until both are dead; cancelled when the stream ends before."""
        await self._position(_FIRST_KILL_TOKENS)
        worker = await self._serving()
        rank = worker["ranks"][-1]
        self._kill(rank["pid"], f"rank {rank['rank']} of worker {worker['id']}")
        await self._whole_again(worker["id"], worker["epoch"])
        await self._position((self._story.history.position() or 0) + _CALM_TOKENS)
        worker = await self._serving()
        self._kill(worker["pid"], f"worker {worker['id']} with all its ranks")

    def _kill(self, pid: int, victim: str) -> None:
        os.kill(pid, signal.SIGKILL)
        kill = self._story.add_kill(f"{victim} (pid {pid})")
        self._narrator.remark(f"✂ killed {kill.victim}", "bold red")

    async def _position(self, tokens: int) -> None:
        """Until the stream has so many tokens."""
        while (self._story.history.position() or 0) < tokens:  # noqa: ASYNC110 - nobody else needs an event for it
            await asyncio.sleep(_POLL_S)

    async def _serving(self) -> dict[str, Any]:
        """The worker that runs the stream."""
        while True:
            for worker in (await read_status(self._stack))["workers"]:
                if worker["running"]:
                    return dict(worker)
            await asyncio.sleep(_POLL_S)

    async def _whole_again(self, worker_id: str, epoch: int) -> None:
        """Until every worker is ready, and the one that lost a rank is in a later epoch."""
        while True:
            workers = (await read_status(self._stack))["workers"]
            newer = all(worker["epoch"] > epoch for worker in workers if worker["id"] == worker_id)
            if newer and all(state_of(worker) == READY for worker in workers):
                return
            await asyncio.sleep(_POLL_S)


async def read_status(stack: Stack) -> dict[str, Any]:
    """What the router says, asked on a thread: while it is waited for, the stream must be read on time.

    Raises:
        CommandError: the router does not answer.
    """
    status = await asyncio.to_thread(stack.status)
    if status is None:
        raise CommandError("the router does not answer")
    return status


def _failovers(status: Mapping[str, Any]) -> int:
    return int(status["router"]["failovers"])


def _duration_s(history: History) -> float:
    return (history.ended_s or 0.0) - history.started_s
