"""The outcome of an experiment's trials: the comparison of every stream, and the delays that clients saw."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_tools.chaos.experiments import Experiment
from lockstep_tools.chaos.trial import Trial
from lockstep_tools.load.comparison import Comparison, compare
from lockstep_tools.load.history import History
from lockstep_tools.load.report import Percentiles


@dataclass(frozen=True)
class Outcome:
    """The result of one experiment."""

    experiment: Experiment
    trials: Sequence[Trial]
    comparison: Comparison
    slack: float
    """The factor by which silences may exceed their limit, for slow machines."""
    problems: list[str] = field(default_factory=list)
    """Problems other than those of streams."""

    @property
    def silence_ms(self) -> Percentiles | None:
        """The longest silence of each stream that was disturbed."""
        return Percentiles.of([silence for trial in self.trials for silence in trial.silences_s()])

    @property
    def first_token_ms(self) -> Percentiles | None:
        """The times to the first token of streams that began between the fault and the recovery."""
        return Percentiles.of([first for trial in self.trials for first in trial.first_tokens_s()])

    @property
    def detection_ms(self) -> Percentiles | None:
        """The time from the fault to the first stream that left a victim, for each trial."""
        return Percentiles.of(
            [trial.detected_s - trial.fault_s for trial in self.trials if trial.detected_s is not None]
        )

    @property
    def recovery_ms(self) -> Percentiles | None:
        """The time from the fault until all was ready again, for each trial."""
        return Percentiles.of([trial.recovered_s - trial.fault_s for trial in self.trials])

    @property
    def connect_failures(self) -> int:
        """Connections that could not be made and that clients retried."""
        return sum(history.connect_failures for trial in self.trials for history in trial.histories)

    @property
    def in_time(self) -> bool:
        """No silence was longer than allowed."""
        percentiles = self.silence_ms
        return percentiles is None or percentiles.max <= 1e3 * self.experiment.limit_s * self.slack

    @property
    def holds(self) -> bool:
        """All streams were correct, and no silence was too long."""
        return self.comparison.holds and self.in_time and not self.problems

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("silence_ms", "first_token_ms", "detection_ms", "recovery_ms")
        return {
            "experiment": self.experiment.name,
            "trials": len(self.trials),
            "holds": self.holds,
            "limit_ms": 1e3 * self.experiment.limit_s,
            "in_time": self.in_time,
            **{name: vars(percentiles) if (percentiles := getattr(self, name)) else None for name in names},
            "connect_failures": self.connect_failures,
            "comparison": self.comparison.as_json(),
            "problems": self.problems,
            "victims": [vars(trial.victims) for trial in self.trials],
        }


def assign(trials: Sequence[Trial], ended: Sequence[History]) -> list[History]:
    """Give each trial the streams that ended between its fault and the next; returns those of before."""
    ordered = sorted(trials, key=lambda trial: trial.fault_s)
    before: list[History] = []
    for history in ended:
        past = [trial for trial in ordered if trial.fault_s <= (history.ended_s or 0.0)]
        (past[-1].histories if past else before).append(history)
    return before


def conclude(experiment: Experiment, trials: Sequence[Trial], undisturbed: Sequence[History], slack: float) -> Outcome:
    """Check an experiment's trials, which have their streams from `assign`."""
    total = Comparison()
    problems = []
    for trial in trials:
        _add(total, compare(trial.histories, undisturbed, excuse=trial.excuse))
        if experiment.refuses:
            problems += _burst_problems(trial.burst)
        elif not trial.histories:
            problems.append("nothing was measured: no stream ended after the fault")
        # Logs may be at a level that leaves it out: what routers report counts as well.
        if experiment.severs and trial.detected_s is None and not trial.reported:
            problems.append("no router noticed the fault: it had no effect, or was too short")
    if not experiment.refuses and not problems and not any(trial.disturbed() for trial in trials):
        problems.append("nothing was measured: no stream ran between the fault and the recovery that it did not break")
    return Outcome(experiment, trials, total, slack, problems)


def _add(total: Comparison, more: Comparison) -> None:
    for name in ("streams", "failed", "lost_tokens", "doubled_tokens", "changed"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    total.excused += more.excused
    total.problems += more.problems


def _burst_problems(report: Mapping[str, Any] | None) -> list[str]:
    """Problems of the burst's clients: some must be refused, each with Retry-After, and the others must succeed."""
    if report is None:
        return ["the burst reported nothing"]
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
