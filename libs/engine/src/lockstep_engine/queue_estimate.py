"""Estimates how long one more request would wait before it runs, from the pace and the length of the last requests.

A request is expected to give as many tokens as the last ones did on average, or its own limit if that is less or if it
ignores the end of text, each in the mean time of a token. That time includes what a request needs for its prompt and
for the others in its batch.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

_WEIGHT = 0.2
"""Weight of the last request in the moving means."""


@dataclass(slots=True)
class _Entry:
    emitted: int
    """Tokens from earlier attempts."""
    limit: int
    """Most tokens that the request may have, those included."""
    reaches_limit: bool
    embeds: bool = False
    priority: int = 0
    started_at: float | None = None
    """None until it runs for the first time."""


class QueueEstimate:
    """Follows the requests of one engine. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._token_s = 0.0
        """Mean time of a token; 0 while no request has ended."""
        self._tokens = 0.0
        """Mean number of tokens of a request."""
        self._embedding_s = 0.0
        """Mean time of an embedding; 0 while none has ended."""

    def add(
        self, request_id: str, emitted: int, limit: int, *, reaches_limit: bool, embeds: bool = False, priority: int = 0
    ) -> None:
        """A request is queued: `emitted` tokens are from earlier attempts, `limit` is the most it may have in all. One
        that embeds has none.
        """
        self._entries[request_id] = _Entry(emitted, limit, reaches_limit, embeds, priority)

    def start(self, request_id: str, now: float) -> None:
        """A request runs. When it starts again after a preemption, its first start counts."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.started_at is None:
            entry.started_at = now

    def end(self, request_id: str, length: int, now: float) -> None:
        """A request has all its tokens: `length`, those from earlier attempts included."""
        entry = self._entries.pop(request_id, None)
        if entry is None or entry.started_at is None:
            return
        if entry.embeds:
            weight = _WEIGHT if self._embedding_s else 1.0
            self._embedding_s += weight * (now - entry.started_at - self._embedding_s)
        else:
            tokens = max(1, length - entry.emitted)
            weight = _WEIGHT if self._token_s else 1.0
            self._token_s += weight * ((now - entry.started_at) / tokens - self._token_s)
            self._tokens += weight * (tokens - self._tokens)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that were cancelled or have failed: their time is not measured."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests. What was measured stays."""
        self._entries.clear()

    def waits(self, *, places: int, is_full: bool, now: float, priority: int = 0) -> tuple[float, float]:
        """The wait of one more request, and what each further request adds to it.

        Each queued request takes the place of the running one that is expected to end first. Both are 0 while nothing
        has been measured.

        Args:
            places: number of requests that can run at once.
            is_full: whether one more request would have to wait.
            now: the current time.
            priority: of the further request; queued ones of lower priority do not run before it.
        """
        started = [(entry, now - entry.started_at) for entry in self._entries.values() if entry.started_at is not None]
        # Before the first request has ended, the running ones are the measure.
        measured_s = self._tokens * self._token_s or self._embedding_s
        mean_s = measured_s or (sum(ran_s for _, ran_s in started) / len(started) if started else 0.0)
        places = max(1, places)
        if not is_full:
            return 0.0, mean_s / places

        def expected_s(entry: _Entry) -> float:
            if entry.embeds:
                return self._embedding_s
            if not self._token_s:
                return mean_s
            longest_s = (entry.limit - entry.emitted) * self._token_s
            return longest_s if entry.reaches_limit else min(mean_s, longest_s)

        left_s = [max(0.0, expected_s(entry) - ran_s) for entry, ran_s in started]
        free_at = left_s[:places] + [0.0] * (places - len(left_s))
        heapq.heapify(free_at)
        # Those that were preempted go first, then those that have not run.
        waiting = (entry for entry in self._entries.values() if entry.started_at is None)
        queued = [entry for entry in waiting if entry.priority >= priority]
        for needed_s in (*left_s[places:], *map(expected_s, queued)):
            heapq.heapreplace(free_at, free_at[0] + needed_s)
        return free_at[0], mean_s / places
