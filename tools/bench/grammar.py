"""What grammars cost: the time of a mask, and the speed of streams with a grammar and of others that run with them.

The last is the figure that matters: a grammar must cost no other stream anything. So it is a ratio of two times of the
same streams on the same engine: with others that have a grammar, and with the same number that have none. All sides
run in turn, so that a noisy machine slows all alike.

    python tools/bench/grammar.py --save      writes docs/bench/grammar.json and .md
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np
from lockstep_engine import AsyncEngine, EngineConfig, Grammar, GrammarKind, Output, Request, SamplingParams
from lockstep_engine.constraint import MaskThreads
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.model_config import inspect_model

REFERENCE = measure.ROOT / "models/reference"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "visits": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"day": {"type": "string", "format": "date"}, "note": {"type": "string"}},
                "required": ["day", "note"],
                "additionalProperties": False,
            },
        },
        "mood": {"enum": ["calm", "wild", "dark"]},
    },
    "required": ["name", "visits", "mood"],
    "additionalProperties": False,
}
GRAMMARS = {
    "JSON object": Grammar(GrammarKind.JSON_OBJECT),
    "JSON schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA)),
    "reasoning, then a JSON object": Grammar(
        GrammarKind.LARK,
        'start: thought /[ \\n]{0,4}/ form\nform: %json {"type": "object"}\nthought[lazy]: /(?s:.*)<\\/think>/',
    ),
    "text with strict calls": Grammar(
        GrammarKind.LARK,
        'start: (marked "\\n" call "\\n" "</tool_call>")* TEXT\nmarked[lazy]: /(?s:.*)<tool_call>/\n'
        "TEXT: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/\n"
        'call: %json {"properties": {"name": {"const": "f"}, "arguments": {}}, "additionalProperties": false}',
    ),
    "regex": Grammar(GrammarKind.REGEX, "([A-Z][a-z]+( [a-z]+){0,12}[.!?] ?)+"),
    "slow Lark": Grammar(GrammarKind.LARK, 'start: start start | "a" | " "'),
}
"""The last one is ambiguous at every token: its masks take tens of milliseconds after some hundred tokens."""
ENDLESS = {
    "a JSON schema": Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 10_000, "items": _SCHEMA})
    ),
    "a regex": GRAMMARS["regex"],
    "a slow Lark grammar": GRAMMARS["slow Lark"],
}
"""Grammars of outputs that do not end, so that the number of streams stays the same."""


def mask_times(grammar: Grammar, tokens: int) -> dict[str, float]:
    """CPU time in microseconds: to compile a grammar, and from a token to the next mask, over a random walk."""
    model = inspect_model(EngineConfig(model=str(REFERENCE)))
    compiler = GrammarCompiler(model, MaskThreads(lambda: None))
    rng = random.Random(1)

    async def compiled(number: int) -> Any:
        request = Request(str(number), (2,), SamplingParams(grammar=grammar))
        return await compiler.compile(request)

    async def walk() -> tuple[float, list[float]]:
        await compiler.load()
        began = time.process_time()  # it is compiled in a thread
        constraint = await compiled(0)
        compile_s = time.process_time() - began
        times: list[float] = []
        while len(times) < tokens:
            bits = np.unpackbits(constraint.mask.view(np.uint8), count=model.vocab_size, bitorder="little")
            ids = [id_ for id_ in np.flatnonzero(bits).tolist() if id_ not in model.eos_ids]
            if not ids:
                constraint = await compiled(len(times))
                continue
            token = rng.choice(ids)
            began = time.thread_time()
            constraint.consume(token)
            times.append(time.thread_time() - began)
            assert constraint.error is None, constraint.error
        return compile_s, sorted(times)

    compile_s, times = asyncio.run(walk())
    compiler.close()
    return {
        "compile_us": round(compile_s * 1e6),
        "mask_us_median": round(statistics.median(times) * 1e6, 1),
        "mask_us_p99": round(times[int(len(times) * 0.99)] * 1e6, 1),
    }


class Streams:
    """An engine whose streams are timed one by one."""

    def __init__(self, path: Path, *, overlap: bool) -> None:
        config = EngineConfig(model=str(path), threads=1, prefix_cache=False, max_context=1024, overlap=overlap)
        self.engine = AsyncEngine(config, on_outputs=self._take, on_change=lambda: None)
        self._tokens: dict[str, int] = {}
        self._free: set[str] = set()
        self._done = asyncio.Event()

    def _take(self, _step: int, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            self._tokens[output.request_id] += len(output.ids)
            if output.finish is not None:
                self._free.discard(output.request_id)
                if not self._free:
                    self._done.set()

    async def run(self, free: int, others: int, tokens: int, grammar: Grammar | None) -> tuple[float, float]:
        """Tokens a second of `free` streams until the last of them ends, and of the others meanwhile."""
        rng = random.Random(1)
        vocabulary = self.engine.model.vocab_size
        names = [str(number) for number in range(free + others)]
        self._tokens, self._free = dict.fromkeys(names, 0), set(names[:free])
        self._done.clear()
        began = time.perf_counter()
        for number, name in enumerate(names):
            prompt = tuple(rng.randrange(2, vocabulary) for _ in range(8))
            is_free = number < free
            # The others are longer, so that they run as long as the free ones do.
            params = SamplingParams(
                max_tokens=tokens if is_free else 2 * tokens,
                temperature=1.0,
                seed=number,
                ignore_eos=True,
                grammar=None if is_free else grammar,
            )
            self.engine.submit(Request(name, prompt, params))
        await self._done.wait()
        took_s = time.perf_counter() - began
        for name in names:
            self.engine.cancel(name)
        return free * tokens / took_s, sum(self._tokens[name] for name in names[free:]) / took_s


async def speeds(path: Path, sizes: Sequence[int], tokens: int, rounds: int, *, overlap: bool) -> list[dict[str, Any]]:
    """One row for each kind of the others: tokens/s of both, and their ratios to those of the same round in which the
    others have no grammar; medians.
    """
    free, others = sizes
    kinds = {"no grammar": None, "no grammar, again": None, **ENDLESS}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    streams = Streams(path, overlap=overlap)
    await streams.engine.start()
    try:
        for _ in range(rounds + 1):
            for name, grammar in kinds.items():
                measured[name].append(await streams.run(free, others, tokens, grammar))
    finally:
        await streams.engine.close()

    def row(name: str) -> dict[str, Any]:
        figures: dict[str, Any] = {"overlap": overlap, "others": name, "free_streams": free, "other_streams": others}
        for column, whose in enumerate(("free", "other")):
            values = [each[column] for each in measured[name][1:]]  # the first round warms up
            plain = [each[column] for each in measured["no grammar"][1:]]
            ratios = [value / other for value, other in zip(values, plain, strict=True)]
            figures[f"{whose}_tokens_per_s"] = round(statistics.median(values), 1)
            figures[f"{whose}_ratio"] = round(statistics.median(ratios), 3)
        return figures

    return [row(name) for name in kinds]


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    masks = measure.table(
        ["grammar", "compile, us", "token and mask, us: median", "p99"],
        [[row["grammar"], row["compile_us"], row["mask_us_median"], row["mask_us_p99"]] for row in report["masks"]],
    )
    lines = measure.table(
        ["overlap", "the others have", "streams without, tokens/s", "ratio", "the others, tokens/s", "ratio"],
        [
            [
                "on" if row["overlap"] else "off",
                row["others"],
                row["free_tokens_per_s"],
                f"{row['free_ratio']:.3f}",
                row["other_tokens_per_s"],
                f"{row['other_ratio']:.3f}",
            ]
            for row in report["rows"]
        ],
    )
    first = report["rows"][0]
    about_masks = (
        "CPU time to compile a grammar for the first time, and from a token to the mask of the next one, on random "
        "walks through the reference model's vocabulary of 4,096 tokens."
    )
    about_streams = (
        f"{first['free_streams']} streams without a grammar beside {first['other_streams']} others, on the reference "
        "model with one thread. Ratios are to the speeds of the same round beside others that have no grammar either; "
        "the line `again` shows what the machine's noise makes of them. With overlap a stream with a grammar takes "
        "part in every second step, because its mask needs its last token; the others then share a step with fewer "
        "streams. Masks of the slow grammar keep one core busy, which ranks on a machine with few cores would have."
    )
    return f"# What grammars cost\n\n{about_masks}\n\n{masks}\n\n{about_streams}\n\n{lines}"


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="The time of masks, and what streams with grammars cost others.")
    parser.add_argument("--sizes", type=int, nargs=2, default=[4, 4], help="streams without a grammar, and others")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write docs/bench/grammar.json and .md")
    arguments = parser.parse_args()
    about = measure.machine()
    masks = [{"grammar": name, **mask_times(grammar, 500)} for name, grammar in GRAMMARS.items()]
    rows: list[dict[str, Any]] = []
    for overlap in (False, True):
        rows += asyncio.run(speeds(REFERENCE, arguments.sizes, arguments.tokens, arguments.rounds, overlap=overlap))
    report = {"machine": about, "masks": masks, "rows": rows}
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("grammar", report, text)


if __name__ == "__main__":
    main()
