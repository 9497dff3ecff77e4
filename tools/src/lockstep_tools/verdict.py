"""The judge of disturbed streams: what was lost, doubled or changed against the same streams in peace.

Tests on one machine and experiments on a cluster share it. It judges correctness alone; how long a silence may be is
another question.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_tools.endpoint import Endpoint
from lockstep_tools.failure import CommandError
from lockstep_tools.history import History, StreamRequest, order_violations, violations
from lockstep_tools.loadgen import drive

Excuse = Callable[[History], str | None]
"""Why a stream that failed was allowed to, in two or three words; None if it was not."""


@dataclass
class Verdict:
    """What clients saw, over all streams of a run."""

    streams: int = 0
    failed: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    changed: int = 0
    """Streams with another text than in peace."""
    excused: Counter[str] = field(default_factory=Counter)
    """Streams that failed and were allowed to, by reason. What they had until then was right."""
    problems: list[str] = field(default_factory=list)
    """In words, of each stream that was not as in peace."""

    @property
    def holds(self) -> bool:
        """Nobody lost anything."""
        return not (self.failed or self.lost_tokens or self.doubled_tokens or self.changed or self.problems)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "excused": dict(self.excused), "holds": self.holds}


async def in_peace(endpoint: Endpoint, requests: Sequence[StreamRequest]) -> list[History]:
    """Each request alone on an idle system.

    Raises:
        CommandError: it does not even work so.
    """
    calm = await drive(endpoint, requests, clients=1)
    for history in calm:
        found = violations(history, require_ids=True)
        if found:
            raise CommandError(f"request {history.number} is wrong with nothing disturbed: {'; '.join(found)}")
    return calm


def judge(histories: Iterable[History], calm: Sequence[History], *, excuse: Excuse = lambda _: None) -> Verdict:
    """Hold every ended stream against the protocol's promises and against the same stream in peace.

    Args:
        histories: of requests whose n-th is the (n modulo so many)-th of `calm`.
        calm: of `in_peace`.
        excuse: for streams that failed.
    """
    verdict = Verdict()
    for history in histories:
        expected = calm[history.number % len(calm)]
        verdict.streams += 1
        excused = excuse(history) if history.error is not None else None
        if excused is not None:
            verdict.excused[excused] += 1
            found = order_violations(history, require_ids=True)
        else:
            verdict.failed += history.error is not None
            verdict.lost_tokens += max(0, expected.tokens - history.tokens)
            found = violations(history, require_ids=True)
        verdict.doubled_tokens += max(0, history.tokens - expected.tokens)
        differences = _differences(history, expected, to_the_end=history.error is None)
        verdict.changed += bool(differences)
        verdict.problems += [f"stream {history.number}: {problem}" for problem in found + differences]
    return verdict


def _differences(history: History, expected: History, *, to_the_end: bool) -> list[str]:
    """Where the text of each choice is another than in peace."""
    found = []
    for choice in expected.choices if to_the_end else history.choices:
        marks, wanted = history.marks(choice), expected.marks(choice)
        wrong = next((at for at, mark in sorted(marks.items()) if wanted.get(at, mark) != mark), None)
        if wrong is not None:
            found.append(f"choice {choice}: from token {wrong} on the text is not that of the undisturbed stream")
        elif to_the_end and max(marks, default=0) != max(wanted, default=0):
            found.append(f"choice {choice}: ends at token {max(marks, default=0)}, not {max(wanted, default=0)}")
    return found
