"""This checkout's engine against another checkout's on the CPU, on the same checkpoint: tokens/s of greedy streams,
memory of a rank, whether tokens and the numerics fingerprints (hashes of logits) are equal.

Each engine has an interpreter of its own; rounds alternate, and a figure is the median of the rounds' ratios.

    python tools/bench/checkouts.py --against ../other-checkout --models reference 0.5b
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 32


class Side:
    """An engine in another process, which imports the engine of `checkout`."""

    def __init__(self, checkout: Path, **settings: Any) -> None:
        paths = [str(checkout / "libs" / name / "src") for name in ("engine", "common", "api", "client")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def ask(self, streams: int, tokens: int) -> dict[str, Any]:
        """Generate so much."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"streams": streams, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side has ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(settings: dict[str, Any]) -> None:
    """The other process: an engine, and an answer to each line."""
    from lockstep_engine import Engine, SamplingParams  # noqa: PLC0415 - of the checkout that PYTHONPATH names

    own = {"max_seqs": 16, "max_context": 512, "prefix_cache": False, "device": "cpu", **settings}
    with Engine(**own) as engine:
        vocab, fingerprint = engine.core.model.vocab_size, engine.core.status().fingerprint
        print(json.dumps({"fingerprint": fingerprint, "rank_mib": rank_mib()}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            rng = random.Random(asked["streams"])
            prompts = [[rng.randrange(4, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(asked["streams"])]
            params = SamplingParams(max_tokens=asked["tokens"], temperature=0, ignore_eos=True)
            began = time.perf_counter()
            ids = engine.generate_ids(prompts, params)
            print(json.dumps({"seconds": time.perf_counter() - began, "ids": ids}), flush=True)


def rank_mib() -> int:
    """Most memory of its own that a process below this one holds, in MiB."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parents = {int(pid): int(parent) for pid, parent in zip(listed[::2], listed[1::2], strict=True)}
    below = {os.getpid()}
    for _ in range(4):  # the supervisor of ranks, the process that forks them, ranks
        below |= {pid for pid, parent in parents.items() if parent in below}
    most = 0
    for pid in below:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        most = max([most, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))])
    return most // 1024


def compare(
    name: str, path: Path, against: Path, streams: list[int], tokens: int, rounds: int, settings: dict[str, Any]
) -> list[list[object]]:
    """Rows for one checkpoint."""
    other, ours = (Side(checkout, model=str(path), **settings) for checkout in (against, ROOT))
    rows = []
    for count in streams:
        first, second = other.ask(count, tokens), ours.ask(count, tokens)  # warm-up
        ratios, speeds = [], []
        for _ in range(rounds):
            before, now = other.ask(count, tokens)["seconds"], ours.ask(count, tokens)["seconds"]
            ratios.append(before / now)
            speeds.append(count * tokens / now)
        ratio, speed = statistics.median(ratios), statistics.median(speeds)
        same = "yes" if first["ids"] == second["ids"] else "no"
        rows.append([name, count, f"{speed:.1f}", f"{ratio:.2f}x", same])
        print(rows[-1], flush=True)
    prints = "same" if other.ready["fingerprint"] == ours.ready["fingerprint"] else "different"
    print(
        name, f"fingerprint: {prints}; a rank's memory, MiB: {other.ready['rank_mib']} before,", ours.ready["rank_mib"]
    )
    for side in (other, ours):
        side.close()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="This checkout's engine against another's, on the CPU.")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument(
        "--models", nargs="+", default=["reference"], help="reference, a shape of synthetic.py, a folder"
    )
    parser.add_argument("--dtype", default="bfloat16", help="in which random weights are stored")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.side is not None:
        serve(json.loads(arguments.side))
        return
    import measure  # noqa: PLC0415 - a side needs neither
    import torch  # noqa: PLC0415
    from synthetic import SHAPES, write_random  # noqa: PLC0415

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            if name == "reference":
                path = ROOT / "models/reference"
            elif name not in SHAPES:
                path = Path(name)
            else:
                path = write_random(SHAPES[name], Path(folder, name), getattr(torch, arguments.dtype))
            settings = {"threads": arguments.threads}
            rows += compare(
                name, path, arguments.against, arguments.streams, arguments.tokens, arguments.rounds, settings
            )
    print(measure.table(["model", "streams", "tokens/s", "of the other's", "same tokens"], rows))


if __name__ == "__main__":
    main()
