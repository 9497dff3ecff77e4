"""The speed of the engine's GPU path on this machine, in one table; with --tiny the same code on tiny shapes on a CPU.

    python tools/bench/gpu.py --out docs/bench/gpu.json
    python tools/bench/gpu.py --only decode --models llama-3-8b --batches 64 --contexts 32768
    python tools/bench/gpu.py --exact both --tp 1 2 --only decode engine
    python tools/bench/gpu.py --tiny

Models compute as ranks on a GPU do by default; with `--exact on` in the exact mode, with `both` in each and as ratios.
Weights are random: speed does not depend on them. Contexts are random too. Where the contexts of a batch do not fit,
its sequences share blocks of a pool far larger than any cache of the chip, so that every read is still from memory.
"""

import argparse
import dataclasses
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_arrivals import measure_arrivals
from gpu_run import Bench, Row
from gpu_settings import CUDA, SHAPES, TINY, Settings
from gpu_steps import (
    measure_decode,
    measure_graphs,
    measure_kernels,
    measure_machine,
    measure_prefill,
    measure_shards,
)
from gpu_tables import page
from gpu_whole import measure_engine, measure_peer
from measure import ROOT
from triton import __version__ as triton_version

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "kernels": measure_kernels,
    "decode": measure_decode,
    "prefill": measure_prefill,
    "graphs": measure_graphs,
    "shards": measure_shards,
    "peer": measure_peer,
    "engine": measure_engine,
    "arrivals": measure_arrivals,
}
WITHOUT_MODES = {"kernels", "peer"}
"""Sections without models of ours. That of kernels measures attention in the modes by itself."""
MODES = {"off": (False,), "on": (True,), "both": (False, True)}


def machine() -> Row:
    """The machine and the versions, to interpret the figures later."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(0) if CUDA else f"CPU ({platform.machine()}), Triton interpreted",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit.stdout.strip(),
    }


def choose(arguments: argparse.Namespace) -> Settings:
    """The settings that the options describe."""
    settings = TINY if arguments.tiny else Settings()
    given: dict[str, Any] = {
        name: tuple(getattr(arguments, name)) for name in ("models", "batches", "contexts") if getattr(arguments, name)
    }
    if arguments.tp:
        given["engine_tps"] = tuple(arguments.tp)
    if arguments.repeats:
        given["repeats"] = arguments.repeats
    return dataclasses.replace(settings, modes=MODES[arguments.exact], **given)


def sections(only: Sequence[str] | None) -> Iterator[str]:
    """The selected sections, in order."""
    return (name for name in SECTIONS if not only or name in only)


def measure(bench: Bench, section: str) -> None:
    """A section, in each mode that is wanted."""
    for exact in (None,) if section in WITHOUT_MODES else bench.settings.modes:
        bench.exact = exact
        SECTIONS[section](bench)
        if CUDA:
            torch.cuda.empty_cache()
    bench.exact = None
    bench.compare_modes(section)


def save(out: Path, report: Mapping[str, Any]) -> None:
    """Write the results, and a page for people beside them."""
    out.write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text(page(report))


def main() -> None:
    """Run the selected sections, print each line, and write all to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; needs no GPU")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"some of: {', '.join(SHAPES)}")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--exact", choices=MODES, default="off", help="the exact mode; off: as ranks on a GPU compute")
    parser.add_argument("--tp", nargs="+", type=int, help="numbers of ranks of the section engine")
    parser.add_argument("--repeats", type=int, help="of each measurement; the median counts")
    parser.add_argument("--out", type=Path, help="JSON file for the results; a page for people goes beside it")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        parser.error("there is no CUDA device here; --tiny runs on the CPU")
    bench = Bench(choose(arguments))
    report = {"command": shlex.join(["python", "tools/bench/gpu.py", *sys.argv[1:]]), "machine": machine()}
    print(report["machine"])
    with torch.inference_mode():
        measure_machine(bench)
        for name in sections(arguments.only):
            measure(bench, name)
            if arguments.out:
                save(arguments.out, {**report, "rows": bench.rows})


if __name__ == "__main__":
    main()
