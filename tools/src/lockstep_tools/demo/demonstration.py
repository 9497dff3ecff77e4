"""The three acts of the demo: start the workers, stream undisturbed, stream again while workers are killed.

It passes only when both kills hit the worker that was serving the stream and its client sees no difference except
delays.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep_tools.demo.story import Narrator, Story, show_comparison
from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.load.endpoint import Endpoint, Piece
from lockstep_tools.load.generator import record
from lockstep_tools.load.history import History, StreamRequest
from lockstep_tools.serving.stack import Stack
from lockstep_tools.serving.status import READY, state_of

_START_TIMEOUT_S = 300.0
STREAM_S = 7.0  # ranks restart in less, so at the second kill the stream still runs and both workers are ready
_MIN_TOKENS = 500
_WARM_UP_TOKENS = 100
_FIRST_KILL_TOKENS = 80
_PAUSE_TOKENS = 40  # between recovery and the next kill, so that the text is seen to continue
_POLL_S = 0.02
_BANNED_TOKENS = {"reference": {"2602": -100}}
"""`logit_bias` by model: the reference model has learnt a racial slur from one of its books."""


class Demo:
    """The three acts."""

    def __init__(
        self, stack: Stack, out: Console, *, prompt: str, max_tokens: int | None, temperature: float, seed: int
    ) -> None:
        """Args: `max_tokens` None: as many tokens as take `STREAM_S` on this machine."""
        self._stack = stack
        self._out = out
        self._max_tokens: int | None = max_tokens
        self._body = {
            "prompt": prompt,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        }

    async def run(self) -> int:
        """Stream undisturbed, stream disturbed, compare."""
        model = (await self._status())["models"][0]
        tokens = self._max_tokens or await self._fitting_tokens(model)
        request = self._request(model, tokens)
        undisturbed = await self._undisturbed(request)
        story = await self._disturbed(request)
        return 0 if show_comparison(undisturbed, story, self._out) else FAILED

    def start(self) -> None:
        """Wait until the workers are ready. It blocks: in an event loop Ctrl-C would not interrupt it."""
        self._title("1", "start two workers with two ranks each, on the CPU")
        began_s = time.monotonic()
        with self._out.status("  loading") if self._out.is_terminal else nullcontext():
            self._stack.wait_ready(_START_TIMEOUT_S)
        pids = ", ".join(f"{worker} (pid {pid})" for worker, pid in self._stack.worker_pids.items())
        self._aside(f"router at {self._stack.url}, {pids}: ready after {time.monotonic() - began_s:.1f} s")
        self._aside(f"watch it in a browser: {self._stack.console_url}")

    async def _fitting_tokens(self, model: Mapping[str, Any]) -> int:
        """Tokens of a stream that lasts long enough for both kills, within the model's context."""
        warm_up = await self._record(self._request(model, _WARM_UP_TOKENS))
        prompt_tokens = int((warm_up.usage or {}).get("prompt_tokens", 0))
        fitting = int(STREAM_S * warm_up.tokens / _duration_s(warm_up))
        return min(max(_MIN_TOKENS, fitting), int(model["context_length"]) - prompt_tokens)

    async def _undisturbed(self, request: StreamRequest) -> History:
        tokens = request.body["max_tokens"]
        self._title("2", f"stream {tokens} tokens undisturbed, and keep the text")
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
        body = self._body | {"model": model["name"], "max_tokens": tokens}
        if banned := _BANNED_TOKENS.get(model["name"]):
            body["logit_bias"] = banned
        return StreamRequest("/completions", body)

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
    """Kills what serves the stream: first a rank, then, once all workers are ready again, the worker that serves it."""

    def __init__(self, stack: Stack, story: Story, narrator: Narrator) -> None:
        self._stack = stack
        self._story = story
        self._narrator = narrator

    async def run(self) -> None:
        """Kill both victims; cancelled when the stream ends before."""
        await self._position(_FIRST_KILL_TOKENS)
        worker = await self._serving()
        rank = worker["ranks"][-1]
        self._kill(rank["pid"], f"rank {rank['rank']} of worker {worker['id']}")
        await self._ready_again(worker["id"], worker["epoch"])
        await self._position((self._story.history.position() or 0) + _PAUSE_TOKENS)
        worker = await self._serving()
        self._kill(worker["pid"], f"worker {worker['id']} with all its ranks")

    def _kill(self, pid: int, victim: str) -> None:
        os.kill(pid, signal.SIGKILL)
        kill = self._story.add_kill(f"{victim} (pid {pid})")
        self._narrator.remark(f"✂ killed {kill.victim}", "bold red")

    async def _position(self, tokens: int) -> None:
        """Wait until the stream has `tokens` tokens."""
        while (self._story.history.position() or 0) < tokens:  # noqa: ASYNC110 - nothing else needs an event for it
            await asyncio.sleep(_POLL_S)

    async def _serving(self) -> dict[str, Any]:
        """The worker that runs the stream."""
        while True:
            for worker in (await read_status(self._stack))["workers"]:
                if worker["streams"]:
                    return dict(worker)
            await asyncio.sleep(_POLL_S)

    async def _ready_again(self, worker_id: str, epoch: int) -> None:
        """Wait until every worker is ready, and the one that lost a rank is in a later epoch."""
        while True:
            workers = (await read_status(self._stack))["workers"]
            newer = all(worker["epoch"] > epoch for worker in workers if worker["id"] == worker_id)
            if newer and all(state_of(worker) == READY for worker in workers):
                return
            await asyncio.sleep(_POLL_S)


async def read_status(stack: Stack) -> dict[str, Any]:
    """The router's status, fetched on a thread so that the stream is still read on time.

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
