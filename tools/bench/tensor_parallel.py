"""Tensor parallelism on CPU cores: two ranks with one thread each against one rank with one thread, and where the rest
of the second core goes.

Two cores share caches, memory and often one physical core, so a second core never doubles the speed of a program. Two
independent engines that run at once show its gain for work that shares nothing; that is the ceiling. The rest of the
loss is in collectives (moving bytes, and waiting for the other rank) or in the driver.

    python tools/bench/tensor_parallel.py --save      writes docs/bench/tensor-parallel.json and .md
"""

import argparse
import random
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import measure
from collectives import latencies
from lockstep_engine import Engine, SamplingParams
from synthetic import SHAPES, Shape, write_random

PROMPT_TOKENS = 8


def generate(engine: Engine, vocab: int, batch: int, tokens: int) -> None:
    """`tokens` tokens of each of `batch` streams."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(2, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    engine.generate_ids(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))


def compare(path: Path, shape: Shape, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One row: tokens/s of each arrangement, the efficiency, and what limits it."""

    def engine(**settings: int) -> Engine:
        return stack.enter_context(Engine(path, prefix_cache=False, max_seqs=16, max_context=256, **settings))

    with ExitStack() as stack:
        one, other, two, threads = (
            engine(threads=1),
            engine(threads=1),
            engine(tp=2, threads=1),
            engine(threads=2),
        )
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def both() -> None:
            for done in [pool.submit(generate, each, shape.vocab, batch, tokens) for each in (one, other)]:
                done.result()

        times = measure.in_turn(
            {
                "tp 1": lambda: generate(one, shape.vocab, batch, tokens),
                "tp 2": lambda: generate(two, shape.vocab, batch, tokens),
                "tp 1, two threads": lambda: generate(threads, shape.vocab, batch, tokens),
                "two engines": both,
            },
            rounds,
        )
        status = two.core.status()
    speed = {name: round(batch * tokens / each, 2) for name, each in times.items()}
    speed["two engines"] = round(2 * batch * tokens / times["two engines"], 2)
    message = batch * shape.hidden * 4
    sums = 2 * shape.layers + 2
    bare_us = latencies("shared memory", 2, [message])[0]["median_us"]
    ceiling = times["tp 1"] / times["two engines"]
    predicted_s = times["two engines"] / 2 + sums * bare_us * 1e-6 * tokens
    return {
        "batch": batch,
        "tokens_per_s": speed,
        "efficiency": round(times["tp 1"] / times["tp 2"] / 2, 3),
        "ceiling": round(ceiling, 3),
        "efficiency_of_ceiling": round(times["two engines"] / times["tp 2"] / 2, 3),
        "two_threads_efficiency": round(times["tp 1"] / times["tp 1, two threads"] / 2, 3),
        "predicted_speed_up": round(times["tp 1"] / predicted_s, 2),
        "measured_speed_up": round(times["tp 1"] / times["tp 2"], 2),
        "step_ms": round(times["tp 2"] / tokens * 1e3, 2),
        "collectives": sums,
        "message_bytes": message,
        "collective_share": round(status.collective_us / status.step_us, 4),
        "collective_us_in_a_step": round(status.collective_us, 1),
        "collective_us_bare": bare_us,
        "transfer_share": round(sums * bare_us / status.step_us, 4),
        "driver_share": round(status.driver_us / status.step_us, 4),
    }


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    rows = report["rows"]
    speeds = measure.table(
        ["batch", "tp 1, 1 thread", "tp 2, 1 thread each", "tp 1, 2 threads", "two engines at once, together"],
        [
            [
                row["batch"],
                *(row["tokens_per_s"][name] for name in ("tp 1", "tp 2", "tp 1, two threads", "two engines")),
            ]
            for row in rows
        ],
    )
    losses = measure.table(
        [
            "batch",
            "efficiency",
            "ceiling of the machine",
            "of the ceiling",
            "predicted / measured speed-up",
            "in collectives",
            "of it bytes moving",
            "driver",
        ],
        [
            [
                row["batch"],
                f"{row['efficiency']:.1%}",
                f"{row['ceiling']:.1%}",
                f"{row['efficiency_of_ceiling']:.1%}",
                f"{row['predicted_speed_up']:.2f}x / {row['measured_speed_up']:.2f}x",
                f"{row['collective_share']:.1%}",
                f"{row['transfer_share']:.1%}",
                f"{row['driver_share']:.2%}",
            ]
            for row in rows
        ],
    )
    meaning = (
        "Efficiency is the speed-up of tp 2 over tp 1, halved. The ceiling is the same figure for two independent "
        "engines that run at once: what the second core is worth to work that shares nothing. Shares are of a step."
    )
    collectives = (
        "In collectives: rank 0's time there, moving bytes and waiting for the other rank together; of it bytes "
        "moving: the number of sums times what a sum takes between two ranks that do nothing else."
    )
    return "\n\n".join(
        [
            "# Tensor parallelism on two cores",
            f"A Llama of {report['parameters'] / 1e6:.0f} M random weights, float32 ({report['shape']}). Tokens/s:",
            speeds,
            meaning,
            losses,
            collectives,
        ]
    )


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="tp = 2 with one thread each against tp = 1 with one thread.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write docs/bench/tensor-parallel.json and .md")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    about = measure.machine()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(shape, Path(folder))
        rows = [compare(path, shape, batch, arguments.tokens, arguments.rounds) for batch in arguments.batches]
    report = {"machine": about, "shape": arguments.shape, "parameters": shape.parameters, "rows": rows}
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("tensor-parallel", report, text)


if __name__ == "__main__":
    main()
