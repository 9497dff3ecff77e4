"""The engine against llama.cpp through llama-cpp-python, on the same weights: tokens/s of 1 and of 8 streams.

llama.cpp runs in its own interpreter, with float32 and float16 GGUF files that are made here from the checkpoint.
Its streams are decoded in one batch through the C API, without a server: its best case. Rounds alternate.

    python -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python
    python tools/bench/against_llama.py --peer .venv-llama/bin/python --save
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure
from lockstep_engine import Engine, SamplingParams
from lockstep_tools.model import gguf_files

PROMPT_TOKENS = 32
NEW_TOKENS = 128
CONTEXT = 256
WEIGHTS = {"f32": "float32", "f16": "float16"}


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


def compare(engine: Engine, peer: Peer, streams: int, vocab: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows for one number of streams, one for each GGUF."""
    rng = random.Random(streams)
    prompts = [[rng.randrange(4, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    ids = engine.generate_ids(prompts, params)
    times: dict[str, list[float]] = {"ours": [], "f32": [], "f16": []}
    agreed = {}
    for turn in range(rounds + 1):
        ours = measure.seconds(lambda: engine.generate_ids(prompts, params))
        answers = {
            kind: peer.ask(name=f"{kind} {streams}", generate={"prompts": prompts, "tokens": tokens})
            for kind in ("f32", "f16")
        }
        if turn == 0:  # warm-up
            agreed = {kind: agreement(ids, answer["ids"]) for kind, answer in answers.items()}
            continue
        times["ours"].append(ours)
        for kind, answer in answers.items():
            times[kind].append(answer["seconds"])
    speed = {name: streams * tokens / statistics.median(each) for name, each in times.items()}
    return [
        {
            "streams": streams,
            "weights": kind,
            "ours_tokens_per_s": round(speed["ours"], 1),
            "llama_cpp_tokens_per_s": round(speed[kind], 1),
            "ratio": round(speed["ours"] / speed[kind], 2),
            "same_tokens_up_to_first_difference": round(agreed[kind], 3),
        }
        for kind in ("f32", "f16")
    ]


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    lines = measure.table(
        ["streams", "llama.cpp's weights", "ours, tokens/s", "llama.cpp, tokens/s", "ours / llama.cpp", "same tokens"],
        [
            [
                row["streams"],
                row["weights"],
                row["ours_tokens_per_s"],
                row["llama_cpp_tokens_per_s"],
                f"{row['ratio']:.2f}x",
                f"{row['same_tokens_up_to_first_difference']:.0%}",
            ]
            for row in report["rows"]
        ],
    )
    about = (
        f"Model `{report['model']}`, {report['threads']} threads, prompts of {PROMPT_TOKENS} tokens and "
        f"{report['tokens']} new ones, greedy; ours computes in float32, in its deterministic mode, with the KV "
        f"cache as it is by default; llama-cpp-python {report['llama_cpp_python']} keeps KV in float16, its default. "
        "Same tokens: up to the first difference of each stream."
    )
    return f"# Against llama.cpp\n\n{about}\n\n{lines}"


def main() -> None:
    """Measure, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="The engine against llama.cpp on the same weights.")
    parser.add_argument("--peer", type=Path, required=True, help="python that has llama-cpp-python")
    parser.add_argument("--model", type=Path, default=measure.ROOT / "models/reference")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write docs/bench/llama-cpp.json and .md")
    arguments = parser.parse_args()
    about = measure.machine()
    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    peer = Peer(arguments.peer)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = {kind: Path(folder) / f"{kind}.gguf" for kind in WEIGHTS}
            for kind, file in files.items():
                gguf_files.write(arguments.model, file, WEIGHTS[kind], lambda *_: None)
            with Engine(arguments.model, threads=arguments.threads, prefix_cache=False) as engine:
                rows = []
                for streams in (1, 8):
                    for kind, file in files.items():
                        load = {"file": str(file), "threads": arguments.threads, "streams": streams, "context": CONTEXT}
                        peer.ask(name=f"{kind} {streams}", load=load)
                    rows += compare(engine, peer, streams, vocab, arguments.tokens, arguments.rounds)
    finally:
        peer.close()
    report = {
        "machine": about,
        "model": arguments.model.name,
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "llama_cpp_python": peer.version,
        "rows": rows,
    }
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("llama-cpp", report, text)


if __name__ == "__main__":
    main()
