"""The engine against llama.cpp through llama-cpp-python, on the same weights, float and quantized: tokens/s of 1, 8 and
16 streams.

llama.cpp runs in its own interpreter, with GGUF files that are made here from the checkpoint. Its streams are decoded
in one batch through the C API, without a server: its best case. Rounds alternate between all sides. Without --peer our
weights are compared with each other only, and nothing is saved.

    python -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python
    python tools/bench/against_llama.py --peer .venv-llama/bin/python --models reference 0.5b --save
    python tools/bench/against_llama.py --models 0.5b qwen-0.5b --weights int8 "int8 with head" w8a8 "w8a8 with head"
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import measure
import synthetic
from lockstep_engine import Engine, EngineConfig, SamplingParams
from lockstep_engine.model_config import inspect_model
from lockstep_tools.model import gguf_files
from lockstep_tools.quantization.layers import LayeredModel
from lockstep_tools.quantization.production import Recipe, produce

PROMPT_TOKENS = 32
NEW_TOKENS, FEWER_TOKENS = 128, 24
"""Of a stream: with the reference model, and with others, which are slower."""
CONTEXT = 256
STREAMS = (1, 8, 16)
WEIGHTS = {"f32": "float32", "f16": "float16", "q8_0": "q8_0", "q4_0": "q4_0"}
"""llama.cpp's names of its files' types, and ours."""
OURS = {
    "float": None,
    "int8": Recipe("int8"),
    "int8 with head": Recipe("int8", head="int8"),
    "w8a8": Recipe("w8a8"),
    "w8a8 with head": Recipe("w8a8", head="int8"),
    "int4": Recipe("rtn4"),
    "int4 with head": Recipe("rtn4", head="int8"),
}
"""Our checkpoints, and how they are made: None, as it is; with rounding in 4 bits, as speed does not depend on it."""
PAIRS = {
    "float": ("f32", "f16"),
    "int8": ("q8_0",),
    "int8 with head": ("q8_0",),
    "w8a8": ("q8_0",),
    "w8a8 with head": ("q8_0",),
    "int4": ("q4_0",),
    "int4 with head": ("q4_0",),
}
"""What each of them is compared with."""
Run = tuple[list[list[int]], float]
"""The tokens of each stream, and the seconds that they took."""


class Peer:
    """The other interpreter."""

    def __init__(self, python: Path) -> None:
        script = Path(__file__).with_name("llama_peer.py")
        self._process = subprocess.Popen(
            [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = ""

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama_peer.py has ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        self.version = answer["version"]
        return answer

    def run(self, name: str, request: dict[str, Any]) -> Run:
        """Generate with a model that is loaded."""
        answer = self.ask(name=name, generate=request)
        return answer["ids"], answer["seconds"]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the streams' tokens before their first difference, where rounding exchanges near-equal logits."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / total


def compare(
    engines: Mapping[str, Engine], peer: Peer | None, model: str, streams: int, vocab: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows for one number of streams: one for each pair, or for each of our weights if there is no peer."""
    rng = random.Random(streams)
    prompts = [[rng.randrange(4, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    works: dict[str, Callable[[], Run]] = {name: partial(run, each, prompts, params) for name, each in engines.items()}
    if peer is not None:
        request = {"prompts": prompts, "tokens": tokens}
        works |= {kind: partial(peer.run, f"{kind} {streams}", request) for kind in WEIGHTS}
    ids = {name: work()[0] for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(work()[1])
    speed = {name: streams * tokens / statistics.median(each) for name, each in times.items()}
    rows = []
    for ours in engines:
        row = {
            "model": model,
            "streams": streams,
            "tokens": tokens,
            "our_weights": ours,
            "ours_tokens_per_s": round(speed[ours], 1),
            "ours_over_our_float": round(speed[ours] / speed["float"], 2),
        }
        if peer is None:
            rows.append(row)
            continue
        for kind in PAIRS[ours]:
            theirs = {
                "weights": kind,
                "llama_cpp_tokens_per_s": round(speed[kind], 1),
                "ratio": round(speed[ours] / speed[kind], 2),
                "same_tokens_up_to_first_difference": round(agreement(ids[ours], ids[kind]), 3),
            }
            rows.append(row | theirs)
    return rows


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    """Generate with our engine."""
    began = time.perf_counter()
    ids = engine.generate_ids(prompts, params)
    return ids, time.perf_counter() - began


def own_text(report: Mapping[str, Any]) -> str:
    """What is printed without a peer."""
    columns = ("model", "streams", "our_weights", "ours_tokens_per_s", "ours_over_our_float")
    return measure.table(columns, [[row[column] for column in columns] for row in report["rows"]])


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    lines = measure.table(
        [
            "model",
            "streams",
            "our weights",
            "llama.cpp's",
            "ours, tokens/s",
            "llama.cpp, tokens/s",
            "ours / llama.cpp",
            "ours / our float",
            "same tokens",
        ],
        [
            [
                row["model"],
                row["streams"],
                row["our_weights"],
                row["weights"],
                row["ours_tokens_per_s"],
                row["llama_cpp_tokens_per_s"],
                f"{row['ratio']:.2f}x",
                f"{row['ours_over_our_float']:.2f}x",
                f"{row['same_tokens_up_to_first_difference']:.0%}",
            ]
            for row in report["rows"]
        ],
    )
    about = (
        f"{report['threads']} threads, prompts of {PROMPT_TOKENS} tokens and "
        f"{NEW_TOKENS} new ones ({FEWER_TOKENS} but for `reference`), greedy; ours computes in float32, in its "
        "deterministic mode, with the KV "
        f"cache as it is by default; llama-cpp-python {report['llama_cpp_python']} keeps KV in float16, its default. "
        "Our float is the checkpoint as it is: float16 for `reference`, bfloat16 for the others, which have random "
        "weights. int8 has a scale for each row, w8a8 also one for each token's inputs, int4 one for each 128 inputs, "
        "embeddings stay in 16 bits, and so does "
        "the head, but for rows with it, where it is int8; "
        "q8_0 and q4_0 have a scale for each 32 inputs, and embeddings and head are quantized, too. "
        "Same tokens: up to the first difference of each stream; quantized sides round differently."
    )
    return f"# Against llama.cpp\n\n{about}\n\n{lines}"


def measure_model(
    name: str, weights: Sequence[str], peer: Peer | None, folder: Path, threads: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows for one model, whose files are written to `folder`."""
    if name == "reference":
        model = measure.ROOT / "models/reference"
    else:
        model = synthetic.write_random(synthetic.SHAPES[name], folder / "float")
    checkpoints = {"float": model}
    for ours in weights:
        if (recipe := OURS[ours]) is not None:
            checkpoints[ours] = folder / ours
            checkpoints[ours].mkdir()
            produce(LayeredModel(inspect_model(EngineConfig(model=str(model)))), checkpoints[ours], recipe)
    files = {kind: folder / f"{kind}.gguf" for kind in WEIGHTS} if peer else {}
    for kind, file in files.items():
        gguf_files.write(model, file, WEIGHTS[kind], lambda *_: None)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rows = []
    with ExitStack() as stack:
        engines = {
            ours: stack.enter_context(Engine(checkpoint, threads=threads, prefix_cache=False))
            for ours, checkpoint in checkpoints.items()
        }
        for streams in STREAMS:
            for kind, file in files.items():
                load = {"file": str(file), "threads": threads, "streams": streams, "context": CONTEXT}
                assert peer is not None
                peer.ask(name=f"{kind} {streams}", load=load)
            tokens = NEW_TOKENS if name == "reference" else FEWER_TOKENS
            rows += compare(engines, peer, name, streams, vocab, tokens, rounds)
    return rows


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="The engine against llama.cpp on the same weights.")
    parser.add_argument("--peer", type=Path, help="python that has llama-cpp-python; without it only ours is measured")
    parser.add_argument("--models", choices=("reference", *synthetic.SHAPES), nargs="+", default=["reference", "0.5b"])
    parser.add_argument("--weights", choices=OURS, nargs="+", default=list(OURS), help="ours, besides float")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write docs/bench/llama-cpp.json and .md")
    arguments = parser.parse_args()
    if arguments.save and arguments.peer is None:
        parser.error("--save is for a run with --peer")
    about = measure.machine()
    report: dict[str, Any] = {"machine": about, "threads": arguments.threads, "rows": []}
    for name in arguments.models:
        with ExitStack() as stack:
            peer = None
            if arguments.peer is not None:
                peer = Peer(arguments.peer)  # for each model: it keeps all files that it has loaded
                stack.callback(peer.close)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            report["rows"] += measure_model(name, arguments.weights, peer, folder, arguments.threads, arguments.rounds)
            if peer is not None:
                report["llama_cpp_python"] = peer.version
    text = own_text(report) if arguments.peer is None else report_text(report)
    print(text)
    if arguments.save:
        measure.save("llama-cpp", report, text)


if __name__ == "__main__":
    main()
