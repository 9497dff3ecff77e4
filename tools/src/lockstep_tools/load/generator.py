"""The load generator: steady clients that stream from an endpoint and keep the history of every stream.

There is no other: the bench reports its figures, tests and experiments check its histories. A test notes
moments of the run ("killed w0") and asks afterwards for the longest silence at each.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Self

import httpx

from lockstep_tools.load.endpoint import Endpoint, EndpointError, Piece, stream
from lockstep_tools.load.history import History, StreamRequest

ROUTER_HEADER = "X-Lockstep-Router"

_PAUSE_AFTER_ERROR_S = 0.2  # limits the rate of requests to a server that refuses everything

_WORDS = (
    "the of and to in that was his he it with as had for she not at but be on her have by which this they from all "
    "were my me so one you said there if when who him no would an or their what been more up out into could now them "
    "man some then upon little time will about do very great old other like good before over see such down long know "
    "come first made night own never must way day after hand house much again might eyes came any being here face "
    "went once himself still thought well through head room men place life may looked left many right young heart"
)


@dataclass(frozen=True)
class Moment:
    """A named moment of a run, on the monotonic clock."""

    name: str
    at_s: float


class Prompts:
    """Makes the n-th completion request of a run: a pure function of (seed, n)."""

    def __init__(
        self,
        model: str,
        *,
        prompt_tokens: int = 64,
        max_tokens: int = 128,
        temperature: float = 0.8,
        seed: int = 0,
        logprobs: bool = False,
    ) -> None:
        self._model = model
        self._words = _WORDS.split()
        self._prompt_words = prompt_tokens  # common words are one token each in nearly every vocabulary
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed
        self._logprobs = logprobs

    def __call__(self, number: int) -> StreamRequest:
        """The n-th request."""
        words = Random(f"{self._seed}/{number}").choices(self._words, k=self._prompt_words)
        body = {
            "model": self._model,
            "prompt": " ".join(words),
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "seed": (self._seed * 1_000_003 + number) % 2**63,
            "stream_options": {"include_usage": True},
        }
        if self._logprobs:
            body["logprobs"] = 0
        return StreamRequest("/completions", body)


async def record(
    client: httpx.AsyncClient,
    request: StreamRequest,
    *,
    history: History | None = None,
    on_piece: Callable[[Piece], None] = lambda _: None,
) -> History:
    """Stream one request to its end and return its history; a failure is in the history, not raised.

    Args:
        client: of `Endpoint.client`.
        request: what to send.
        history: filled while the stream runs, so that others can read it meanwhile; a new one when None.
        on_piece: called with each piece as it arrives; it must not block.
    """
    history = history or History(request)
    history.started_s = time.monotonic()

    def note_answer(answer: httpx.Response) -> None:
        history.status = answer.status_code
        history.router = answer.headers.get(ROUTER_HEADER)
        history.retry_after = answer.headers.get("Retry-After")

    def note_connect_failure() -> None:
        history.connect_failures += 1

    sent = stream(
        client,
        request.path,
        request.body,
        request.headers,
        on_answer=note_answer,
        on_connect_failure=note_connect_failure,
    )
    try:
        async with aclosing(sent) as pieces:
            async for piece in pieces:
                history.pieces.append(piece)
                on_piece(piece)
    except EndpointError as error:
        history.error = error.message
    except asyncio.CancelledError:
        history.cancelled = True
        raise
    finally:
        history.ended_s = time.monotonic()
    return history


class Traffic:
    """Steady load: each client sends its next request when its last one has ended.

    Used as `async with Traffic(...) as traffic:`; leaving the block waits for the streams that still run, or cancels
    them when an exception is on its way. What `on_end` raises ends the run, and leaving the block raises it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        make: Callable[[int], StreamRequest],
        *,
        clients: int,
        requests: int | None = None,
        on_end: Callable[[History], None] = lambda _: None,
        keeps: bool = True,
    ) -> None:
        """Args: `make` returns the n-th request; `requests` is their number, None: until `stop`. Without `keeps` a
        history is dropped after `on_end`, so that a run of any length has bounded memory.
        """
        self.histories: list[History] = []
        """The histories of all streams that have begun, in order of their beginning; without `keeps` of those that run.
        """
        self.moments: list[Moment] = []
        self._endpoint = endpoint
        self._make = make
        self._clients = clients
        self._requests = requests
        self._on_end = on_end
        self._keeps = keeps
        self._begun = 0
        self._stopping = False
        self._heard = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._http = self._endpoint.client(connections=self._clients)
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        try:
            if kind is None:
                await self.finish()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._http.aclose()

    @property
    def running(self) -> list[History]:
        """The streams that have begun and not ended."""
        return [history for history in self.histories if history.ended_s is None]

    def note_moment(self, name: str) -> Moment:
        """The current time under a name, which is kept in `moments`."""
        moment = Moment(name, time.monotonic())
        self.moments.append(moment)
        return moment

    async def ended(self) -> None:
        """Wait until all clients have ended, or one has failed."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)

    def stop(self) -> None:
        """Send no further requests; running streams continue."""
        self._stopping = True

    async def finish(self) -> None:
        """Wait for the end of all requests, or after `stop` of the running ones."""
        if self._requests is None:
            self.stop()
        await asyncio.gather(*self._tasks)

    async def streaming(self, clients: int | None = None, *, timeout_s: float = 30.0) -> None:
        """Wait until `clients` clients (all when None) are in the middle of a stream.

        Raises:
            TimeoutError: they are not, within `timeout_s`.
        """
        wanted = self._clients if clients is None else clients
        async with asyncio.timeout(timeout_s):
            while sum(bool(history.spoken) for history in self.running) < wanted:
                self._heard.clear()
                await self._heard.wait()

    def gap_s(self, moment: Moment, *, within_s: float = 2.0) -> float:
        """The longest silence of any stream that ran then; counts silences that began at most `within_s` later."""
        alive = [
            history
            for history in self.histories
            if history.started_s <= moment.at_s and (history.ended_s is None or history.ended_s >= moment.at_s)
        ]
        return max((history.longest_gap_s(moment.at_s, moment.at_s + within_s) for history in alive), default=0.0)

    async def _client(self, client: int) -> None:
        assert self._http is not None
        while not self._stopping and (self._requests is None or self._begun < self._requests):
            number = self._begun
            self._begun += 1
            history = History(self._make(number), number=number, client=client, started_s=time.monotonic())
            self.histories.append(history)
            await record(self._http, history.request, history=history, on_piece=lambda _: self._heard.set())
            self._on_end(history)
            if not self._keeps:
                self.histories = self.running
            if history.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)


async def drive(
    endpoint: Endpoint,
    requests: Sequence[StreamRequest],
    *,
    clients: int,
    on_end: Callable[[History], None] = lambda _: None,
) -> list[History]:
    """Send all `requests` with `clients` at a time and return their histories."""
    async with Traffic(endpoint, requests.__getitem__, clients=clients, requests=len(requests), on_end=on_end) as run:
        await run.finish()
    return run.histories
