"""Runs simulations of many seeds, and explains the first that fails with the smallest plan that still fails."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simulated.checker import Violation
from simulated.plan import USUAL_SCALE, Plan, Scale, make_plan
from simulated.world import Mutation, Outcome, World, summarize

_MAX_LINES = 60


@dataclass
class Report:
    """What the simulations of several seeds gave."""

    first_seed: int
    seeds: int = 0
    streams: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    longest_silence_s: float = 0.0
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.streams += len(outcome.histories)
        self.counts += summarize(outcome)
        self.longest_silence_s = max(self.longest_silence_s, outcome.longest_silence_s)
        if outcome.violations:
            self.failures.append(outcome)

    def __str__(self) -> str:
        seeds = f"seeds {self.first_seed} to {self.first_seed + self.seeds - 1}"
        counted = ", ".join(f"{count} {what.strip()}" for what, count in sorted(self.counts.items()))
        return (
            f"simulation: {self.streams} streams in {seeds}: {len(self.failures)} seeds with violations, "
            f"longest silence {self.longest_silence_s:.1f} s\n  {counted}"
        )


def outcomes(
    first_seed: int, streams: int, scale: Scale = USUAL_SCALE, mutation: Mutation | None = None
) -> Iterator[Outcome]:
    """Outcomes of consecutive seeds until they have so many streams."""
    seed, done = first_seed, 0
    while done < streams:
        outcome = World(make_plan(seed, scale), mutation).run()
        seed, done = seed + 1, done + len(outcome.histories)
        yield outcome


def run_seeds(first_seed: int, streams: int, scale: Scale = USUAL_SCALE, *, most_failures: int = 1) -> Report:
    """Simulate until there were so many streams, or so many seeds have failed."""
    report = Report(first_seed)
    for outcome in outcomes(first_seed, streams, scale):
        report.add(outcome)
        if len(report.failures) >= most_failures:
            break
    return report


def shrink(plan: Plan, kind: str, mutation: Mutation | None = None, *, most_runs: int = 80) -> Plan:
    """A smaller plan with a violation of the same kind: parts are left out as long as it is found again."""
    for fails in (_without_requests, _without_faults):
        plan, most_runs = fails(plan, kind, mutation, most_runs)
    return plan


def _without_requests(plan: Plan, kind: str, mutation: Mutation | None, most_runs: int) -> tuple[Plan, int]:
    return _leave_out(plan, len(plan.requests), lambda out: plan.without(requests=out), kind, mutation, most_runs // 2)


def _without_faults(plan: Plan, kind: str, mutation: Mutation | None, most_runs: int) -> tuple[Plan, int]:
    return _leave_out(plan, len(plan.faults), lambda out: plan.without(faults=out), kind, mutation, most_runs)


def _leave_out(
    plan: Plan,
    count: int,
    make: Callable[[frozenset[int]], Plan],
    kind: str,
    mutation: Mutation | None,
    most_runs: int,
) -> tuple[Plan, int]:
    """Leave out halves, then quarters, and so on, of what has so many parts."""
    out: frozenset[int] = frozenset()
    size = count
    while size >= 1 and most_runs > 0:
        for begin in range(0, count, size):
            more = out | frozenset(range(begin, min(begin + size, count)))
            if more == out or most_runs <= 0:
                continue
            most_runs -= 1
            if any(each.kind == kind for each in World(make(more), mutation).run().violations):
                out = more
        size //= 2
    return make(out), most_runs


def explain(outcome: Outcome, scale: Scale = USUAL_SCALE, mutation: Mutation | None = None) -> str:
    """The seed, the violations, and a minimal trace of the first one."""
    first = outcome.violations[0]
    plan = shrink(make_plan(outcome.seed, scale), first.kind, mutation)
    again = World(plan, mutation, keep_lines=1_000_000).run()
    violation = next((each for each in again.violations if each.kind == first.kind), first)
    again_with = f"python -m simulated --seed {outcome.seed}{' --shared' if scale.shares_state else ''}"
    lines = [
        f"seed {outcome.seed}: {len(outcome.violations)} violations; again: {again_with}",
        *(f"  {each}" for each in outcome.violations[:5]),
        f"smallest plan: {len(plan.requests)} requests, {len(plan.faults)} faults",
        *(f"  {fault}" for fault in plan.faults),
        f"  {violation}",
        *(f"    {line}" for line in trace_of(again, violation)),
    ]
    return "\n".join(lines)


def trace_of(outcome: Outcome, violation: Violation) -> list[str]:
    """The lines of the trace that belong to a violation: those of its stream, and all faults."""
    names = {violation.subject, violation.subject.partition("#")[0]}
    request = violation.subject.partition("#")[0].partition(".")[0].rstrip("~")
    parts = [line.split() for line in outcome.lines]
    names |= {each[3] for each in parts if each[1] == "stream" and each[2].split("#")[0].split(".")[0] == request}
    always = {"fault", "ranks", "keepalive", "worker", "overflow"}
    lines = [
        line for line in outcome.lines if not always.isdisjoint(line.split()[1:2]) or not names.isdisjoint(line.split())
    ]
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[: _MAX_LINES // 3], "…", *lines[-2 * _MAX_LINES // 3 :]]
