"""Figures of a run: the delays and failures in a set of histories."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from lockstep_tools.load.history import History, violations

_BUSY = (429, 503)


@dataclass(frozen=True)
class Percentiles:
    """A distribution in milliseconds, by nearest rank."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles | None":
        """The percentiles of a sample in seconds; None of an empty one."""
        sample = Sample()
        sample.add(seconds)
        return sample.percentiles()


class Sample:
    """A sample of durations, counted by their rounded value: in bounded memory, and with the same percentiles."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, seconds: Iterable[float]) -> None:
        """Count some more."""
        self._counts.update(round(each * 1e3, 2) for each in seconds)

    def percentiles(self) -> Percentiles | None:
        """Those of all that was counted; None of nothing."""
        if not self._counts:
            return None
        values = sorted(self._counts)
        ranks = list(accumulate(self._counts[value] for value in values))

        def rank(share: float) -> float:
            return values[bisect_left(ranks, max(1, math.ceil(share * ranks[-1])))]

        return Percentiles(rank(0.5), rank(0.99), rank(1.0))


@dataclass(frozen=True)
class Report:
    """The throughput, delays and failures of a run."""

    streams: int
    failed: int
    """Streams that ended with an error."""
    seconds: float
    prompt_tokens: int
    tokens: int
    """Completion tokens delivered."""
    tokens_per_s: float
    first_token_ms: Percentiles | None
    """The time from sending a request to its first text."""
    inter_token_ms: Percentiles | None
    """The times between pieces of text, over all streams. A piece may hold several tokens."""
    longest_silence_ms: Percentiles | None
    """The longest of these in each stream."""
    errors: dict[str, int]
    """The number of errors by message."""
    refusals: dict[str, int]
    """The number of refusals by an overloaded server: by status, and with or without Retry-After."""
    violations: list[str]
    """Violations of the protocol: lost or doubled tokens, wrong usage, missing or second ends."""

    @property
    def clean(self) -> bool:
        """No stream failed, and none violated the protocol."""
        return not self.failed and not self.violations

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Tally:
    """The figures of a run's streams so far. The streams themselves are not kept."""

    def __init__(self) -> None:
        self._streams = self._failed = self._prompt_tokens = self._tokens = 0
        self._began_s, self._ended_s = math.inf, 0.0
        self._first_tokens, self._gaps, self._silences = Sample(), Sample(), Sample()
        self._errors: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._violations: list[str] = []

    def add(self, history: History, *, reference: str | None = None, require_ids: bool = False) -> None:
        """Count a stream that has ended. Args: as in `violations`."""
        self._streams += 1
        self._began_s = min(self._began_s, history.started_s)
        self._ended_s = max(self._ended_s, history.ended_s or 0.0)
        self._prompt_tokens += (history.usage or {}).get("prompt_tokens") or 0
        self._tokens += history.tokens
        if history.status in _BUSY:
            self._refusals[_refusal(history)] += 1
        if history.error is not None:
            self._failed += 1
            self._errors[history.error] += 1
            return
        if history.first_token_s is not None:
            self._first_tokens.add([history.first_token_s])
        if gaps := history.gaps_s:
            self._gaps.add(gaps)
            self._silences.add([max(gaps)])
        found = violations(history, reference=reference, require_ids=require_ids)
        self._violations += [f"request {history.number}: {problem}" for problem in found]

    def report(self) -> Report:
        """The report of these streams: at least one."""
        seconds = self._ended_s - self._began_s
        return Report(
            streams=self._streams,
            failed=self._failed,
            seconds=round(seconds, 3),
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            tokens_per_s=round(self._tokens / seconds, 1) if seconds > 0 else 0.0,
            first_token_ms=self._first_tokens.percentiles(),
            inter_token_ms=self._gaps.percentiles(),
            longest_silence_ms=self._silences.percentiles(),
            errors=dict(self._errors),
            refusals=dict(self._refusals),
            violations=list(self._violations),
        )


def summarize(
    histories: Sequence[History],
    *,
    reference: Callable[[History], str | None] = lambda _: None,
    require_ids: bool = False,
) -> Report:
    """The report of finished streams.

    Args:
        histories: at least one, all ended.
        reference: the text each stream must have, where it is known.
        require_ids: as in `violations`.
    """
    tally = Tally()
    for history in histories:
        tally.add(history, reference=reference(history), require_ids=require_ids)
    return tally.report()


def _refusal(history: History) -> str:
    return f"{history.status}, {'Retry-After' if history.retry_after else 'no Retry-After'}"
