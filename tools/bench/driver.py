"""What scheduling and allocation cost: the driver's part of a step on a model of a billion random weights.

The driver's time is all of it: taking in the last result, choosing what runs, finding blocks, writing the plan, and the
doorbells both ways. The goal is for scheduling and allocation alone.

    python tools/bench/driver.py --save      writes docs/bench/driver.json and .md
"""

import argparse
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure
from lockstep_engine import Engine, SamplingParams
from synthetic import SHAPES, write_random

GOAL = 0.02


def row(path: Path, vocab: int, batch: int, tokens: int, threads: int | None) -> dict[str, Any]:
    """The driver's part at one batch size; a fresh engine, so that its running means are of these steps alone."""
    rng = random.Random(batch)
    # One token each: the first step is then like all others.
    prompts = [[rng.randrange(2, vocab)] for _ in range(batch)]
    with Engine(path, threads=threads, prefix_cache=False, max_context=1024, max_seqs=64) as engine:
        engine.generate_ids(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        status = engine.core.status()
    return {
        "batch": batch,
        "step_us": round(status.step_us),
        "driver_us": round(status.driver_us, 1),
        "share": round(status.driver_us / status.step_us, 5),
        "goal": GOAL,
    }


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    lines = measure.table(
        ["batch", "step, ms", "driver, us", "share of a step"],
        [[each["batch"], each["step_us"] / 1e3, each["driver_us"], f"{each['share']:.3%}"] for each in report["rows"]],
    )
    about = (
        f"A Llama of {report['parameters'] / 1e6:.0f} M random weights ({report['shape']}), float32, decoding. All "
        f"that is not the rank's own work; the goal for scheduling and allocation is {GOAL:.0%}."
    )
    return f"# The driver's part of a step\n\n{about}\n\n{lines}"


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="The driver's part of a step on a model of a billion weights.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", action="store_true", help="write docs/bench/driver.json and .md")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    about = measure.machine()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(shape, Path(folder))
        rows = [row(path, shape.vocab, batch, arguments.tokens, arguments.threads) for batch in arguments.batches]
    report = {"machine": about, "shape": arguments.shape, "parameters": shape.parameters, "rows": rows}
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("driver", report, text)


if __name__ == "__main__":
    main()
