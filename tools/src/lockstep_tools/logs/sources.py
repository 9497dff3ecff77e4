"""Where log lines come from: files, stdin, and the pods of a release by `kubectl logs`, several at once."""

import heapq
import io
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Self

from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, Pod, Release
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.logs.lines import MAX_LINE_CHARS, Line, moment, parse

_MAX_WAITING = 10_000
"""Lines that are read and not shown yet; more are not read meanwhile."""
SILENT_S = 60.0
"""Without any line of what is not followed: kubectl waits longer for an API server that is cut off."""
_END_S = 5.0
LOOK_S = 2.0
"""Between two looks at the pods of a release whose lines are followed."""
_MAX_ERROR_CHARS = 1000


def from_files(paths: Sequence[str]) -> Iterator[Line]:
    """The lines of files, one file after the other; `-` is stdin.

    Raises:
        CommandError: a file cannot be read.
    """
    for path in paths:
        if path == "-":
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            yield from _lines("stdin", sys.stdin)
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _lines(path, file)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror or error}", UNUSABLE) from None


def from_release(
    release: Release, *, tail: int, since: str, follow_s: float | None, on_failure: Callable[[str], None]
) -> Iterator[Line]:
    """The lines of all routers, workers and state servers of a release.

    Args:
        release: it must have pods.
        tail: most lines of each pod, the newest; with `follow_s` those before the new ones.
        since: as `Line.time`; empty: no limit.
        follow_s: wait for new lines for so long, also for those of containers that start meanwhile; None: do not.
        on_failure: called with a sentence for each pod whose last `kubectl logs` has failed, when the lines are read.
    """
    limits = [f"--tail={tail}", *([f"--since-time={since}"] if since else [])]
    with _Reading(release.kubectl) as reading:
        if follow_s is None:
            for pod in _of_services(release.require()):
                reading.start(pod.name, limits)
            yield from reading.lines()
        else:
            yield from _followed(release, reading, limits, time.monotonic() + follow_s)
        for name, failure in reading.failures(waits=follow_s is None).items():
            on_failure(f"kubectl logs {name}: {failure}")


def _of_services(pods: Iterable[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.component in (ROUTER, WORKER, STATE)]


def _followed(release: Release, reading: "_Reading", limits: Sequence[str], ends_at: float) -> Iterator[Line]:
    """New lines until a moment, or until the release has no pods. `kubectl logs -f` ends with its container, and knows
    no pods that come later, so they are looked for again and again. It also ends, without an error, when the kubelet or
    the API server is started again: a container that still runs is then read on.
    """
    begun: set[tuple[str, int]] = set()
    is_first = True
    pods = release.require()
    # Of what starts from now on, everything is new: `limits` are for the lines that containers have written before.
    running = {(pod.uid, pod.restarts) for pod in pods if pod.runs}
    while pods and time.monotonic() < ends_at:
        for pod in _of_services(pods):
            life = (pod.uid, pod.restarts)
            if reading.reads(pod.name):
                continue
            is_new = life not in begun
            if is_new or pod.runs or reading.has_failed(pod.name):
                begun.add(life)
                is_limited = is_first or (life in running and not reading.has_read(pod.name))
                options = limits if is_limited else ["--tail=-1"]
                reading.start(pod.name, ["-f", *options], goes_on=not is_new)
        is_first = False
        yield from reading.lines(min(time.monotonic() + LOOK_S, ends_at))
        with suppress(CommandError):  # of an API server that is away; what is being read may go on all the same
            pods = release.pods()


class _Reading:
    """`kubectl logs` of several pods at once, whose lines come as they are read. All end with the block."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._running: dict[str, _Running] = {}
        self._failures: dict[str, str] = {}
        self._last: dict[str, str] = {}
        """The time of each pod's last line."""
        self._waiting: queue.Queue[tuple[str, Line | None]] = queue.Queue(_MAX_WAITING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.end()

    def start(self, name: str, options: Sequence[str], *, goes_on: bool = False) -> None:
        """Read a pod's lines: of the container that its annotation `default-container` names, which is the service.
        Where this goes on with a container, or the last try has failed after some lines, those after them, and some of
        them again: kubectl goes by whole seconds.
        """
        if goes_on or self.has_failed(name):
            with suppress(ValueError):  # no line, or one whose time is none
                options = [*options, f"--since-time={moment(self._last.get(name, ''), datetime.now(UTC))}"]
        running = self._running[name] = _Running(self._kubectl, ["logs", name, *options])
        threading.Thread(target=self._read, args=(name, running.lines), daemon=True).start()

    def _read(self, name: str, source: IO[str]) -> None:
        try:
            for line in _lines(name, source):
                self._waiting.put((name, line))
        except (OSError, ValueError):
            pass  # the block has been left
        self._waiting.put((name, None))

    def reads(self, name: str) -> bool:
        """Whether a pod's lines are being read."""
        return name in self._running

    def has_read(self, name: str) -> bool:
        """Whether a pod has given a line."""
        return name in self._last

    def has_failed(self, name: str) -> bool:
        """Whether the last try to read a pod's lines has failed."""
        return name in self._failures

    def lines(self, until: float | None = None) -> Iterator[Line]:
        """The lines of all pods as they come, until a moment; without one until all have ended, or none comes."""
        while self._running or until is not None:
            left_s = SILENT_S if until is None else until - time.monotonic()
            if left_s <= 0:
                return  # though lines may wait: others may have to be looked for
            try:
                name, line = self._waiting.get(timeout=left_s)
            except queue.Empty:
                return
            if line is not None:
                self._last[name] = line.time or self._last.get(name, "")
                self._failures.pop(name, None)  # this try reads the pod's lines, as far as is known
                yield line
                continue
            running = self._running.pop(name)
            self._failures.pop(name, None)
            if (failure := running.failure()) is not None:
                self._failures[name] = failure
            running.end()

    def failures(self, *, waits: bool) -> dict[str, str]:
        """By pod, how its last `kubectl logs` has failed. `waits`: those that still run should have ended."""
        running = {name: each.failure() for name, each in self._running.items()} if waits else {}
        return self._failures | {name: failure for name, failure in running.items() if failure is not None}


class _Running:
    """A `kubectl logs`."""

    def __init__(self, kubectl: Kubectl, arguments: Sequence[str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `end`
        self._process: subprocess.Popen[str] = kubectl.start(*arguments, errors=self._errors)
        assert self._process.stdout is not None
        self.lines: IO[str] = self._process.stdout

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.wait(_END_S)
        self._errors.close()

    def failure(self) -> str | None:
        """How it has failed, when its lines have ended; None: it has not."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it gives no more lines and does not end"
        if not code:
            return None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _MAX_ERROR_CHARS))
        said = self._errors.read().strip().rpartition("\n")[2]
        return f"exit code {code}: {harmless(said)}" if said else f"exit code {code}"


def _lines(name: str, file: IO[str]) -> Iterator[Line]:
    """The lines of a file, in bounded memory however long they are."""
    is_rest = False
    while text := file.readline(MAX_LINE_CHARS):
        if not is_rest:
            yield parse(name, text)
        is_rest = not text.endswith("\n")


def in_order(lines: Iterable[Line], most: int) -> list[Line]:
    """The newest lines of all sources, sorted by time; a line without one stays behind the line before it. No more
    lines than these are kept meanwhile.
    """
    kept: list[tuple[str, int, Line]] = []
    last: dict[str, str] = {}
    for number, line in enumerate(lines):
        last[line.source] = line.time or last.get(line.source, "")
        entry = (last[line.source], number, line)
        if len(kept) < most:
            heapq.heappush(kept, entry)
        else:
            heapq.heappushpop(kept, entry)
    return [line for *_, line in sorted(kept, key=lambda entry: entry[:2])]
