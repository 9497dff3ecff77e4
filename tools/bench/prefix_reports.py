"""What reports of cached blocks cost a worker, in CPU time: within its steps, and between them at each heartbeat.

Steps are the scheduler's part of the driver's time between two steps, without ranks: 64 streams with prompts that
have nothing in common, in a pool so small that each new block evicts an old one. That is the most that there is to
report. Heartbeats come after every tenth step, for two routers, and include the encoding of the frames. The sides run
in turn; CPU time leaves out what other processes take.

    python tools/bench/prefix_reports.py --save
"""

import argparse
import random
import statistics
import time
from typing import Any

import measure
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import HotWindow
from lockstep_engine.limits import Limits
from lockstep_engine.plan import Result
from lockstep_engine.request import Request, SamplingParams
from lockstep_engine.scheduler import Scheduler
from lockstep_worker.outbox import Outbox
from lockstep_worker.prefix_reports import PrefixReporter

STREAMS = 64
PROMPT = 64
ANSWER = 128
STEPS_A_HEARTBEAT = 10
LIMITS = Limits(
    max_seqs=STREAMS,
    max_batch_tokens=512,
    max_queue=STREAMS,
    context_length=1024,
    prefix_cache=True,
    hot_window=HotWindow(sink=1, size=4),
)
SIZES = PoolSizes(hot=700, cold=500)


class _Router:
    def __init__(self) -> None:
        self.outbox = Outbox(1024)


def run(steps: int, routers: int, seed: int) -> dict[str, float]:
    """CPU time of the steps and of the heartbeats, in us, and what was reported."""
    rng = random.Random(seed)
    scheduler = Scheduler(LIMITS, [], SIZES)
    reporter = PrefixReporter(scheduler, 1 << 30, LIMITS.hot_window)  # type: ignore[arg-type]
    for _ in range(routers):
        reporter.watch(_Router(), 0)  # type: ignore[arg-type]
    numbers = iter(range(1 << 30))
    step_ns = bytes_ = 0
    beats = []

    def submit() -> None:
        number = next(numbers)
        prompt = tuple(rng.randrange(30_000) for _ in range(PROMPT))
        # Ends at different times, so that every step is alike.
        answer = rng.randrange(1, ANSWER) if number < STREAMS else ANSWER
        scheduler.submit(Request(str(number), prompt, SamplingParams(max_tokens=answer), (), 0, f"tenant {number % 7}"))

    for _ in range(STREAMS):
        submit()
    for step in range(1, steps + ANSWER + 1):
        began = time.process_time_ns()
        plan = scheduler.schedule()
        took = time.process_time_ns() - began
        assert plan is not None
        sampled = int(plan.samples.sum())
        result = Result(step, [rng.randrange(30_000) for _ in range(sampled)], [None] * sampled, 0, 0)
        began = time.process_time_ns()
        outputs = scheduler.update(result)
        took += time.process_time_ns() - began
        for output in outputs:
            if output.finish:
                submit()
        scheduler.sequences.take_phases()
        is_warm = step > ANSWER
        step_ns += took * is_warm
        if step % STEPS_A_HEARTBEAT == 0:
            began = time.process_time_ns()
            reports = [report.SerializeToString() for _, report in reporter.reports(step / 100)]
            if is_warm:
                beats.append(time.process_time_ns() - began)
                bytes_ += sum(map(len, reports))
    heartbeats = max(1, len(beats))
    return {
        "step_us": step_ns / steps / 1000,
        "heartbeat_us": sum(beats) / heartbeats / 1000,
        "bytes_per_heartbeat": bytes_ / heartbeats,
    }


def snapshot_us(blocks: int) -> float:
    """CPU time of listing so many cached blocks, in us."""
    scheduler = Scheduler(
        Limits(max_seqs=8, max_batch_tokens=4096, max_queue=8, context_length=4096, prefix_cache=True),
        [],
        PoolSizes(blocks),
    )
    rng = random.Random(1)
    for number in range(blocks // 128):
        prompt = tuple(rng.randrange(30_000) for _ in range(2040))
        scheduler.submit(Request(str(number), prompt, SamplingParams(max_tokens=1), (), 0, ""))
        scheduler.schedule()
        scheduler.update(Result(number + 1, [1], [None], 0, 0))
    times = []
    for _ in range(5):
        began = time.process_time_ns()
        count = len(scheduler.newest_prefixes(blocks))
        times.append(time.process_time_ns() - began)
    assert count > 0.9 * blocks
    return statistics.median(times) / 1000


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about: dict[str, Any] = measure.machine()
    sides = {"no router asks": 0, "one router": 1, "two routers": 2}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side, routers in sides.items():
            runs[side].append(run(arguments.steps, routers, number))
    medians = {
        side: {name: round(statistics.median(each[name] for each in runs[side]), 1) for name in runs[side][0]}
        for side in sides
    }
    base = [each["step_us"] for each in runs["no router asks"]]
    for side in sides:
        ratios = [each["step_us"] / before for each, before in zip(runs[side], base, strict=True)]
        medians[side]["step_ratio"] = round(statistics.median(ratios), 3)
    snapshot = round(snapshot_us(32_768))
    rows = [
        [side, f"{each['step_us']:.0f}", f"{each['step_ratio']:.3f}", f"{each['heartbeat_us']:.0f}",
         f"{each['bytes_per_heartbeat']:.0f}"]
        for side, each in medians.items()
    ]  # fmt: skip
    header = ["", "a step's scheduling, us", "ratio", "a heartbeat's reports, us", "bytes"]
    text = f"{measure.table(header, rows)}\n\nA snapshot of 32,768 blocks takes {snapshot} us to list."
    print(text)
    if arguments.save:
        measure.save("prefix-reports", {"machine": about, "sides": medians, "snapshot_us": snapshot}, text)


if __name__ == "__main__":
    main()
