"""The modes of KV compression compared with none: accuracy, memory and speed, for the decision record.

Accuracy is exact on any machine, however busy: perplexity and KL divergence on texts, and needles in the prompt of a
model that copies (see `synthetic.write_copier`). Memory is accounted from block sizes and measured as the sequences
that run at once in the same pool. Speed alternates between the modes.

    python tools/bench/compression.py --texts books-valid.txt wikitext2-test.txt --save
"""

import argparse
import json
import random
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from lockstep_engine import Engine, EngineConfig, SamplingParams
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kv_cache import KvCache
from lockstep_tools.model.accuracy import Divergence, Haystack, Perplexity, recall, windows
from synthetic import write_copier
from transformers import AutoConfig

MODES = ("none", "lazy", "immediate", "per_layer")
SCORED = 64
GOALS = {"perplexity": 0.005, "kl": 0.002, "memory": 0.4, "speed": 0.1}
_CAPACITY_SEQUENCES = 8
RECORD = measure.ROOT / "docs/adr/0002-kv-compression.md"


def settings(mode: str, layers: int) -> dict[str, Any]:
    """Modes of the engine; `per_layer` leaves the first and the last layer uncompressed."""
    chosen: dict[str, Any] = {"kv_compression": mode}
    if mode == "per_layer":
        chosen["kv_compressed_layers"] = tuple(range(1, layers - 1)) or (0,)
    return chosen


def layers_of(model: Path) -> int:
    """Decoder layers of a checkpoint."""
    return int(AutoConfig.from_pretrained(model).num_hidden_layers)


@contextmanager
def engines(model: Path, threads: int | None, **common: Any) -> Iterator[dict[str, Engine]]:
    """One engine a mode."""
    layers = layers_of(model)
    with ExitStack() as stack:
        yield {
            mode: stack.enter_context(
                Engine(model, threads=threads, prefix_cache=False, **common, **settings(mode, layers))
            )
            for mode in MODES
        }


def accuracy(
    model: Path, texts: Sequence[Path], sizes: Sequence[int], tokens: int, threads: int | None
) -> list[dict[str, Any]]:
    """Perplexity of each mode and its divergence from `none`, by text and window."""
    rows = []
    for size in sizes:
        common = {"max_context": size + 2, "max_seqs": SCORED, "max_batch_tokens": SCORED}
        with engines(model, threads, **common) as by_mode:
            for text in texts:
                ids = by_mode["none"].encode(text.read_text(encoding="utf-8"))[:tokens]
                fits = {mode: Perplexity() for mode in MODES}
                apart = {mode: Divergence() for mode in MODES if mode != "none"}
                for window in windows(len(ids), size, size):
                    piece = ids[window.begin : window.end]
                    reference = by_mode["none"].score(piece, vocabulary=True)
                    fits["none"].add(reference, window.scored)
                    for mode, divergence in apart.items():
                        scores = by_mode[mode].score(piece, vocabulary=True)
                        fits[mode].add(scores, window.scored)
                        divergence.add(reference, scores, window.scored)
                base = fits["none"].value
                for mode in MODES:
                    row = {"text": text.name, "window": size, "tokens": fits[mode].tokens, "mode": mode}
                    row |= {"perplexity": fits[mode].value, "change": fits[mode].value / base - 1}
                    rows.append(row if mode == "none" else {**row, "kl": apart[mode].summary()})
    return rows


def needles(
    text: Path, contexts: Sequence[int], depths: Sequence[float], trials: int, threads: int | None
) -> list[dict[str, Any]]:
    """Recall of a model that copies, by mode and place; all modes get the same needles."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_copier(Path(folder))
        common = {"max_context": max(contexts) + 64, "max_seqs": SCORED, "max_batch_tokens": SCORED}
        with engines(model, threads, **common) as by_mode:
            for mode, engine in by_mode.items():
                ids = engine.encode(text.read_text(encoding="utf-8"), special=False)

                def encode(string: str, engine: Engine = engine) -> list[int]:
                    return engine.encode(string, special=False)

                for context in contexts:
                    for depth in depths:
                        found = recall(engine, Haystack(encode, ids, seed=context), context, depth, trials)
                        rows.append({"mode": mode, **found.row()})
    return rows


def kv_bytes(tokens: int, hot_window: HotWindow | None, block_bytes: int, cold_block_bytes: int) -> int:
    """Bytes of a sequence's KV between steps, when `tokens` of its tokens have been computed."""
    blocks = -(-tokens // BLOCK_SIZE)
    cold = 0 if hot_window is None else max(0, hot_window.first_hot(tokens // BLOCK_SIZE) - hot_window.sink)
    return (blocks - cold) * block_bytes + cold * cold_block_bytes


def accounted(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes of KV that one sequence takes for each of its tokens, by shape, dtype, length and mode."""
    shapes = {
        "reference, float32": ({"layers": 5, "kv_heads": 4, "head_dim": 64}, torch.float32),
        "reference, bfloat16": ({"layers": 5, "kv_heads": 4, "head_dim": 64}, torch.bfloat16),
        "Llama-3-8B, bfloat16": ({"layers": 32, "kv_heads": 8, "head_dim": 128}, torch.bfloat16),
    }
    rows = []
    for name, (shape, dtype) in shapes.items():
        hot = KvCache.block_bytes(**shape, dtype=dtype)
        for length in lengths:
            for mode in MODES:
                chosen = settings(mode, shape["layers"])
                layers = chosen.get("kv_compressed_layers")
                cold = KvCache.cold_block_bytes(**shape, dtype=dtype, compressed_layers=layers)
                rule = EngineConfig(model="", **chosen).hot_window
                each = kv_bytes(length, rule, hot, cold) / length
                saved = 1 - each / (kv_bytes(length, None, hot, cold) / length)
                rows.append({"cache": name, "context": length, "mode": mode, "bytes_a_token": each, "saved": saved})
    return rows


def capacity(model: Path, lengths: Sequence[int], threads: int | None) -> list[dict[str, Any]]:
    """Sequences that run at once in a pool that holds so many without compression, and the pools' real sizes."""
    config = AutoConfig.from_pretrained(model)
    shape = {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    block = KvCache.block_bytes(**shape, dtype=torch.float32)
    rows = []
    for length in lengths:
        memory = _CAPACITY_SEQUENCES * -(-length // 16) * block
        for mode in MODES:
            chosen = settings(mode, shape["layers"])
            with Engine(
                model,
                threads=threads,
                prefix_cache=False,
                max_context=length,
                kv_memory_bytes=memory,
                **chosen,
            ) as engine:
                status = engine.core.status()
                rows.append(
                    {
                        "context": length,
                        "mode": mode,
                        "memory_bytes": memory,
                        "hot_blocks": status.total_blocks - status.cold_blocks,
                        "cold_blocks": status.cold_blocks,
                        "sequences_at_once": most_running(engine, length, config.vocab_size),
                    }
                )
    return rows


def most_running(engine: Engine, length: int, vocab: int) -> int:
    """How many of many sequences that end at `length` tokens the engine runs at once."""
    rng = random.Random(length)
    new = length // 8  # long enough that the prompts are computed: the pool must be the limit
    prompts = [[rng.randrange(4, vocab) for _ in range(length - new)] for _ in range(6 * _CAPACITY_SEQUENCES)]
    seen, done = 0, threading.Event()

    def watch() -> None:
        nonlocal seen
        while not done.wait(0.002):
            seen = max(seen, engine.core.status().running)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        engine.generate_ids(prompts, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
    finally:
        done.set()
        watcher.join()
    return seen


def speed(model: Path, rounds: int, threads: int | None) -> list[dict[str, Any]]:
    """Tokens/s of generating after long prompts, modes in turn."""
    vocab = int(AutoConfig.from_pretrained(model).vocab_size)
    rows = []
    with engines(model, threads, max_seqs=16) as by_mode:
        for batch, prompt, new in ((1, 1024, 256), (8, 512, 256), (16, 1024, 128)):
            rng = random.Random(batch)
            prompts = [[rng.randrange(4, vocab) for _ in range(prompt)] for _ in range(batch)]
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            works = {mode: partial(engine.generate_ids, prompts, params) for mode, engine in by_mode.items()}
            times = measure.in_turn(works, rounds)
            rows += [
                {
                    "batch": batch,
                    "prompt": prompt,
                    "new": new,
                    "mode": mode,
                    "tokens_per_s": round(batch * new / times[mode], 1),
                    "of_none": round(times["none"] / times[mode], 3),
                }
                for mode in MODES
            ]
    return rows


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Text, window and mode down."""
    return measure.table(
        ["text", "window", "mode", "perplexity", "change", "KL mean", "KL p99", "KL max", "same first choice"],
        [
            [
                row["text"],
                row["window"],
                row["mode"],
                f"{row['perplexity']:.3f}",
                *(
                    [""] * 5
                    if row["mode"] == "none"
                    else [
                        f"{row['change']:+.4%}",
                        *(f"{row['kl'][figure]:.1e}" for figure in ("mean", "p99", "max")),
                        f"{row['kl']['same_first_choice']:.2%}",
                    ]
                ),
            ]
            for row in rows
        ],
    )


def by_mode(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], cell: str, form: str) -> str:
    """A table with modes across."""
    cells = {(*(row[key] for key in keys), row["mode"]): form.format(row[cell]) for row in rows}
    lines = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return measure.table([*keys, *MODES], [[*line, *(cells[(*line, mode)] for mode in MODES)] for line in lines])


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people; parts that were not measured are left out."""
    page = ["# Compressed KV cache"]
    if "accuracy" in report:
        about = (
            f"Model `{report['model']}`, float32, windows that do not overlap. Goals: perplexity "
            f"+{GOALS['perplexity']:.1%}, KL {GOALS['kl']}. KL(none ‖ mode) over the whole vocabulary, in nats."
        )
        page += ["## Accuracy", about, accuracy_table(report["accuracy"])]
    if "needles" in report:
        about = (
            "A model that copies by construction, with random letters at a depth of a text; the share of needles that "
            "greedy decoding would give back whole, and the mean probability of a token of the answer. It shows that "
            "every block is read in its place and with its scale. The model has no weak spots of its own, so it does "
            "not show what a trained one forgets."
        )
        page += ["## Needles", about, by_mode(report["needles"], ("context", "depth"), "recalled", "{:.0%}")]
        page += ["Probability:", by_mode(report["needles"], ("context", "depth"), "probability", "{:.3f}")]
    if "accounted" in report:
        about = f"Bytes of KV a token of one sequence, accounted. Goal: {GOALS['memory']:.0%} saved at 1k and 2k."
        page += ["## Memory", about, by_mode(report["accounted"], ("cache", "context"), "bytes_a_token", "{:.0f}")]
        page += ["Saved:", by_mode(report["accounted"], ("cache", "context"), "saved", "{:.1%}")]
    if "capacity" in report:
        about = f"Sequences at once in a pool of the size that {_CAPACITY_SEQUENCES} uncompressed ones need, measured:"
        page += [about, by_mode(report["capacity"], ("context",), "sequences_at_once", "{}")]
    if "speed" in report:
        about = (
            f"Tokens/s of generating, prompt included, as a share of `none`'s. Goal: at least {1 - GOALS['speed']:.0%}."
        )
        page += ["## Speed", about, by_mode(report["speed"], ("batch", "prompt", "new"), "of_none", "{:.2f}")]
        page += ["Tokens/s:", by_mode(report["speed"], ("batch", "prompt", "new"), "tokens_per_s", "{:.0f}")]
    return "\n\n".join(page)


def origin(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Which run made each part."""
    runs: dict[str, list[str]] = {}
    for part, about in measured.items():
        machine = {key: value for key, value in about.items() if key != "command"}
        by = f"`{about['command']}`" if "command" in about else "another run, whose options were not kept,"
        runs.setdefault(measure.made(by, machine), []).append(part)
    if len(runs) == 1:
        return next(iter(runs))
    return "\n\n".join(f"{', '.join(parts).capitalize()}. {run}" for run, parts in runs.items())


def validation_table(report: Mapping[str, Any]) -> str:
    """The decision record's table of accuracy and its goals, at the longest window."""
    longest = max(row["window"] for row in report["accuracy"])
    rows = {(row["text"], row["mode"]): row for row in report["accuracy"] if row["window"] == longest}
    texts = list(dict.fromkeys(text for text, _ in rows))
    compressed = MODES[1:]
    lines: list[list[str]] = []
    for text in texts:
        changes = (f"{rows[text, mode]['change']:+.4%}" for mode in compressed)
        lines.append([f"perplexity, {text}, window {longest}", f"+{GOALS['perplexity']:.1%}", *changes])
    for text in texts:
        means = (f"{rows[text, mode]['kl']['mean']:.1e}" for mode in compressed)
        lines.append([f"KL from `none`, mean, {text}, window {longest}", f"{GOALS['kl']}", *means])
    worst = (f"{max(rows[text, mode]['kl']['max'] for text in texts):.1e}" for mode in compressed)
    lines.append(["KL from `none`, worst position of all texts", "", *worst])
    needles = {mode: [row for row in report["needles"] if row["mode"] == mode] for mode in MODES}
    recalled = {mode: sum(row["recalled"] for row in each) / len(each) for mode, each in needles.items()}
    lines.append(
        [
            f"needles recalled, up to {max(row['context'] for row in report['needles'])} tokens, all depths",
            f"{recalled['none']:.0%} (`none`)",
            *(f"{recalled[mode]:.0%}" for mode in compressed),
        ]
    )
    return measure.table(["check", "goal", *compressed], lines)


def benchmark_table(report: Mapping[str, Any]) -> str:
    """The decision record's table of memory and speed and their goals."""
    compressed = MODES[1:]
    lines = []
    for cache, context in dict.fromkeys((row["cache"], row["context"]) for row in report["accounted"]):
        if context <= 2048:
            found = {
                row["mode"]: row for row in report["accounted"] if (row["cache"], row["context"]) == (cache, context)
            }
            saved = (f"-{found[mode]['saved']:.1%}" for mode in compressed)
            lines.append([f"KV bytes a token at {context} tokens: {cache}", f"-{GOALS['memory']:.0%}", *saved])
    for context in dict.fromkeys(row["context"] for row in report["capacity"]):
        found = {row["mode"]: row["sequences_at_once"] for row in report["capacity"] if row["context"] == context}
        counts = (str(found[mode]) for mode in compressed)
        lines.append(
            [f"sequences of {context} tokens at once, same pool", f"more than {found['none']} (`none`)", *counts]
        )
    for batch, prompt in dict.fromkeys((row["batch"], row["prompt"]) for row in report["speed"]):
        shares = {row["mode"]: row["of_none"] for row in report["speed"] if row["batch"] == batch}
        cells = (f"{shares[mode]:.0%}" for mode in compressed)
        lines.append([f"tokens/s of `none`'s, {batch} x {prompt} tokens", f"{1 - GOALS['speed']:.0%}", *cells])
    return measure.table(["figure", "goal", *compressed], lines)


def keep(report: dict[str, Any]) -> dict[str, Any]:
    """Write the results; parts that were measured before and not now stay as they are."""
    file = measure.RESULTS / "compression.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("model") == report["model"]:
        report = {**before, **report, "measured": {**before["measured"], **report["measured"]}}
        del report["command"]
    measure.save("compression", report, report_text(report), origin=origin(report["measured"]))
    if {"accuracy", "needles"} <= report.keys():
        measure.fill(RECORD, "validation", validation_table(report))
    if {"accounted", "capacity", "speed"} <= report.keys():
        measure.fill(RECORD, "benchmark", benchmark_table(report))
    return report


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="Ways of compressing the KV cache: accuracy, memory, speed.")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="held-out texts")
    parser.add_argument("--model", type=Path, default=measure.ROOT / "models/reference")
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 2046])
    parser.add_argument("--tokens", type=int, default=20 * 1024, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048], help="of needles, and of the accounts")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parts = ("accuracy", "needles", "memory", "speed")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--save", action="store_true", help="write docs/bench/compression.json and .md, and the decision record"
    )
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": measure.machine(), "model": arguments.model.name}
    if "accuracy" in arguments.parts:
        report["accuracy"] = accuracy(
            arguments.model, arguments.texts, arguments.windows, arguments.tokens, arguments.threads
        )
    if "needles" in arguments.parts:
        depths = (0.0, 0.5, 1.0)
        report["needles"] = needles(arguments.texts[0], arguments.contexts, depths, arguments.trials, arguments.threads)
    if "memory" in arguments.parts:
        report["accounted"] = accounted([*arguments.contexts, 8192, 32768])
        report["capacity"] = capacity(arguments.model, arguments.contexts, arguments.threads)
    if "speed" in arguments.parts:
        report["speed"] = speed(arguments.model, arguments.rounds, arguments.threads)
    run = {"command": measure.command(), **report["machine"]}
    report["measured"] = dict.fromkeys(arguments.parts, run)
    if arguments.save:
        report = keep(report)
    print(report_text(report))


if __name__ == "__main__":
    main()
