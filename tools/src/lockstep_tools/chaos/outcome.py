"""The outcome of an experiment's trials: the verdict on every stream, and what their clients felt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_tools.chaos.experiments import Experiment
from lockstep_tools.chaos.trial import Trial
from lockstep_tools.history import History
from lockstep_tools.report import Spread
from lockstep_tools.verdict import Verdict, judge


@dataclass(frozen=True)
class Outcome:
    """What came of one experiment."""

    experiment: Experiment
    trials: Sequence[Trial]
    verdict: Verdict
    slack: float
    """By how much a silence may be longer than its limit, on a machine that is slower than the ones it was set for."""
    problems: list[str] = field(default_factory=list)
    """Beside those of streams."""

    @property
    def silence_ms(self) -> Spread | None:
        """The longest silence of each stream that was disturbed."""
        return Spread.of([silence for trial in self.trials for silence in trial.silences_s()])

    @property
    def first_token_ms(self) -> Spread | None:
        """Of the streams that began while it was not over."""
        return Spread.of([first for trial in self.trials for first in trial.first_tokens_s()])

    @property
    def detection_ms(self) -> Spread | None:
        """From the fault to the first stream that left."""
        return Spread.of([trial.detected_s - trial.fault_s for trial in self.trials if trial.detected_s is not None])

    @property
    def recovery_ms(self) -> Spread | None:
        """From the fault until all was ready again."""
        return Spread.of([trial.recovered_s - trial.fault_s for trial in self.trials])

    @property
    def connect_failures(self) -> int:
        """Connections that could not be made, tried again by the clients."""
        return sum(history.connect_failures for trial in self.trials for history in trial.histories)

    @property
    def in_time(self) -> bool:
        """No silence was longer than allowed."""
        spread = self.silence_ms
        return spread is None or spread.max <= 1e3 * self.experiment.limit_s * self.slack

    @property
    def holds(self) -> bool:
        """Nobody lost anything, and nobody waited for too long."""
        return self.verdict.holds and self.in_time and not self.problems

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        spreads = ("silence_ms", "first_token_ms", "detection_ms", "recovery_ms")
        return {
            "experiment": self.experiment.name,
            "trials": len(self.trials),
            "holds": self.holds,
            "limit_ms": 1e3 * self.experiment.limit_s,
            "in_time": self.in_time,
            **{name: vars(spread) if (spread := getattr(self, name)) else None for name in spreads},
            "connect_failures": self.connect_failures,
            "verdict": self.verdict.as_json(),
            "problems": self.problems,
            "victims": [vars(trial.victims) for trial in self.trials],
        }


def assign(trials: Sequence[Trial], ended: Sequence[History]) -> list[History]:
    """Give each trial the streams that ended between its fault and the next one; returns those of before."""
    ordered = sorted(trials, key=lambda trial: trial.fault_s)
    before: list[History] = []
    for history in ended:
        past = [trial for trial in ordered if trial.fault_s <= (history.ended_s or 0.0)]
        (past[-1].histories if past else before).append(history)
    return before


def conclude(experiment: Experiment, trials: Sequence[Trial], calm: Sequence[History], slack: float) -> Outcome:
    """Judge an experiment's trials; `assign` has given them their streams."""
    total = Verdict()
    problems = []
    for trial in trials:
        _add(total, judge(trial.histories, calm, excuse=trial.excuse))
        if experiment.refuses:
            problems += _burst_problems(trial.burst)
    return Outcome(experiment, trials, total, slack, problems)


def _add(total: Verdict, more: Verdict) -> None:
    for name in ("streams", "failed", "lost_tokens", "doubled_tokens", "changed"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    total.excused += more.excused
    total.problems += more.problems


def _burst_problems(report: Mapping[str, Any] | None) -> list[str]:
    """The burst's own clients: some refused, all of these politely, and the others served well."""
    if report is None:
        return ["the burst told nothing"]
    refusals = Counter(report["refusals"])
    found = [f"burst: {problem}" for problem in report["violations"]]
    if not refusals:
        found.append("the queue was never full: a larger BURST is needed")
    if report["failed"] != sum(refusals.values()):
        found.append(
            f"burst: {report['failed']} requests failed, {sum(refusals.values())} of them refused: {report['errors']}"
        )
    impolite = [name for name in refusals if "no Retry-After" in name]
    return found + [f"burst: {refusals[name]} requests got {name}" for name in impolite]
