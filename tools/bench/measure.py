"""Functions that the benchmarks share: timing sides in turn, describing the machine, writing results."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/bench"


def seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turn after one warm-up, so that a noisy machine slows all alike."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: statistics.median(each) for name, each in times.items()}


def machine() -> dict[str, Any]:
    """The machine and the versions, to interpret the figures later."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        **({"gpus": gpus} if gpus else {}),
        "load_at_start": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def command(arguments: Sequence[str] | None = None) -> str:
    """A command line (this process's when None) as it would be typed in the repository."""
    program, *rest = sys.argv if arguments is None else arguments
    script = Path(program).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    return shlex.join([".venv/bin/python", str(name), *rest])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def made(by: str, machine: Mapping[str, Any]) -> str:
    """What made a result, and where."""
    where = ", ".join(f"{key} {value}" for key, value in machine.items())
    return f"Made by {by} on: {where}."


def save(name: str, report: Mapping[str, Any], text: str, folder: Path = RESULTS, origin: str | None = None) -> None:
    """Keep the results as docs/bench/NAME.json and, for people, NAME.md. `origin`: where not all are of this run."""
    origin = origin or made(f"`{command()}`", report["machine"])
    (folder / f"{name}.json").write_text(json.dumps({"command": command(), **report}, indent=2) + "\n")
    (folder / f"{name}.md").write_text(f"{text}\n\n{origin}\n")


def fill(page: Path, name: str, text: str) -> None:
    """Put a generated table into a page, between `<!-- NAME -->` and `<!-- end -->`."""
    before, mark, rest = page.read_text().partition(f"<!-- {name} -->\n")
    old, end, after = rest.partition("<!-- end -->")
    if not mark or not end:
        raise ValueError(f"{page} has no place for {name} ({old[:40]!r})")
    page.write_text(f"{before}{mark}{text}\n{end}{after}")
