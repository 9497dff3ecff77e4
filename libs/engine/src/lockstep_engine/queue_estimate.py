"""Estimates how long one more request would wait before it runs, from the pace and the length of the last requests.

A request is expected to give as many tokens as the last ones did on average, or its own limit if that is less or if it
ignores the end of text, each in the mean time of a token. That time includes what a request needs for its prompt and
for the others in its batch.

Before the first request has ended, tokens are expected to come as they do in the running ones or, before those have
any, at the pace of the ranks' self-test. The length of answers that end by themselves is not known yet. Each is
expected to be as long as the answers of the running requests are so far. So the estimate is too short rather than too
long, and no request is refused without need.
"""

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from lockstep_common.seniority import turn_at

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
    turn_at: float = 0.0
    """Its place in the queue (see `seniority`)."""
    prompt_tokens: int = 0
    """Tokens that are computed before its first new one."""
    started_at: float | None = None
    """None until it runs for the first time."""
    tokens: int = 0
    """New ones, while no request has ended."""
    first_at: float = 0.0
    last_at: float = 0.0
    """When the first and the last one of these came."""


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
        self._step_s = self._prompt_token_s = 0.0
        """Pace of the ranks' self-test; 0: unknown."""

    def calibrate(self, step_s: float, token_s: float) -> None:
        """Take the pace that the ranks have measured: a step takes `step_s`, and `token_s` for each of its tokens."""
        self._step_s, self._prompt_token_s = step_s, token_s

    @property
    def has_measured(self) -> bool:
        """Whether a request has ended: the progress of others is not needed any more."""
        return self._token_s > 0

    def add(
        self,
        request_id: str,
        emitted: int,
        limit: int,
        *,
        reaches_limit: bool,
        embeds: bool = False,
        priority: int = 0,
        prompt_tokens: int = 0,
        arrived_at: float = 0.0,
    ) -> None:
        """A request is queued: `emitted` tokens are from earlier attempts, `limit` is the most it may have in all. One
        that embeds has none. `arrived_at`: when it first arrived.
        """
        turn = turn_at(arrived_at, priority, has_output=emitted > 0)
        self._entries[request_id] = _Entry(emitted, limit, reaches_limit, embeds, turn, prompt_tokens)

    def start(self, request_id: str, now: float) -> None:
        """A request runs. When it starts again after a preemption, its first start counts."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.started_at is None:
            entry.started_at = now

    def progress(self, request_id: str, length: int, now: float) -> None:
        """A request has `length` tokens, those from earlier attempts included. Only until `has_measured`."""
        entry = self._entries.get(request_id)
        if entry is not None and length > entry.emitted:
            entry.first_at, entry.last_at = entry.first_at if entry.tokens else now, now
            entry.tokens = length - entry.emitted

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

    def waits(
        self, *, places: int, is_full: bool, now: float, priority: int = 0, apart: Collection[str] = ()
    ) -> tuple[float, float]:
        """The wait of one more request, and what each further request adds to it.

        Each queued request takes the place of the running one that is expected to end first. Both are 0 while nothing
        has been measured, not even by the ranks' self-test.

        Args:
            places: number of requests that can run at once.
            is_full: whether one more request would have to wait.
            now: the current time.
            priority: of the further request, which arrives now; queued ones whose turn is later do not run before it.
            apart: requests that wait for something else than a place, so that the further one does not wait for them.
        """
        entries = [entry for request_id, entry in self._entries.items() if request_id not in apart]
        started = [(entry, now - entry.started_at) for entry in entries if entry.started_at is not None]
        places = max(1, places)
        mean_s, expected_s = self._expectation(started, places)
        if not is_full:
            return 0.0, mean_s / places
        left_s = [max(0.0, expected_s(entry) - ran_s) for entry, ran_s in started]
        free_at = left_s[:places] + [0.0] * (places - len(left_s))
        heapq.heapify(free_at)
        # Those that were preempted go first, then those that have not run.
        waiting = (entry for entry in entries if entry.started_at is None)
        own_turn = turn_at(now, priority, has_output=False)
        queued = [entry for entry in waiting if entry.turn_at <= own_turn]
        for needed_s in (*left_s[places:], *map(expected_s, queued)):
            heapq.heapreplace(free_at, free_at[0] + needed_s)
        return free_at[0], mean_s / places

    def _expectation(self, started: list[tuple[_Entry, float]], places: int) -> tuple[float, Callable[[_Entry], float]]:
        """The mean time of a request, and what gives that of a certain one."""
        pace_s = 0.0 if self._token_s else self._first_pace(started, places)
        if pace_s:
            length = max(1.0, sum(entry.tokens for entry, _ in started) / max(1, len(started)))

            def guessed_s(entry: _Entry) -> float:
                prompt_s = entry.prompt_tokens * self._prompt_token_s
                if entry.embeds:
                    return self._embedding_s or prompt_s
                if entry.tokens and entry.started_at is not None:
                    prompt_s = entry.first_at - entry.started_at
                longest = entry.limit - entry.emitted
                return prompt_s + pace_s * (longest if entry.reaches_limit else min(length, longest))

            return sum(map(guessed_s, self._entries.values())) / max(1, len(self._entries)), guessed_s
        measured_s = self._tokens * self._token_s or self._embedding_s
        # Without any pace the running ones are the measure.
        mean_s = measured_s or (sum(ran_s for _, ran_s in started) / len(started) if started else 0.0)

        def expected_s(entry: _Entry) -> float:
            if entry.embeds:
                return self._embedding_s
            if not self._token_s:
                return mean_s
            longest_s = (entry.limit - entry.emitted) * self._token_s
            return longest_s if entry.reaches_limit else min(mean_s, longest_s)

        return mean_s, expected_s

    def _first_pace(self, started: list[tuple[_Entry, float]], places: int) -> float:
        """Time of a token before a request has ended; 0: unknown."""
        intervals = sum(entry.tokens - 1 for entry, _ in started if entry.tokens)
        if intervals:
            return sum(entry.last_at - entry.first_at for entry, _ in started) / intervals
        # One step gives each running request a token.
        together = min(places, max(1, len(self._entries)))
        return self._step_s + together * self._prompt_token_s
