"""Requests for answers: a stream is continued when its connection breaks, a whole answer is asked for again."""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from lockstep_client.attempts import Attempts, RefusedError, json_object
from lockstep_client.channels import DivergedError
from lockstep_client.errors import (
    RETRYABLE_CODES,
    ConnectionFailedError,
    DeadlineExceededError,
    LockstepError,
    ProtocolError,
    Received,
    StreamDiverged,
    StreamLost,
)
from lockstep_client.policy import Policy
from lockstep_client.response_transcript import ResponseTranscript
from lockstep_client.routers import Router, Routers
from lockstep_client.sse import Decoder, EventTooLongError, ServerSentEvent
from lockstep_client.steps import BrokenError, Chunk, Expect, Give, Head, Outgoing, Read, Send, Steps, read_all
from lockstep_client.transcript import DONE, Transcript

AnyTranscript = Transcript | ResponseTranscript

MAX_ANSWER_BYTES = 256 << 20

RESUMABLE_HEADER = "X-Lockstep-Resumable"
KEY_HEADER = "Idempotency-Key"
LAST_EVENT_HEADER = "Last-Event-ID"
STREAM_HEADER = "x-lockstep-stream-id"
ROUTER_HEADER = "x-lockstep-router"
SILENCE_HEADER = "x-lockstep-max-silence"
"""How many seconds a stream of this router is silent at most."""
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")

_ENDPOINTS = ("/chat/completions", "/completions", "/responses")
_REPEATABLE = ("/embeddings", "/tokenize", "/detokenize")
"""Endpoints that compute and change nothing, with an answer in one piece."""
_ABOUT_THE_ANSWER = frozenset(
    {
        "accept",
        "connection",
        "content-encoding",
        "content-type",
        "expect",
        "idempotency-key",
        "last-event-id",
        "x-lockstep-event-ids",
        "x-lockstep-resumable",
        "x-request-timeout",
        "x-session-id",
    }
)
"""Headers of a request for an answer that say nothing about its sender. All others go with what resumes or cancels the
answer: a gateway before the routers may know its clients by any of them.
"""
_UNKNOWN_STATUSES = frozenset({400, 404, 405, 422, 501})
"""How routers answer that cannot resume a stream: they do not have it, do not have this much of it, or never resume."""
_SEEDS = 1 << 53
"""The client's seeds are below it: any language's JSON has these numbers exactly."""
_ELSEWHERE_TRIES = 8
"""Connections to one address behind which another router answered than the one that has the stream."""


def endpoint_of(path: str) -> str | None:
    """The endpoint that generates an answer and that a path ends with; None: another one."""
    return next((endpoint for endpoint in _ENDPOINTS if path.endswith(endpoint)), None)


def with_seed(body: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The body with a seed, so that a repeat of the request gives the same tokens.

    Args:
        body: of the request.
        key: that the caller has given the request: the seed follows from it, as requests with one key must be equal.
    """
    if body.get("seed") is not None:
        return dict(body)
    if key is None:
        return {**body, "seed": secrets.randbelow(_SEEDS)}
    return {**body, "seed": int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % _SEEDS}


def _streams_path(request: Outgoing, stream_id: str | None = None) -> str:
    """The path of streams, or of one of them, under the same root as the path of a request for an answer. It has the
    same query: a gateway before the routers may know its clients by that.
    """
    path = request.path.partition("?")[0]
    endpoint = endpoint_of(path)
    assert endpoint is not None
    streams = path.removesuffix(endpoint) + "/streams"
    return (streams if stream_id is None else f"{streams}/{stream_id}") + _query_of(request)


def _query_of(request: Outgoing) -> str:
    """The query of the request with its question mark; empty if it has none."""
    _, mark, query = request.path.partition("?")
    return mark + query


def _cancel_by_key(request: Outgoing) -> Outgoing:
    """What ends the generation of a request whose id is not known."""
    key = _key_of(request.headers)
    headers = {} if key is None else {KEY_HEADER: key}
    return Outgoing("DELETE", _streams_path(request), _sender_of(request) | headers)


def _sender_of(request: Outgoing) -> dict[str, str]:
    """The headers of the request that are about its sender."""
    return {name: value for name, value in request.headers.items() if name.lower() not in _ABOUT_THE_ANSWER}


def _key_of(headers: Mapping[str, str]) -> str | None:
    return next((value for name, value in headers.items() if name.lower() == KEY_HEADER.lower()), None)


def _keyed(headers: Mapping[str, str]) -> dict[str, str]:
    is_keyed = _key_of(headers) is not None
    return dict(headers) if is_keyed else {**headers, KEY_HEADER: secrets.token_urlsafe(24)}


class WholeAnswer:
    """A request for an answer in one piece. With a key, which the same router gets each time, it is generated once.

    Args:
        is_keyed: whether a key may be added. Without one every try computes the answer from its beginning.
    """

    def __init__(self, request: Outgoing, attempts: Attempts, *, is_keyed: bool) -> None:
        headers = _keyed(request.headers) if is_keyed else request.headers
        self._request = Outgoing(request.method, request.path, headers, request.content)
        self._is_keyed = is_keyed
        self._attempts = attempts
        self._is_over = False

    def run(self) -> Steps[None]:
        """Give the head and the content of the answer, or of the refusal.

        Raises:
            LockstepError: there is no answer.
        """
        try:
            head, content = yield from self._answer()
        except RefusedError as refused:
            head, content = refused.head, refused.content
        self._is_over = True
        yield Give(head)
        yield Give(content)

    def _answer(self) -> Steps[tuple[Head, bytes]]:
        prefer: Router | None = None
        while True:
            router = yield from self._attempts.next(prefer)
            try:
                head: Head = yield Send(router, self._attempts.timed(self._request), self._attempts.silence_s())
                content = yield from read_all(MAX_ANSWER_BYTES, self._attempts.check_deadline)
            except BrokenError as broken:
                # An answer that takes long is silent. A router that lives joins the request to the one that it has,
                # if it has a key.
                if broken.kind in ("silent", "late") and (yield from self._lives(router)):
                    self._attempts.again(router)
                    if not self._is_keyed:
                        self._attempts.wait_longer()
                else:
                    self._attempts.broke(router, broken)
                    if broken.kind == "broken":
                        self._attempts.rejoin(router)
                prefer = router
                continue
            refused = RefusedError(head, content) if head.status >= 400 else None
            if refused is None or not refused.may_pass:
                self._attempts.routers.worked(router)
                return head, content
            self._attempts.refused(router, refused)

    def last_request(self) -> tuple[Router, Outgoing] | None:
        """What cancels the answer, if it may still be generated: the id of a whole answer is in its head, so its key
        names it. None if there is nothing to cancel.
        """
        router = self._attempts.last_router
        if self._is_over or router is None or not self._is_keyed:
            return None
        return router, _cancel_by_key(self._request)

    def _lives(self, router: Router) -> Steps[bool]:
        self._attempts.check_deadline()
        try:
            # A gateway before the routers may know its clients by the query as well as by the headers.
            asking = Outgoing("GET", "/healthz" + _query_of(self._request), _sender_of(self._request))
            head: Head = yield Send(router, asking, self._attempts.policy.connect_timeout_s)
            yield from read_all(1 << 16, self._attempts.check_deadline)
        except BrokenError:
            return False
        return ROUTER_HEADER in head.headers


class StreamedAnswer:
    """A request for a stream, over as many connections as it takes. Every event is given once."""

    def __init__(self, request: Outgoing, attempts: Attempts, transcript: AnyTranscript) -> None:
        headers = {**_keyed(request.headers), RESUMABLE_HEADER: "true"}
        self._request = Outgoing(request.method, request.path, headers, request.content)
        self._attempts = attempts
        self._transcript = transcript
        self._router: Router | None = None
        self._router_id: str | None = None
        """The name by which the router that has the stream calls itself."""
        self._stream_id: str | None = None
        self._last_event_id = ""
        self._failed_at = -1
        """The number of events that had been given when the stream last failed."""
        self._run_events = 0
        """Events of this run of the stream: a repeat begins another one."""
        self._has_head = False
        self._is_over = False

    @property
    def received(self) -> Received:
        """What has been given so far."""
        return Received(self._transcript.texts, self._transcript.events, self._stream_id, self._last_event_id or None)

    def run(self) -> Steps[None]:
        """Give the head, and each event of the stream once, `[DONE]` included if it has one.

        Raises:
            LockstepError: with what has been received.
        """
        try:
            yield from self._run()
        except DivergedError:
            raise StreamDiverged(
                "the repeat of the stream on another router differs from what had been received", received=self.received
            ) from None
        except LockstepError as error:
            error.received = self.received if self._has_head else None
            raise
        except RefusedError as refused:
            # What runs under this key or id then is another client's: a newer reader's, or another request's.
            self._is_over = not refused.may_pass
            if self._has_head:
                refused.error.received = self.received
                raise refused.error from None
            yield Give(refused.head)
            yield Give(refused.content)

    def last_request(self) -> tuple[Router, Outgoing] | None:
        """What cancels the stream, if it may still run; None if there is nothing to cancel."""
        router = self._router or self._attempts.last_router
        if self._is_over or router is None:
            return None
        if self._stream_id is None:
            return router, _cancel_by_key(self._request)
        path = _streams_path(self._request, self._stream_id)
        return router, Outgoing("DELETE", path, _sender_of(self._request))

    def _run(self) -> Steps[None]:
        router, head = yield from self._attempts.send(self._request, is_stream=True)
        while True:
            self._note(router, head)
            if not self._has_head:
                self._has_head = True
                yield Give(head)
            if not head.headers.get("content-type", "").startswith("text/event-stream"):
                yield from _pass_through(self._attempts)
                self._is_over = True
                return
            try:
                yield from self._relay(router)
                return
            except BrokenError as broken:
                self._attempts.broke(router, broken)
                failure = None
            except _FailedError as failed:
                failure = failed
            if (ending := self._transcript.ending()) is not None:
                self._is_over = True
                yield from map(Give, ending)
                return
            if failure is None:
                router, head = yield from self._continue(router)
                continue
            recovered = yield from self._recover(router, failure)
            if recovered is None:
                return
            router, head = recovered

    def _note(self, router: Router, head: Head) -> None:
        self._router = router
        self._router_id = head.headers.get(ROUTER_HEADER)
        self._stream_id = head.headers.get(STREAM_HEADER) or self._stream_id
        max_silence = head.headers.get(SILENCE_HEADER, "")
        if head.headers.get("content-type", "").startswith("text/event-stream"):
            # A proxy that does not pass it on may not pass the comments on either.
            self._attempts.routers.note_silence(router, float(max_silence) if _SECONDS.fullmatch(max_silence) else None)

    def _relay(self, router: Router) -> Steps[None]:
        """Give the events of one connection.

        Raises:
            BrokenError: it ended before the answer did.
            _FailedError: the stream failed in the router, and may succeed elsewhere, or all that is missing is known.
        """
        yield Expect(self._attempts.stream_silence_s(router))
        decoder = Decoder()
        while (chunk := (yield Read())) is not None:
            self._check_deadline()
            for event in _events(decoder, chunk):
                new = self._take(event)
                if new is not None:
                    self._attempts.progressed()
                    yield Give(new)
                if self._is_over:
                    return
        raise BrokenError("broken", "the stream ended before its end mark")

    def _check_deadline(self) -> None:
        """An answer whose choices are all complete is in time: what is missing of it is known.

        Raises:
            DeadlineExceededError: it is not complete.
            BrokenError: it is, and the rest is not waited for.
        """
        try:
            self._attempts.check_deadline()
        except DeadlineExceededError:
            if self._transcript.ending() is None:
                raise
            raise BrokenError("late", "the end mark did not come in time") from None

    def _take(self, event: ServerSentEvent) -> ServerSentEvent | None:
        if event.data == DONE:
            self._transcript.check_end()
            self._is_over = True
            return event
        body = json_object(event.data.encode())
        if body is None:
            raise ProtocolError("the stream has an event that is no JSON object")
        error = self._transcript.failure(body)
        if error is not None and (error.code in RETRYABLE_CODES or self._transcript.ending() is not None):
            raise _FailedError(error, event)
        if "error" in body:
            self._is_over = True
            return event
        new = self._transcript.pass_on(event, body)
        self._is_over = self._transcript.is_last(body)
        self._run_events += 1
        if event.id:
            self._last_event_id = event.id
            self._stream_id = self._stream_id or event.id.rpartition(":")[0] or None
        return new

    def _recover(self, origin: Router, failed: "_FailedError") -> Steps[tuple[Router, Head] | None]:
        """The rest of a stream that failed in a way that may pass: from a router that continues it, or from a repeat.
        None: the caller wants no repeat, and has been given the failure.
        """
        is_news, self._failed_at = self._failed_at != self._transcript.events, self._transcript.events
        if self._stream_id is not None and is_news:
            self._attempts.failed(failed.error)
            self._attempts.avoid(origin)
            resumed = yield from self._resume(origin)
            if resumed is not None:
                return resumed
        if self._attempts.policy.on_lost == "error":
            self._is_over = True
            yield Give(failed.event)
            return None
        return (yield from self._begin_again(failed.error))

    def _continue(self, origin: Router) -> Steps[tuple[Router, Head]]:
        """The rest of the stream, after its connection broke."""
        self._attempts.rejoin(origin)
        if self._stream_id is not None:
            resumed = yield from self._resume(origin)
            if resumed is not None:
                return resumed
        elif not self._run_events:
            # Nothing came: with the same key the same router joins the request to the one that it has.
            return (yield from self._attempts.send(self._request, prefer=origin, is_stream=True))
        return (yield from self._begin_again(None))

    def _begin_again(self, failure: LockstepError | None) -> Steps[tuple[Router, Head]]:
        if self._attempts.policy.on_lost == "error":
            raise StreamLost("the connection broke, and no router can continue the stream")
        self._attempts.begin_repeat(failure)
        self._transcript.start_over()
        self._stream_id, self._last_event_id, self._run_events = None, "", 0
        return (yield from self._attempts.send(self._request, is_stream=True))

    def _resume(self, origin: Router) -> Steps[tuple[Router, Head] | None]:
        """The rest of the stream from a router that has it; None: no router has it.

        Raises:
            RefusedError, LockstepError: no router answered, or the client may not read the stream any more.
        """
        assert self._stream_id is not None
        # A new connection each time: behind one address there may be several routers.
        headers = {**_sender_of(self._request), "Connection": "close", "Accept": "text/event-stream"}
        if self._last_event_id:
            headers[LAST_EVENT_HEADER] = self._last_event_id
        request = Outgoing("GET", _streams_path(self._request, self._stream_id), headers, continues=self._request)
        unknown = elsewhere = 0
        while not (unknown and self._attempts.is_round_over):
            router = yield from self._attempts.next(origin)
            try:
                head: Head = yield Send(router, self._attempts.timed(request), self._attempts.silence_s())
                if head.status < 400:
                    self._attempts.routers.worked(router)
                    return router, head
                refused = RefusedError(head, (yield from read_all(1 << 20, self._attempts.check_deadline)))
            except BrokenError as broken:
                self._attempts.broke(router, broken)
                continue
            if refused.may_pass:
                self._attempts.refused(router, refused)
            elif head.status not in _UNKNOWN_STATUSES:
                raise refused
            else:
                unknown += 1
                is_another = head.headers.get(ROUTER_HEADER) != self._router_id
                if router == origin and is_another and elsewhere < _ELSEWHERE_TRIES:
                    elsewhere += 1
                    self._attempts.again(router)
        return None


class _FailedError(Exception):
    """A stream that failed in the router, in a way that may pass or no longer matters."""

    def __init__(self, error: LockstepError, event: ServerSentEvent) -> None:
        super().__init__(error.message)
        self.error = error
        self.event = event


class PlainRequest:
    """Any other request. Its answer is given as it comes."""

    def __init__(self, request: Outgoing, attempts: Attempts, *, is_repeatable: bool) -> None:
        self._request = request
        self._attempts = attempts
        self._is_repeatable = is_repeatable

    def run(self) -> Steps[None]:
        """Give the head and the content of the answer, or of the refusal.

        Raises:
            LockstepError: no router answered.
        """
        try:
            _, head = yield from self._attempts.send(self._request, is_repeatable=self._is_repeatable)
        except RefusedError as refused:
            yield Give(refused.head)
            yield Give(refused.content)
            return
        yield Give(head)
        yield from _pass_through(self._attempts)

    def last_request(self) -> None:
        """Nothing runs on."""


Exchange = WholeAnswer | StreamedAnswer | PlainRequest


def exchange_for(
    request: Outgoing, routers: Routers, policy: Policy, clock: Callable[[], float], random: Random
) -> Exchange:
    """The way in which a request is carried out, by its method, path and body."""
    attempts = Attempts(routers, policy, clock, random)
    path = request.path.partition("?")[0]
    body = json_object(request.content) if request.method == "POST" and endpoint_of(path) else None
    if body is None:
        if request.method == "POST" and path.endswith(_REPEATABLE):
            return WholeAnswer(request, attempts, is_keyed=False)
        return PlainRequest(request, attempts, is_repeatable=request.method in ("GET", "HEAD", "OPTIONS"))
    seeded = with_seed(body, _key_of(request.headers))
    content = json.dumps(seeded, ensure_ascii=False, separators=(",", ":")).encode()
    request = Outgoing(request.method, request.path, request.headers, content)
    if not body.get("stream"):
        best_of, n = body.get("best_of"), body.get("n") or 1
        # Routers refuse a key together with it: they cannot choose the best answers again.
        is_keyed = not (isinstance(best_of, int) and isinstance(n, int) and best_of > n)
        return WholeAnswer(request, attempts, is_keyed=is_keyed)
    is_response = endpoint_of(path) == "/responses"
    return StreamedAnswer(request, attempts, ResponseTranscript() if is_response else Transcript.of(body))


def _events(decoder: Decoder, chunk: Chunk) -> list[ServerSentEvent]:
    if not isinstance(chunk, bytes):
        return chunk
    try:
        return decoder.feed(chunk)
    except EventTooLongError as error:
        raise ProtocolError(str(error)) from None


def _pass_through(attempts: Attempts) -> Steps[None]:
    try:
        while (chunk := (yield Read())) is not None:
            attempts.check_deadline()
            for each in (chunk,) if isinstance(chunk, bytes) else chunk:
                yield Give(each)
    except BrokenError as broken:
        raise ConnectionFailedError(broken.detail) from None
