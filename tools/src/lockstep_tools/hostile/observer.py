"""Well-behaved clients that measure: streams that note every silence, a probe of /healthz, and short new requests."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Self

from lockstep_tools.hostile.attacks import MODEL, Address, request

_TIMEOUT_S = 120.0
_END_S = 5.0
_PROBE_EVERY_S = 0.02
_ASK_EVERY_S = 0.1
_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: router\r\n\r\n"


@dataclass
class Noticed:
    """What the clients noticed in some time."""

    silences_s: list[float] = field(default_factory=list)
    """Of each stream, the longest."""
    probes_s: list[float] = field(default_factory=list)
    """How long /healthz took, each time."""
    first_tokens_s: list[float] = field(default_factory=list)
    """How long a new request on a new connection took to its first token, each time."""
    failures: list[str] = field(default_factory=list)

    @property
    def silence_s(self) -> float:
        """The longest of any stream."""
        return max(self.silences_s, default=0.0)

    def probe_s(self, share: float) -> float:
        """The quantile of the time of /healthz."""
        ordered = sorted(self.probes_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    @property
    def first_token_s(self) -> float:
        """The longest time to a first token."""
        return max(self.first_tokens_s, default=0.0)


class Observer:
    """Eight streams, a probe and a ninth client with short requests, for as long as it is entered. `take` gives what
    they have noticed since last time.
    """

    def __init__(self, address: Address, *, streams: int = 8, max_tokens: int = 100_000) -> None:
        self._address = address
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._last_at = [self._since] * streams
        self._longest = [0.0] * streams
        self._probes: list[float] = []
        self._probe_began: float | None = None
        self._answered_probe_began = 0.0
        self._first_tokens: list[float] = []
        self._asked_at: float | None = None
        self._failures: list[str] = []
        self._max_tokens = max_tokens
        work = [*((self._stream, index) for index in range(streams)), (self._probe, 0), (self._ask, 0)]
        self._threads = [threading.Thread(target=self._guard, args=arguments, daemon=True) for arguments in work]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # Those that wait for a silent router end with it.
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def take(self) -> Noticed:
        """What has been noticed since the last call; silences, probes and waits that still last count."""
        with self._lock:
            now = time.monotonic()
            silences = [
                max(longest, now - max(last_at, self._since))
                for longest, last_at in zip(self._longest, self._last_at, strict=True)
            ]
            probes = self._probes + self._lasting(self._probe_began, now)
            first_tokens = self._first_tokens + self._lasting(self._asked_at, now)
            noticed = Noticed(silences, probes, first_tokens, self._failures)
            self._since, self._longest = now, [0.0] * len(self._longest)
            self._probes, self._first_tokens, self._failures = [], [], []
        return noticed

    def is_served_since(self, at: float) -> bool:
        """Whether each stream has had a token after that time, a probe that began after it was answered, and no short
        request from before it still waits: every silence that lasted at that time has its end.
        """
        with self._lock:
            waits = self._asked_at is not None and self._asked_at <= at
            return min([self._answered_probe_began, *self._last_at]) > at and not waits

    def _lasting(self, began: float | None, now: float) -> list[float]:
        return [] if began is None else [now - max(began, self._since)]

    def _guard(self, work: object, index: int) -> None:
        while not self._ended.is_set():
            try:
                work(index)  # type: ignore[operator]
            except Exception as error:
                if not self._ended.is_set():
                    with self._lock:
                        self._failures.append(f"{type(error).__name__}: {error}")
                    time.sleep(0.2)

    def _stream(self, index: int) -> None:
        body = b'{"model": "%s", "prompt": "stream %d", "max_tokens": %d, "ignore_eos": true, "stream": true}'
        with socket.create_connection(self._address, _TIMEOUT_S) as line:
            line.sendall(request(body % (MODEL.encode(), index, self._max_tokens)))
            while not self._ended.is_set():
                data = line.recv(1 << 16)
                if not data:
                    raise ConnectionError("the stream has ended")
                now = time.monotonic()
                with self._lock:
                    silence = now - max(self._last_at[index], self._since)
                    self._longest[index] = max(self._longest[index], silence)
                    self._last_at[index] = now

    def _probe(self, _: int) -> None:
        with contextlib.closing(socket.create_connection(self._address, _TIMEOUT_S)) as line:
            while not self._ended.is_set():
                with self._lock:
                    self._probe_began = began = time.monotonic()
                line.sendall(_HEALTH)
                answer = b""
                while not answer.endswith(b"}"):
                    if not (data := line.recv(1 << 12)):
                        raise ConnectionError("/healthz does not answer")
                    answer += data
                if b" 200 " not in answer:
                    raise ConnectionError("/healthz is not well")
                with self._lock:
                    self._probes.append(time.monotonic() - max(began, self._since))
                    self._probe_began, self._answered_probe_began = None, began
                time.sleep(_PROBE_EVERY_S)

    def _ask(self, _: int) -> None:
        body = b'{"model": "%s", "prompt": "a new request", "max_tokens": 2, "stream": true}' % MODEL.encode()
        while not self._ended.is_set():
            with self._lock:
                self._asked_at = began = time.monotonic()
            with socket.create_connection(self._address, _TIMEOUT_S) as line:
                line.sendall(request(body, more=b"connection: close\r\n"))
                answer = b""
                while b"data: {" not in answer:
                    if not (data := line.recv(1 << 12)):
                        raise ConnectionError(f"a new request got no token: {answer[:300]!r}")
                    answer += data
                with self._lock:
                    self._first_tokens.append(time.monotonic() - max(began, self._since))
                    self._asked_at = None
                while data := line.recv(1 << 12):
                    answer += data
            if b" 200 " not in answer.partition(b"\r\n")[0] or b"[DONE]" not in answer:
                raise ConnectionError(f"a new request failed: {answer[:300]!r}")
            time.sleep(_ASK_EVERY_S)
