"""How long ranks wait for the driver, with and without overlap: the time before a step in which rank 0 was idle.

Without overlap this is all of the driver's time between two steps: processing the result, scheduling, allocating
blocks, writing the plan, and the doorbells in both directions. With overlap it is the time that rank 0 itself needs
between two steps. Both engines exist at the same time and run in turn, so that a noisy machine slows both alike.

    python tools/bench/driver.py --models tiny reference 1b --threads 1 --save
"""

import argparse
import random
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import measure
from lockstep_engine import Engine, SamplingParams
from synthetic import SHAPES, write_random

REFERENCE = measure.ROOT / "models/reference"
WAYS = {"off": False, "on": True}


def rows_of(
    name: str, path: Path, batches: list[int], tokens: int, rounds: int, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One row for each batch size: step, wait and speed without overlap and with it."""
    rows = []
    fixed = {"prefix_cache": False, "max_context": 512, "max_seqs": max(batches), **settings}
    with Engine(path, overlap=False, **fixed) as off, Engine(path, overlap=True, **fixed) as on:
        engines = {"off": off, "on": on}
        for batch in batches:
            rng = random.Random(batch)
            # One token each, so that the first step is like all others.
            prompts = [[rng.randrange(2, off.core.model.vocab_size)] for _ in range(batch)]
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            works = {way: partial(engine.generate_ids, prompts, params) for way, engine in engines.items()}
            seconds = measure.in_turn(works, rounds)
            row: dict[str, Any] = {"model": name, "tp": fixed["tp"], "batch": batch}
            for way, engine in engines.items():
                status = engine.core.status()
                row |= {
                    f"{way}_step_us": round(status.step_us),
                    f"{way}_waited_us": round(status.driver_us, 1),
                    f"{way}_share": round(status.driver_us / status.step_us, 5),
                    f"{way}_tokens_per_s": round(batch * tokens / seconds[way], 1),
                }
            row["speed_up"] = round(seconds["off"] / seconds["on"], 3)
            rows.append(row)
            print(row, flush=True)
    return rows


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    lines = measure.table(
        [
            "model",
            "ranks",
            "batch",
            "step, ms",
            "waited, us",
            "share",
            "with overlap: step",
            "waited",
            "share",
            "speed",
        ],
        [
            [
                each["model"],
                each["tp"],
                each["batch"],
                *(
                    cell
                    for way in WAYS
                    for cell in (each[f"{way}_step_us"] / 1e3, each[f"{way}_waited_us"], f"{each[f'{way}_share']:.2%}")
                ),
                f"x {each['speed_up']:.2f}",
            ]
            for each in report["rows"]
        ],
    )
    about = (
        "Decoding on the machine's first device, random weights but for the reference model. Waited: before a step "
        "rank 0's device had nothing to do for so long. Speed: tokens a second with overlap over those without."
    )
    return f"# What ranks wait for the driver\n\n{about}\n\n{lines}"


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="What ranks wait for the driver, with and without overlap.")
    parser.add_argument("--models", choices=["reference", *sorted(SHAPES)], nargs="+", default=["tiny", "reference"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", action="store_true", help="write docs/bench/driver.json and .md")
    arguments = parser.parse_args()
    about = measure.machine()
    settings = {"tp": arguments.tp, "threads": arguments.threads}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = REFERENCE if name == "reference" else write_random(SHAPES[name], Path(folder, name))
            rows += rows_of(name, path, arguments.batches, arguments.tokens, arguments.rounds, settings)
    report = {"machine": about, "rows": rows}
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("driver", report, text)


if __name__ == "__main__":
    main()
