"""Clients of resumable streams: they speak HTTP, leave, come back on any router, and write down what they see.

All of them run in one event loop. Those of the kind `library` use the steps of `lockstep_client`; the others do by hand
what any client can do with the API.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from lockstep_client.errors import LockstepError, from_response
from lockstep_client.generation import StreamedAnswer, exchange_for
from lockstep_client.policy import Policy
from lockstep_client.routers import Router as Address
from lockstep_client.routers import Routers
from lockstep_client.sse import Decoder, ServerSentEvent
from lockstep_client.steps import BrokenError, Expect, Give, Head, Outgoing, Pause, Send, Step, Steps

from simulated import model
from simulated.history import Event, History, Kind
from simulated.plan import Request
from simulated.wire import CONNECT_TIMEOUT_S, STREAM_HEADER, Exchange, Wire

if TYPE_CHECKING:
    from simulated.processes import RouterProcess
    from simulated.tracks import Track
    from simulated.world import World

SILENCE_S = 4.0
"""After so long without a byte a client gives a connection up. Routers send a comment each second."""

PATIENCE_S = 8.0
"""Time for which a client by hand tries to reach its router again."""

_AGAIN_S = 0.3

_TRIP_S = 0.1
"""A request is at its router by then."""

_PATH = "/v1/completions"

_MOVED = ("stream_moved",)
_SHARING: dict[str, tuple[str, ...]] = {"pair": _MOVED, "joins": _MOVED, "cancels": (), "returns": (), "forgets": ()}
"""How a stream ends for its first reader if another one reads it at another router."""


def body_of(request: Request) -> dict[str, Any]:
    """The request as JSON."""
    ids = list(request.prompt_ids)
    body: dict[str, Any] = {
        "model": model.MODEL,
        "prompt": "".join(map(model.text_of, ids)) if request.is_text else ids,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "n": request.choices,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.stops:
        body["stop"] = list(request.stops)
    if request.stop_ids:
        body["stop_token_ids"] = list(request.stop_ids)
    return body


class Notebook:
    """What one reader has seen: the histories of all choices."""

    def __init__(self, world: "World", histories: list[History]) -> None:
        self.histories = histories
        self.request_id: str | None = None
        self.last_event_id = ""
        self.is_complete = False
        """It has got the end mark."""
        self.has_usage = False
        self.home: RouterProcess | None = None
        """The router process that began the stream."""
        self.source: RouterProcess | None = None
        """The router process that it reads from."""
        self.is_gone = False
        """It came back when the stream could not be there any more."""
        self._world = world

    @property
    def has_ended(self) -> bool:
        return all(history.ended_at is not None for history in self.histories)

    @property
    def tokens(self) -> int:
        """Of the first choice."""
        return max((event.tokens for event in self.histories[0].events), default=0)

    def note(self, event: ServerSentEvent) -> None:
        """Write an event of the answer down."""
        now, kernel = self._world.kernel.now, self._world.kernel
        if event.data == "[DONE]":
            self.is_complete = True
            kernel.trace("done", self.histories[0].name)
            return
        body = json.loads(event.data)
        if "error" in body:
            self.fail(str(body["error"].get("code")))
            return
        if event.id:
            self.last_event_id = event.id
            self.request_id = self.request_id or event.id.rpartition(":")[0]
        if body.get("usage") is not None:
            self.has_usage = True
            if len(self.histories) == 1:
                self.histories[0].usage = body["usage"]["completion_tokens"]
        for choice in body["choices"]:
            index = choice["index"]
            history = self.histories[index]
            tokens = int(event.id.rpartition(":")[2].split(",")[index].rstrip("f"))
            if choice["text"]:
                self._add(history, Event(now, Kind.TEXT, choice["text"], tokens))
            if choice["finish_reason"] is not None:
                self._add(history, Event(now, Kind.FINISH, choice["finish_reason"]))
            self._note_progress(event.id.rpartition(":")[0], index, tokens, choice["finish_reason"])

    def _note_progress(self, request_id: str, index: int, tokens: int, finish: str | None) -> None:
        stream = None if self.source is None else self._world.stream_of(self.source, request_id, index)
        if stream is not None and stream.process is self.source:
            stream.delivered = max(stream.delivered, tokens)
            if finish is not None:
                stream.finished_at = self._world.kernel.now

    def fail(self, code: str) -> None:
        """The answer has failed: an error ends the choices without a finish. After all finishes it is one too many."""
        for history in [each for each in self.histories if each.ended_at is None] or self.histories:
            self._add(history, Event(self._world.kernel.now, Kind.ERROR, code))

    @property
    def has_failed(self) -> bool:
        return any(event.kind is Kind.ERROR for history in self.histories for event in history.events)

    def end(self, kind: Kind) -> None:
        """The client goes, or gives up: this ends the choices that have not ended."""
        for history in self.histories:
            if history.ended_at is None:
                self._add(history, Event(self._world.kernel.now, kind))

    def note_broken(self) -> None:
        """Note that its connection broke."""
        self._world.broken |= {history.name for history in self.histories}

    def explain(self, *codes: str) -> None:
        """Note errors that what happened to this client explains."""
        for history in self.histories:
            history.explained |= set(codes)

    def pause(self, seconds: float) -> None:
        """Note that the client itself did not read for so long."""
        for history in self.histories:
            history.paused_s += seconds

    def _add(self, history: History, event: Event) -> None:
        history.events.append(event)
        self._world.kernel.trace("visitor", history.name, event.kind, event.value, event.tokens)


class Visitor:
    """One client with its request."""

    def __init__(self, world: "World", request: Request, index: int, on_end: Callable[[], None]) -> None:
        assert request.visit is not None
        self.request = request
        self.visit = request.visit
        self._world = world
        self._wire: Wire = world.wire
        self._index = index
        self._rng = Random(f"{request.name}/{request.seed}/visitor")
        self._on_end = on_end
        self._key = f"key-{request.name}-{request.seed}"
        self.book = Notebook(world, world.open_readers(request, ""))
        self._exchange: Exchange | None = None
        """The library's connection."""
        self._silence_s = SILENCE_S
        self._refusal: Head | None = None
        """The head of the library's answer, if that is a refusal."""
        self._others: list[asyncio.Task[None]] = []
        if world.state is not None and self.visit.kind != "library":
            # It does not come again by itself, as the library does.
            self.book.explain("unavailable", *_SHARING[self.visit.kind])

    async def run(self) -> None:
        try:
            if self.visit.kind == "library":
                await self._use_library()
            else:
                await self._use_http()
        except Exception as error:
            self.book.fail(repr(error))
        finally:
            self._on_end()

    # With the library.

    async def _use_library(self) -> None:
        loop = asyncio.get_running_loop()
        policy = Policy(
            timeout_s=self.request.timeout_s,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            silence_timeout_s=SILENCE_S,
            avoid_s=1.0,
        )
        count = self._world.plan.routers
        roots = [f"http://10.1.0.{index + 1}:8000" for index in range(count)]
        routers = Routers(roots, avoid_s=policy.avoid_s, clock=loop.time, random=self._rng)
        headers = {"X-Session-ID": self.request.session, "Idempotency-Key": self._key}
        outgoing = Outgoing("POST", _PATH, headers, json.dumps(body_of(self.request)).encode())
        answer = exchange_for(outgoing, routers, policy, loop.time, self._rng)
        assert isinstance(answer, StreamedAnswer)
        self.book.explain("connection_failed", "draining")
        if self._world.plan.keeps_streams:
            policy = replace(policy, on_lost="error")
        for history in self.book.histories:
            # The longest silence is fixed when a connection begins, so the end of one that vanishes is found this late.
            history.tardy_s = SILENCE_S
        try:
            await self._carry_out(answer.run())
        except LockstepError as error:
            if self.request.name in self._world.excused:
                self.book.explain("stream_lost")
            if not self._lacks_usage(error):
                self.book.fail(str(error.code))
        if not self.book.has_ended:
            self.book.end(Kind.LEFT)
            if (last := answer.last_request()) is not None:
                with suppress(BrokenError):
                    await (await self._open_at(*last)).read(SILENCE_S)

    def _lacks_usage(self, error: LockstepError) -> bool:
        """Whether the time is over for an answer of which all choices have come and the usage has not."""
        if error.code != "deadline_exceeded" or self.request.timeout_s is None or self.book.has_usage:
            return False
        is_over = self._world.kernel.now >= self.book.histories[0].arrived_at + self.request.timeout_s
        return is_over and self.book.has_ended

    async def _carry_out(self, steps: Steps[None]) -> None:
        """Do what the library wants, until it has the answer or the client leaves."""
        result, broken = None, None
        leaves = self.visit.leaves_after[:1]
        with closing(steps), ExitStack() as at_end:
            at_end.callback(self._hang_up)  # after an error of the library's own, too
            while True:
                try:
                    step = steps.send(result) if broken is None else steps.throw(broken)
                except StopIteration:
                    return
                result = broken = None
                if isinstance(step, Give):
                    self._take_given(step.value)
                    if leaves and self.book.tokens >= leaves[0] and not self.book.has_ended:
                        return
                    continue
                try:
                    result = await self._do(step)
                except BrokenError as error:
                    broken = error
                    self.book.note_broken()

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        if isinstance(step, Expect):
            self._silence_s = step.silence_s
            return None
        if isinstance(step, Send):
            self._hang_up()
            self._exchange = await self._open_at(step.router, step.request, step.silence_s)
            self.book.source, self._silence_s = self._exchange.process, step.silence_s
        assert self._exchange is not None
        return await self._exchange.read(self._silence_s)

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _take_given(self, value: Any) -> None:
        if isinstance(value, Head):
            self._refusal = value if value.status >= 400 else None
        elif self._refusal is not None:
            self.book.fail(str(from_response(self._refusal.status, self._refusal.headers, value).code))
        else:
            self.book.note(value)

    async def _open_at(self, address: Address, outgoing: Outgoing, silence_s: float = SILENCE_S) -> Exchange:
        index = int(address.root.split(".")[3].partition(":")[0]) - 1
        return await self._open(outgoing, index, silence_s)

    async def _open(self, outgoing: Outgoing, index: int, silence_s: float = SILENCE_S) -> Exchange:
        connect_s = min(CONNECT_TIMEOUT_S, silence_s)
        return await self._wire.open(lambda: self._world.routers[index], index, outgoing, self.request.name, connect_s)

    # By hand.

    async def _use_http(self) -> None:
        if self.visit.kind in ("pair", "joins", "cancels"):
            self._others.append(asyncio.ensure_future(self._come_second()))
        await self._read_to_end()
        for other in self._others:
            await other

    async def _read_to_end(self) -> None:
        book, visit = self.book, self.visit
        times = iter(zip(visit.leaves_after, visit.away, strict=True))
        leave = next(times, None)
        outgoing = self._post()
        until = self._world.kernel.now + PATIENCE_S
        while True:
            began = self._world.kernel.now
            try:
                exchange = await self._open(outgoing, self._index)
                has_left = await self._read(exchange, book, None if leave is None else leave[0])
            except BrokenError:
                book.note_broken()
                gives_up = self._world.kernel.now > until
                if not gives_up:
                    await asyncio.sleep(_AGAIN_S)
                # The router learns of a timeout again, or ends the stream while the client is not there.
                book.pause(self._world.kernel.now - max(began, book.histories[0].progress_at))
                if gives_up:
                    book.end(Kind.BROKEN)
                    return
                outgoing = self._again(outgoing, book)
                continue
            until = self._world.kernel.now + PATIENCE_S
            if not has_left:
                return
            assert leave is not None
            if visit.kind == "forgets":
                book.end(Kind.LEFT)
                return
            away_s = leave[1] * self._world.window_s
            leave = next(times, None)
            book.pause(away_s)
            await asyncio.sleep(away_s)
            outgoing = self._again(outgoing, book)

    def _post(self) -> Outgoing:
        headers = {
            "X-Session-ID": self.request.session,
            "X-Lockstep-Resumable": "true",
            "Content-Type": "application/json",
        }
        if self.visit.kind in ("joins", "cancels"):
            headers["Idempotency-Key"] = self._key
        if self.request.timeout_s is not None:
            headers["X-Request-Timeout"] = f"{self.request.timeout_s:.3f}"
        return Outgoing("POST", _PATH, headers, json.dumps(body_of(self.request)).encode())

    def _again(self, outgoing: Outgoing, book: Notebook) -> Outgoing:
        """The request with which the client comes back: for the rest of the stream, if it knows which one."""
        if book.request_id is None:
            return outgoing
        track = self._track(book)
        if self._world.state is not None:
            self._index = self._choose_router()
        if not self._must_exist(book):
            book.explain("stream_not_found")
        if track is not None and track.cancelled_at is not None:
            book.explain("cancelled")
        if self._world.state is None:
            book.is_gone = track is not None and track.cannot_exist(self._world.kernel.now, self._world.window_s)
        headers = {"Last-Event-ID": book.last_event_id} if book.last_event_id else {}
        return Outgoing("GET", f"/v1/streams/{book.request_id}", headers)

    def _track(self, book: Notebook) -> "Track | None":
        """What is known of the stream, if its router process is the one that began and has not been disturbed."""
        if self._world.state is not None:
            return self._world.track_of(book.request_id)
        home = book.home
        if home is None or home is not self._world.routers[self._index] or home.is_leaving or home.loop.frozen_s:
            return None
        return home.tracks.by_id.get(book.request_id or "")

    def _must_exist(self, book: Notebook) -> bool:
        """Whether a request that is sent now must find the stream."""
        if self._world.state is not None:
            return self._world.must_have(book.request_id, self._index)
        track = self._track(book)
        return track is not None and track.must_exist(self._world.kernel.now + _TRIP_S, self._world.window_s)

    def _lost(self, book: Notebook) -> bool:
        """Whether a stream that is not found has been lost: nothing else has ended it, or disturbed its router."""
        track = self._track(book)
        if self._world.state is not None and not self._must_exist(book):
            return False
        return track is not None and not track.has_failed

    def _choose_router(self) -> int:
        return self._rng.randrange(self._world.plan.routers)

    async def _read(self, exchange: Exchange, book: Notebook, leaves_after: int | None) -> bool:
        """Read an answer; True: the client has left it at its own will.

        Raises:
            BrokenError: it ended before the answer did.
        """
        try:
            head: Head = await exchange.read(SILENCE_S)
            if head.status >= 400:
                await self._take_refusal(exchange, head, book)
                return False
            book.source = exchange.process
            self._note_head(exchange, head, book)
            decoder = Decoder()
            while (chunk := await exchange.read(SILENCE_S)) is not None:
                for event in decoder.feed(chunk):
                    book.note(event)
                    if book.has_failed and exchange.process.is_leaving:
                        book.explain("draining")
                    if leaves_after is not None and book.tokens >= leaves_after and not book.has_ended:
                        return True
            if not book.is_complete and not book.has_failed:
                raise BrokenError("broken", "the answer ended without its end mark")
            return False
        finally:
            exchange.close()

    def _note_head(self, exchange: Exchange, head: Head, book: Notebook) -> None:
        if book.is_gone:
            self._world.inside.report("kept too long", book.histories[0].name, "it was found after its window")
        if book.request_id is None:
            # A head that had to go out with a comment, before the stream began, names none: the first event does.
            book.home, book.request_id = exchange.process, head.headers.get(STREAM_HEADER)

    async def _take_refusal(self, exchange: Exchange, head: Head, book: Notebook) -> None:
        content = b""
        while (chunk := await exchange.read(SILENCE_S)) is not None:
            content += chunk
        code = str(from_response(head.status, head.headers, content).code)
        if exchange.process.is_leaving:
            book.explain("draining")
        if self._track(book) is None or (self._world.state is not None and not self._must_exist(book)):
            book.explain("stream_not_found")  # its router was disturbed while the request was on its way
        if not book.has_ended:
            book.fail(code)
        elif code not in book.histories[0].explained:
            # It came back for the usage and the end mark alone.
            self._world.inside.report("lost", book.histories[0].name, f"{code} for the end of its answer")

    # The second one.

    async def _come_second(self) -> None:
        await asyncio.sleep(self.visit.later_s)
        while self.book.request_id is None:
            if self.book.has_ended:
                return
            await asyncio.sleep(0.02)
        if self._world.state is not None:
            self._index = self._choose_router()
        if self.visit.kind == "cancels":
            await self._cancel()
        else:
            await self._read_second()

    async def _read_second(self) -> None:
        second = Notebook(self._world, self._world.open_readers(self.request, "~"))
        if self._world.state is not None:
            second.explain("unavailable", *_MOVED)
        if self.request.timeout_s is not None:
            # The time began with the first request.
            second.explain("deadline_exceeded")
            for history in second.histories:
                history.timeout_s = None
        outgoing = self._post()
        if self.visit.kind == "pair":
            second.request_id, second.home = self.book.request_id, self.book.home
            outgoing = self._again(outgoing, second)
        must_join = self._must_exist(self.book)
        try:
            exchange = await self._open(outgoing, self._index)
            await self._read(exchange, second, None)
        except BrokenError:
            second.note_broken()
            second.end(Kind.BROKEN)
        is_other = second.request_id not in (None, self.book.request_id)
        if is_other and must_join and self._lost(self.book):
            self._world.inside.report("generated twice", second.histories[0].name, "its key named another stream")

    async def _cancel(self) -> None:
        book, name = self.book, self.book.histories[0].name
        path, headers = f"/v1/streams/{book.request_id}", {}
        if self.visit.by_key:
            path, headers = "/v1/streams", {"Idempotency-Key": self._key}
        track = self._track(book)
        must_be = self._must_exist(book)
        request_id = book.request_id
        book.explain("cancelled", "stream_not_found")
        try:
            head = await self._ask(Outgoing("DELETE", path, headers))
            if head.status == 404 and must_be and self._lost(book):
                self._world.inside.report("lost", name, "its cancel found no stream")
            if head.status != 200:
                return
            if track is not None:
                track.cancelled_at = self._world.kernel.now
            head = await self._ask(Outgoing("GET", f"/v1/streams/{request_id}"))
            if head.status < 400 and (self._world.state is None or self._world.plan.keeps_streams):
                self._world.inside.report("kept too long", name, "it was found after its cancel")
        except BrokenError:
            pass

    async def _ask(self, outgoing: Outgoing) -> Head:
        exchange = await self._open(outgoing, self._index)
        try:
            head: Head = await exchange.read(SILENCE_S)
            return head
        finally:
            exchange.close()
