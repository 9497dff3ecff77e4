"""One attack on a router with well-behaved streams: what they noticed, what the router kept, whom it still served."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_tools.hostile.attacks import door_of, longest_s
from lockstep_tools.hostile.observer import Observer
from target import Target

FLAGS = ("--max-connections", "2048")
"""Of the router: more than `slow-headers` opens, fewer than `connections` does."""
LIMITS = {
    "silence_s": 1.0,
    "healthz_p99_s": 0.1,
    "memory_peak_bytes": 768 << 20,
    "memory_left_bytes": 100 << 20,
    "vanished_s": 1.0,
}
"""Of an outcome's figures, on a machine without other work: an attack beyond one of them has succeeded."""
_SETTLE_S = 20.0
_SETTLED_BYTES = 75 << 20
"""Memory above that before the attack at which nothing more is waited for; the limit is 100 MiB."""
_GRACE_S = 30.0
"""For an attack's process to start, to prepare what it sends, and to close its connections."""
_STREAMS = 9
"""Of the observer, its short requests included."""


@dataclass
class Scene:
    """A router under well-behaved streams."""

    target: Target
    observer: Observer


@dataclass
class Outcome:
    """The figures of one attack."""

    silence_s: float
    """The longest of any well-behaved stream."""
    healthz_p50_s: float
    healthz_p99_s: float
    healthz_max_s: float
    first_token_s: float
    """The longest time of a new, short request to its first token."""
    memory_peak_bytes: int
    """Above that before the attack."""
    memory_left_bytes: int
    """The same, after the attack."""
    vanished_s: float
    """From the end of the attack until none of its streams was computed any more."""
    failures: list[str]
    """Of well-behaved clients."""
    failed: str = ""
    """Why the attack could not be made, or the router did not outlast it."""


def attack(target: Target, observer: Observer, name: str, seconds: float) -> Outcome:
    """Attack from another process, then wait until its streams have ended and the memory has come back, for a time."""
    before = target.memory_bytes()
    peak = Peak(target)
    observer.take()
    with peak:
        failed = _attack(target, name, seconds)
        ended = time.monotonic()

        def settles(is_settled: Callable[[], bool], every_s: float) -> bool:
            while not (settled := is_settled()) and target.is_alive and time.monotonic() < ended + _SETTLE_S:
                time.sleep(every_s)
            return settled

        settles(lambda: target.streams() <= _STREAMS, 0.02)
        vanished_s = time.monotonic() - ended
        # A silence may last longer than the attack.
        is_back = settles(lambda: observer.is_served_since(ended), 0.02)
        noticed = observer.take()
    settles(lambda: target.memory_bytes() - before <= _SETTLED_BYTES, 0.2)
    left = target.memory_bytes() - before
    if not target.is_alive:
        failed, left = "the router has ended", 0
    elif not is_back:
        failed = failed or f"the router does not serve everybody {_SETTLE_S:g} s after the attack"
    return Outcome(
        silence_s=noticed.silence_s,
        healthz_p50_s=noticed.probe_s(0.5),
        healthz_p99_s=noticed.probe_s(0.99),
        healthz_max_s=noticed.probe_s(1.0),
        first_token_s=noticed.first_token_s,
        memory_peak_bytes=peak.bytes - before,
        memory_left_bytes=left,
        vanished_s=vanished_s,
        failures=noticed.failures,
        failed=failed,
    )


def _attack(target: Target, name: str, seconds: float) -> str:
    """Run an attack; why it failed, or nothing."""
    host, port = target.address[0], target.grpc_port if door_of(name) == "grpc" else target.address[1]
    command = [sys.executable, "-m", "lockstep_tools.hostile.attacks", name, host, str(port), str(seconds)]
    limit_s = longest_s(name, seconds) + _GRACE_S
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate(timeout=limit_s)[1].strip()
        except subprocess.TimeoutExpired:
            return f"the attack has not ended after {limit_s:g} s"
        finally:
            process.kill()
    last = said.splitlines()[-1] if said else f"the attack ended with {process.returncode}"
    return last.removeprefix(f"attack {name}: ") if process.returncode else ""


def calm(observer: Observer, seconds: float) -> Outcome:
    """The same figures without an attack."""
    observer.take()
    time.sleep(seconds)
    noticed = observer.take()
    return Outcome(
        noticed.silence_s,
        noticed.probe_s(0.5),
        noticed.probe_s(0.99),
        noticed.probe_s(1.0),
        noticed.first_token_s,
        0,
        0,
        0.0,
        noticed.failures,
    )


class Peak:
    """The most memory that the router had while this was entered."""

    def __init__(self, target: Target) -> None:
        self.bytes = 0
        self._target = target
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, self._target.memory_bytes())
