"""Figures of a run: the delays and failures in a set of histories."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    def of(cls, seconds: Sequence[float]) -> "Percentiles | None":
        """The percentiles of a sample in seconds; None of an empty one."""
        if not seconds:
            return None
        ordered = sorted(seconds)

        def rank(share: float) -> float:
            return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1e3, 2)

        return cls(rank(0.5), rank(0.99), rank(1.0))


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
    completed = [history for history in histories if history.error is None]
    seconds = max(history.ended_s or 0.0 for history in histories) - min(history.started_s for history in histories)
    tokens = sum(history.tokens for history in histories)
    found = [
        f"request {history.number}: {problem}"
        for history in completed
        for problem in violations(history, reference=reference(history), require_ids=require_ids)
    ]
    return Report(
        streams=len(histories),
        failed=len(histories) - len(completed),
        seconds=round(seconds, 3),
        prompt_tokens=sum((history.usage or {}).get("prompt_tokens") or 0 for history in histories),
        tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1) if seconds > 0 else 0.0,
        first_token_ms=Percentiles.of([first for history in completed if (first := history.first_token_s) is not None]),
        inter_token_ms=Percentiles.of([gap for history in completed for gap in history.gaps_s]),
        longest_silence_ms=Percentiles.of([max(history.gaps_s) for history in completed if history.gaps_s]),
        errors=dict(Counter(history.error for history in histories if history.error is not None)),
        refusals=dict(Counter(_refusal(history) for history in histories if history.status in _BUSY)),
        violations=found,
    )


def _refusal(history: History) -> str:
    return f"{history.status}, {'Retry-After' if history.retry_after else 'no Retry-After'}"
