"""Comparison of disturbed streams with the same streams undisturbed: what was lost, doubled or changed.

Tests on one machine and experiments on a cluster share it. It checks correctness only, never delays.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_tools.failure import CommandError
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import drive
from lockstep_tools.load.history import History, StreamRequest, order_violations, violations

Excuse = Callable[[History], str | None]
"""The reason for which a failed stream is excused, in a few words; None if it is not."""


@dataclass
class Comparison:
    """What clients received, over all streams of a run."""

    streams: int = 0
    failed: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    changed: int = 0
    """Streams whose text differs from the undisturbed one's."""
    excused: Counter[str] = field(default_factory=Counter)
    """Failed streams that are excused, by reason. What they received until then was correct."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each difference and each violation."""

    @property
    def holds(self) -> bool:
        """No stream failed without an excuse, and all that arrived was correct."""
        return not (self.failed or self.lost_tokens or self.doubled_tokens or self.changed or self.problems)

    def add(self, history: History, undisturbed: Sequence[History], *, excuse: Excuse = lambda _: None) -> None:
        """Check an ended stream, as `compare` does; it is not kept."""
        expected = undisturbed[history.number % len(undisturbed)]
        self.streams += 1
        excused = excuse(history) if history.error is not None else None
        if excused is not None:
            self.excused[excused] += 1
            found = order_violations(history, require_ids=True)
        else:
            self.failed += history.error is not None
            self.lost_tokens += max(0, expected.tokens - history.tokens)
            found = violations(history, require_ids=True)
        self.doubled_tokens += max(0, history.tokens - expected.tokens)
        differences = _differences(history, expected, to_the_end=history.error is None)
        self.changed += bool(differences)
        self.problems += [f"stream {history.number}: {problem}" for problem in found + differences]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "excused": dict(self.excused), "holds": self.holds}


async def run_undisturbed(endpoint: Endpoint, requests: Sequence[StreamRequest]) -> list[History]:
    """Each request alone on an idle system.

    Raises:
        CommandError: a request fails or is wrong even so.
    """
    undisturbed = await drive(endpoint, requests, clients=1)
    for history in undisturbed:
        found = violations(history, require_ids=True)
        if found:
            raise CommandError(f"request {history.number} is wrong with nothing disturbed: {'; '.join(found)}")
    return undisturbed


def compare(
    histories: Iterable[History], undisturbed: Sequence[History], *, excuse: Excuse = lambda _: None
) -> Comparison:
    """Check every ended stream against the protocol's promises and against the same stream undisturbed.

    Args:
        histories: of requests whose n-th is the (n modulo so many)-th of `undisturbed`.
        undisturbed: of `run_undisturbed`.
        excuse: called for streams that failed.
    """
    comparison = Comparison()
    for history in histories:
        comparison.add(history, undisturbed, excuse=excuse)
    return comparison


def _differences(history: History, expected: History, *, to_the_end: bool) -> list[str]:
    """Where the text of each choice differs from the undisturbed stream's."""
    found = []
    for choice in expected.choices if to_the_end else history.choices:
        marks, wanted = history.marks(choice), expected.marks(choice)
        wrong = next((at for at, mark in sorted(marks.items()) if wanted.get(at, mark) != mark), None)
        if wrong is not None:
            found.append(f"choice {choice}: from token {wrong} on the text is not that of the undisturbed stream")
        elif to_the_end and max(marks, default=0) != max(wanted, default=0):
            found.append(f"choice {choice}: ends at token {max(marks, default=0)}, not {max(wanted, default=0)}")
    return found
