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
from contextlib import ExitStack
from typing import IO

from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, Release
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.logs.lines import MAX_LINE_CHARS, Line, harmless, parse

_MAX_WAITING = 10_000
"""Lines that are read and not shown yet; more are not read meanwhile."""
SILENT_S = 60.0
"""Without any line of what is not followed: kubectl waits longer for an API server that is cut off."""
_END_S = 5.0
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
        follow_s: wait for new lines for so long; None: do not.
        on_failure: called with a sentence for each `kubectl logs` that has failed, when its lines are read.
    """
    names = [pod.name for pod in release.require() if pod.component in (ROUTER, WORKER, STATE)]
    options = [f"--tail={tail}", *([f"--since-time={since}"] if since else []), *(["-f"] if follow_s else [])]
    with ExitStack() as stack:
        running = {
            # Of the container that the pod's annotation `default-container` names, which is the service.
            name: stack.enter_context(_Running(release.kubectl, ["logs", name, *options]))
            for name in names
        }
        yield from _merged({name: each.lines for name, each in running.items()}, follow_s)
        # Those that still follow when the time is over have not failed.
        for name, each in running.items():
            if (failure := each.failure(waits=follow_s is None)) is not None:
                on_failure(f"kubectl logs {name}: {failure}")


class _Running:
    """A `kubectl logs` that ends with the block."""

    def __init__(self, kubectl: Kubectl, arguments: Sequence[str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed at the exit
        self._process: subprocess.Popen[str] = kubectl.start(*arguments, errors=self._errors)
        assert self._process.stdout is not None
        self.lines: IO[str] = self._process.stdout

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        self._errors.close()

    def failure(self, *, waits: bool) -> str | None:
        """How it has failed; None: it has not, or it still runs. `waits`: it is given some time to end."""
        try:
            code = self._process.wait(_END_S) if waits else self._process.poll()
        except subprocess.TimeoutExpired:
            return "it gives no more lines and does not end"
        if not code:
            return None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _MAX_ERROR_CHARS))
        said = self._errors.read().strip().rpartition("\n")[2]
        return f"exit code {code}: {harmless(said)}" if said else f"exit code {code}"


def _merged(sources: dict[str, IO[str]], follow_s: float | None) -> Iterator[Line]:
    """The lines of all sources as they come, until all have ended, the time is over or, without one, none comes."""
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
            line = waiting.get(timeout=SILENT_S if ends_at is None else max(0.0, ends_at - time.monotonic()))
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
