"""How long the client waits, how often it tries again, and what it does when a stream is lost."""

from dataclasses import dataclass
from random import Random
from typing import Literal

OnLost = Literal["restart", "error"]


@dataclass(frozen=True)
class Policy:
    """Limits of one request. Times are in seconds."""

    timeout_s: float | None = 600.0
    """For the whole request with all its tries; None: no limit."""
    connect_timeout_s: float = 5.0
    """For each connection."""
    silence_timeout_s: float = 45.0
    """A connection on which nothing comes for so long is given up."""
    keepalive_slack_s: float | None = 5.0
    """A router says how long its streams are silent at most: it sends comments. A stream that is silent for so much
    longer is given up: its connection has vanished, or its router hangs. None: only `silence_timeout_s` counts,
    as it must behind a proxy that passes the header on and buffers the comments."""
    probe_after_s: float = 10.0
    """Over gRPC, where streams have no comments: after so long without an event the router is asked whether it lives,
    and has `connect_timeout_s` for the answer. It is asked sooner if the time for the request would end before that."""
    retries: int = 5
    """Rounds through all routers after the first, without anything new of the answer."""
    backoff_s: float = 0.1
    """The most that is waited before the second round; doubled for each further one, drawn evenly from 0 to that."""
    max_backoff_s: float = 5.0
    max_retry_after_s: float = 30.0
    """If a router asks for a longer wait than this, the request fails at once, with what the router asked for."""
    avoid_s: float = 5.0
    """A router that failed is asked last for so long; doubled for each further failure, up to a minute."""
    on_lost: OnLost = "restart"
    """When no router can continue a stream: `restart` begins it again elsewhere with the same seed, checks that the
    repeat equals what has been received, and continues from there; `error` raises `StreamLost`."""

    def __post_init__(self) -> None:
        if self.on_lost not in ("restart", "error"):
            raise ValueError(f"on_lost must be restart or error, not {self.on_lost!r}")
        if self.retries < 0:
            raise ValueError("retries must not be negative")
        if self.keepalive_slack_s is not None and self.keepalive_slack_s < 0:
            raise ValueError("keepalive_slack_s must not be negative")
        for name in ("timeout_s", "connect_timeout_s", "silence_timeout_s", "probe_after_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive")

    def backoff(self, round_: int, random: Random) -> float:
        """The wait before a round (1: the second): full jitter."""
        return random.uniform(0, min(self.max_backoff_s, self.backoff_s * 2.0 ** min(round_ - 1, 32)))
