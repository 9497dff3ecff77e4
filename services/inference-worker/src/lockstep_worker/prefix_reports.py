"""Reports to routers which blocks the engine's prefix cache holds: a snapshot for each router that asks, then the
changes.

Each router has a list of news that it has not got. News of the same block replace each other there, the list is
bounded, and a router gets so many bytes of it per second. When it overflows, a new snapshot replaces it. Reports are
made at heartbeats, beside the path of tokens, and the engine notes nothing while no router asks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from lockstep_api.v1 import worker_pb2
from lockstep_engine import PrefixChanges
from lockstep_engine.config import HotWindow

from lockstep_worker import metrics
from lockstep_worker.engine import EngineLike
from lockstep_worker.router_connection import RouterConnection

MAX_BLOCKS = 32_768
"""In a snapshot, and in the news for one router: half a million tokens, 256 KiB."""

_KEY_BYTES = 8
_SNAPSHOT_INTERVAL_S = 1.0
"""A snapshot takes the event loop milliseconds; a router that asks all the time gets no more than one in this time."""

_MAX_FRAMES_WAITING = 64
"""A router with more frames in its outbox gets no reports: its tokens go first."""


@dataclass
class _Watcher:
    """A router that has asked for reports."""

    max_blocks: int = MAX_BLOCKS
    news: dict[int, bool] = field(default_factory=dict)
    """Keys of blocks, in the order of their news, and whether the engine has them."""
    number: int = 0
    """Of the last report."""
    needs_snapshot: bool = True
    snapshot_from: float = 0.0
    """Earliest time of the next snapshot."""
    may_send: float = 0.0
    """Bytes."""


class PrefixReporter:
    """The routers that have asked, and what each has yet to learn.

    Args:
        engine: whose prefix cache it is.
        bytes_per_s: for each router; 0: no reports.
        hot_window: which blocks of a prompt are used compressed; None: none.
    """

    def __init__(self, engine: EngineLike, bytes_per_s: int, hot_window: HotWindow | None = None) -> None:
        self._engine = engine
        self._hot_window = (
            None if hot_window is None else worker_pb2.HotWindow(first=hot_window.sink, last=hot_window.size)
        )
        self._bytes_per_s = bytes_per_s
        self._most_bytes = max(_KEY_BYTES, bytes_per_s)
        """In one report: what a second brings."""
        self._watchers: dict[RouterConnection, _Watcher] = {}
        self._reported_at = 0.0

    def watch(self, router: RouterConnection, max_blocks: int) -> None:
        """Begin to report to a router, or begin again, with a snapshot of `max_blocks` (0: as many as it can have)."""
        if not self._bytes_per_s:
            return
        if not self._watchers:
            self._engine.note_prefixes(wanted=True)
        watcher = self._watchers.setdefault(router, _Watcher())
        watcher.max_blocks = min(max_blocks or MAX_BLOCKS, MAX_BLOCKS)
        watcher.needs_snapshot = True

    def forget(self, router: RouterConnection) -> None:
        """The router is gone."""
        if self._watchers.pop(router, None) is not None and not self._watchers:
            self._engine.note_prefixes(wanted=False)

    def reports(self, now: float) -> Iterator[tuple[RouterConnection, worker_pb2.PrefixReport]]:
        """The reports that are due.

        Args:
            now: seconds, of a clock that never goes back.
        """
        elapsed_s, self._reported_at = min(1.0, now - self._reported_at), now
        if not self._watchers:
            return
        changes = self._engine.take_prefix_changes()
        has_listed = False
        for router, watcher in self._watchers.items():
            watcher.may_send = min(self._most_bytes, watcher.may_send + elapsed_s * self._bytes_per_s)
            _note(watcher, changes)
            lists = watcher.needs_snapshot and now >= watcher.snapshot_from
            # A snapshot takes milliseconds: after a restart of the ranks all routers want one, and get them in turn.
            if router.outbox.waiting > _MAX_FRAMES_WAITING or (lists and has_listed):
                continue
            has_listed = has_listed or lists
            if (report := self._next_report(watcher, now)) is not None:
                yield router, report

    def _next_report(self, watcher: _Watcher, now: float) -> worker_pb2.PrefixReport | None:
        begins = watcher.needs_snapshot
        if begins:
            if now < watcher.snapshot_from:
                return None
            watcher.news = dict.fromkeys(self._engine.newest_prefixes(watcher.max_blocks), True)
            watcher.needs_snapshot, watcher.snapshot_from = False, now + _SNAPSHOT_INTERVAL_S
            metrics.PREFIX_SNAPSHOTS.inc()
        count = min(len(watcher.news), int(watcher.may_send) // _KEY_BYTES)
        if not (count or begins):
            return None
        watcher.number += 1
        watcher.may_send -= _KEY_BYTES * count
        metrics.PREFIX_KEYS.inc(count)
        report = worker_pb2.PrefixReport(
            number=watcher.number, snapshot=begins, hot_window=self._hot_window if begins else None
        )
        for key in list(islice(watcher.news, count)):
            (report.added if watcher.news.pop(key) else report.removed).append(key)
        return report


def _note(watcher: _Watcher, changes: PrefixChanges) -> None:
    """Add changes to a router's news."""
    if not changes.is_complete:
        watcher.needs_snapshot = True
    if not watcher.needs_snapshot:
        watcher.news.update(dict.fromkeys(changes.added, True))
        watcher.news.update(dict.fromkeys(changes.removed, False))
        watcher.needs_snapshot = len(watcher.news) > MAX_BLOCKS
    if watcher.needs_snapshot:
        watcher.news = {}
