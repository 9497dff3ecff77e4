"""Where log lines come from: files, stdin, and the pods of a release by `kubectl logs`, several at once."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO

from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, Release
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.logs.lines import MAX_LINE_CHARS, Line, parse

_MAX_WAITING = 10_000
"""Lines that are read and not shown yet; more are not read meanwhile."""
_END_S = 5.0


def from_files(paths: Sequence[str]) -> Iterator[Line]:
    """The lines of files, one file after the other; `-` is stdin.

    Raises:
        CommandError: a file cannot be read.
    """
    for path in paths:
        if path == "-":
            yield from _lines("stdin", sys.stdin)
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _lines(path, file)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror or error}", UNUSABLE) from None


def from_release(release: Release, *, tail: int, since: str, follow_s: float | None) -> Iterator[Line]:
    """The lines of all routers, workers and state servers of a release.

    Args:
        release: it must have pods.
        tail: most lines of each pod, the newest; with `follow_s` those before the new ones.
        since: as `Line.time`; empty: no limit.
        follow_s: wait for new lines for so long; None: do not.
    """
    containers = [(pod.name, pod.component) for pod in release.require() if pod.component in (ROUTER, WORKER, STATE)]
    options = [f"--tail={tail}", *([f"--since-time={since}"] if since else []), *(["-f"] if follow_s else [])]
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_Running(release.kubectl, ["logs", name, "-c", container, *options]))
            for name, container in containers
        }
        yield from _merged({name: each.lines for name, each in running.items()}, follow_s)


class _Running:
    """A `kubectl logs` that ends with the block."""

    def __init__(self, kubectl: Kubectl, arguments: Sequence[str]) -> None:
        self._process: subprocess.Popen[str] = kubectl.start(*arguments)
        assert self._process.stdout is not None
        self.lines: IO[str] = self._process.stdout

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_END_S)


def _merged(sources: dict[str, IO[str]], follow_s: float | None) -> Iterator[Line]:
    """The lines of all sources as they come, until all have ended or the time is over."""
    waiting: queue.Queue[Line | None] = queue.Queue(_MAX_WAITING)

    def read(name: str, source: IO[str]) -> None:
        try:
            for line in _lines(name, source):
                waiting.put(line)
        except (OSError, ValueError):
            pass  # the block has been left
        waiting.put(None)

    for name, source in sources.items():
        threading.Thread(target=read, args=(name, source), daemon=True).start()
    ends_at = None if follow_s is None else time.monotonic() + follow_s
    left = len(sources)
    while left:
        try:
            line = waiting.get(timeout=None if ends_at is None else max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return
        if line is None:
            left -= 1
        else:
            yield line


def _lines(name: str, file: IO[str]) -> Iterator[Line]:
    """The lines of a file, in bounded memory however long they are."""
    is_rest = False
    while text := file.readline(MAX_LINE_CHARS):
        if not is_rest:
            yield parse(name, text)
        is_rest = not text.endswith("\n")


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Sorted by time; a line without one stays behind the line before it."""
    keyed: list[tuple[str, Line]] = []
    last: dict[str, str] = {}
    for line in lines:
        last[line.source] = line.time or last.get(line.source, "")
        keyed.append((last[line.source], line))
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]
