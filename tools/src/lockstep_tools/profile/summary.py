"""Where the time of each rank goes, and which rank the others wait for.

A collective ends when the last rank has come: the time that a rank spends in it before that is waiting, and the rest is
transfer. The last rank to come does not wait. So waiting shows on the fast ranks; the slow one is named by the time
that it computes between collectives.
"""

from dataclasses import dataclass
from statistics import mean, median

from lockstep_tools.profile.parts import RankProfile

_SLOWER = 1.15
"""Times the median of the others' compute. What a machine's noise does to equal ranks stays below."""
_LAST = 0.5
"""The share of collectives that a rank must reach last to be named."""
_TRIMMED = 0.1
"""Of the steps, those with the most and with the least compute, are not compared: a page fault is no slow rank."""


@dataclass(frozen=True)
class RankShares:
    """Seconds of one rank in the common steps."""

    rank: int
    step_s: float
    """All steps together."""
    compute_s: float
    transfer_s: float
    waiting_s: float
    """In collectives, for ranks that had not come yet."""
    idle_s: float
    """Between steps: for the next plan."""
    forward_s: float
    """Compute of a typical step up to its last collective: rank 0 samples after it."""
    last: float
    """The share of collectives that it reached last."""


@dataclass(frozen=True)
class Summary:
    """What the ranks did."""

    ranks: list[RankShares]
    steps: int
    tokens: int
    window_s: float
    """From the first step's begin to the last one's end."""
    collectives: int
    skew_us: float
    """By how much the ends of a collective differ between ranks, typically: the trace's ranks are aligned so well."""
    bottleneck: int | None
    """The rank that the others wait for; None: they are balanced."""
    slower: float
    """Its compute over the median of the others'; of the slowest rank if none is named; 1: there is one rank."""


def summarize(profiles: list[RankProfile]) -> Summary:
    """The summary of profiles of all ranks, over the steps that all have."""
    numbers = set.intersection(*({step.number for step in each.steps} for each in profiles))
    counts = {len(each.collectives) for each in profiles}
    # The k-th collective is the same on all ranks, up to the last one that all have: a rank may have stopped earlier.
    arrivals = [max(group) for group in zip(*([c.began for c in each.collectives] for each in profiles), strict=False)]
    ends = list(zip(*([c.ended for c in each.collectives] for each in profiles), strict=False))
    lasts = [
        max(range(len(profiles)), key=lambda index: profiles[index].collectives[k].began) for k in range(min(counts))
    ]
    shares = [
        _shares(profile, numbers, arrivals, sum(last == index for last in lasts) / max(1, len(lasts)))
        for index, profile in enumerate(profiles)
    ]
    steps = [step for step in profiles[0].steps if step.number in numbers]
    window_s = (steps[-1].ended - steps[0].began) / 1e9 if steps else 0.0
    skew_us = median((max(each) - min(each)) / 1000 for each in ends) if ends else 0.0
    bottleneck, slower = _bottleneck(shares)
    return Summary(
        shares, len(steps), sum(step.tokens for step in steps), window_s, min(counts), skew_us, bottleneck, slower
    )


def _shares(profile: RankProfile, numbers: set[int], arrivals: list[int], last: float) -> RankShares:
    steps = [step for step in profile.steps if step.number in numbers]
    if not steps:
        return RankShares(profile.rank, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, last)
    waiting = transfer = 0
    forward = []
    index = 0
    collectives = profile.collectives
    for step in steps:
        ended, spent = step.began, 0
        while index < len(collectives) and collectives[index].began < step.began:
            index += 1
        while index < len(collectives) and collectives[index].ended <= step.ended:
            each = collectives[index]
            arrived = arrivals[index] if index < len(arrivals) else each.began
            waited = min(max(0, arrived - each.began), each.ended - each.began)
            waiting += waited
            transfer += each.ended - each.began - waited
            ended, spent = each.ended, spent + each.ended - each.began
            index += 1
        forward.append((ended if spent else step.ended) - step.began - spent)
    step_ns = sum(step.ended - step.began for step in steps)
    return RankShares(
        profile.rank,
        step_ns / 1e9,
        (step_ns - waiting - transfer) / 1e9,
        transfer / 1e9,
        waiting / 1e9,
        max(0, steps[-1].ended - steps[0].began - step_ns) / 1e9,
        _typical(forward) / 1e9,
        last,
    )


def _typical(values: list[int]) -> float:
    cut = int(len(values) * _TRIMMED)
    return mean(sorted(values)[cut : len(values) - cut])


def _bottleneck(shares: list[RankShares]) -> tuple[int | None, float]:
    if len(shares) == 1:
        return None, 1.0
    slowest = max(shares, key=lambda each: each.forward_s)
    others = median(each.forward_s for each in shares if each is not slowest)
    ratio = slowest.forward_s / others if others else 1.0
    is_named = ratio >= _SLOWER and slowest.last > _LAST
    return (slowest.rank if is_named else None), ratio


def describe(summary: Summary, profiles: list[RankProfile]) -> str:
    """The summary for people."""
    head = (
        f"{summary.steps} steps with {summary.tokens} tokens in {summary.window_s:.3f} s; "
        f"{summary.collectives} collectives, whose ends differ by {summary.skew_us:.0f} us between ranks"
    )
    lines = [
        head,
        "",
        "rank  device   step ms  compute        transfer       waiting        idle           last to come",
    ]
    devices = {each.rank: each.device for each in profiles}
    for each in summary.ranks:
        window_s = each.step_s + each.idle_s
        parts = (each.compute_s, each.transfer_s, each.waiting_s, each.idle_s)
        columns = "  ".join(
            f"{1000 * part / max(1, summary.steps):7.2f} {100 * part / window_s if window_s else 0.0:3.0f} %"
            for part in parts
        )
        step_ms = 1000 * each.step_s / max(1, summary.steps)
        lines.append(f"{each.rank:4}  {devices[each.rank]:7} {step_ms:8.2f}  {columns}  {100 * each.last:9.0f} %")
    lines += ["", _verdict(summary)]
    if any(each.ended_by != "steps" for each in profiles):
        lines.append("fewer steps than asked: the ranks have no room for more events, or had no more steps in time")
    return "\n".join(lines)


def _verdict(summary: Summary) -> str:
    if len(summary.ranks) == 1:
        return "one rank: it waits for no other one"
    if summary.bottleneck is None:
        return f"balanced: no rank is clearly slower (the slowest computes {summary.slower:.2f} times as long)"
    waiting_s = max(each.waiting_s for each in summary.ranks)
    step_s = max(each.step_s for each in summary.ranks)
    return (
        f"bottleneck: rank {summary.bottleneck}: it computes {summary.slower:.2f} times as long as the others, which "
        f"wait for it for {100 * waiting_s / step_s if step_s else 0.0:.0f} % of their steps"
    )
