"""The load in a pod, as read from its log: undisturbed streams, ended streams, and what routers report of workers."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockstep_tools.chaos.kubectl import Kubectl, run_script
from lockstep_tools.failure import CommandError
from lockstep_tools.load import logbook
from lockstep_tools.load.history import History
from lockstep_tools.serving.status import READY

NAME = "lockstep-load"

_START_S = 240.0  # the image's pull, and every request alone on a small machine
_END_S = 180.0  # for running streams: long ones on a small machine, or streams that are silent until their limit
_POLL_S = 0.2


@dataclass(frozen=True)
class WorkersSeen:
    """What a router reported of its workers at one time, by id: state, incarnation and epoch."""

    at_s: float
    router: str
    workers: Mapping[str, Sequence[Any]]

    @property
    def all_ready(self) -> bool:
        """Every worker takes requests."""
        return bool(self.workers) and all(state == READY for state, *_ in self.workers.values())


class LoadPod:
    """Steady streams on the cluster. `with` starts them and waits until all clients stream; leaving deletes the pod."""

    def __init__(self, kubectl: Kubectl, script: Path, environment: Mapping[str, str], *, clients: int) -> None:
        """Args: `script` starts the pod with `environment`; see k8s/chaos/load."""
        self.undisturbed: list[History] = []
        self.ended: list[History] = []
        """The streams of the load that have ended, in order of their ends."""
        self.seen: list[WorkersSeen] = []
        """Changes in what routers report, in order."""
        self.avoid = ""
        """The node that the pod must not run on."""
        self._kubectl = kubectl
        self._script = script
        self._environment = {**environment, "POD": NAME, "CLIENTS": str(clients)}
        self._clients = clients
        self._taken: set[tuple[str, object]] = set()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, name="log of the load", daemon=True)

    def __enter__(self) -> Self:
        self._delete()
        try:
            run_script(self._script, self._environment | {"AVOID": self.avoid}, _START_S)
            self._reader.start()
            self.wait_for(lambda: len({history.client for history in self.ended}) == self._clients, "streams", _START_S)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def lives(self) -> dict[str, tuple[int, int]]:
        """The latest life of each worker that any router has reported."""
        found: dict[str, tuple[int, int]] = {}
        for seen in self.seen:
            for worker, (_, incarnation, epoch) in seen.workers.items():
                found[worker] = max(found.get(worker, (0, 0)), (incarnation, epoch))
        return found

    def latest(self) -> dict[str, WorkersSeen]:
        """The last report of each router."""
        return {seen.router: seen for seen in self.seen}

    def wait_for(self, holds: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait until something holds.

        Raises:
            CommandError: it does not in time, or the load has ended.
        """
        deadline_s = time.monotonic() + within_s
        while not holds():
            if self._over.is_set() or time.monotonic() > deadline_s:
                raise CommandError(f"the load has no {what} after {within_s:g} s: {self._last_words()}")
            time.sleep(_POLL_S)

    def wait_round(self, since_s: float) -> None:
        """Wait until every client has ended a stream that it began after a time: no earlier one is still running."""

        def round_over() -> bool:
            return len({history.client for history in self.ended if history.started_s > since_s}) == self._clients

        self.wait_for(round_over, "new stream of each client", _END_S)

    def stop(self) -> None:
        """Let the running streams end, and read the rest of the log."""
        if not self._over.is_set():
            self._kubectl.run("exec", NAME, "--", "sh", "-c", "kill -TERM 1")
            self._over.wait(_END_S)

    def _leave(self) -> None:
        self._over.set()
        self._delete()

    def _delete(self) -> None:
        self._kubectl.run("delete", "pod", NAME, "--ignore-not-found", "--grace-period=1", timeout_s=120)

    def _read(self) -> None:
        """Follow the log until the load ends; starts again when the connection to the log breaks."""
        while not self._over.is_set():
            with self._kubectl.start("logs", "--follow", "--pod-running-timeout=2m", NAME) as following:
                assert following.stdout is not None
                try:
                    for line in following.stdout:
                        self._take(line)
                        if self._over.is_set():
                            break
                finally:
                    following.kill()
            time.sleep(_POLL_S)

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
            kind = entry["kind"]
        except (ValueError, KeyError, TypeError):
            return  # a sentence on stderr; `_last_words` has it
        key = (kind, entry.get("number", entry.get("at")))
        if key in self._taken:
            return
        self._taken.add(key)
        match kind:
            case logbook.UNDISTURBED:
                self.undisturbed.append(logbook.from_entry(entry))
            case logbook.STREAM:
                self.ended.append(logbook.from_entry(entry))
            case logbook.STATUS:
                self.seen.append(WorkersSeen(entry["at"], entry["router"], entry["workers"]))
            case logbook.SUMMARY:
                self._over.set()

    def _last_words(self) -> str:
        try:
            last = self._kubectl.run("logs", NAME, "--tail=1").strip()
            pod = self._kubectl.json("get", "pod", NAME)["status"]
        except CommandError as error:
            return error.message
        return last if last and not last.startswith("{") else f"pod {NAME} is {pod.get('phase')}"
