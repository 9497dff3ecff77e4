"""The CPU's packed products: weights of 16 bits and of codes of 8 and 4 bits against the same weights in float32, and
against another checkout's; and products of integers, whose activations are quantized to 8 bits, too.

Every way is timed in turn, round by round, in pieces shorter than a scheduler's time slice, and the fastest round of
each counts; with one thread its CPU time, so that other work on the machine hardly shows. Read ratios, not times. All
ways but the products of integers must give the same bits. `cache`: the weights fit a cache; `memory`: they do not.

    python tools/bench/products.py --threads 1 --against ../other-checkout
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import measure
import torch
from lockstep_engine.kernels import cpu

SHAPES = {"cache": (1408, 256), "cache, wide": (1024, 2048), "memory": (16384, 4096)}
"""(out, in): 256 MiB of float32 for `memory`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE = 1 / 32
_GROUP = 128
"""Inputs that share a scale of 4-bit codes, as in most checkpoints."""
WORK = 3e6
"""Multiplications that a timing takes, at least."""


def other_kernels(checkout: Path) -> ModuleType:
    """`kernels/cpu.py` of another checkout, with the library that was built there."""
    folder = checkout / "libs/engine/src/lockstep_engine/kernels"
    library = next(folder.glob("_cpu.*.so"))
    spec = importlib.util.spec_from_file_location("other_cpu", folder / "cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch("importlib.util.find_spec", return_value=SimpleNamespace(origin=str(library))):
        spec.loader.exec_module(module)
    return module


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes: with one thread its CPU time."""
    if torch.get_num_threads() > 1:
        return measure.seconds(work)
    began = time.process_time()
    work()
    return time.process_time() - began


def row_of(
    name: str, shape: tuple[int, int], rows: int, ways: dict[str, Any], rounds: int, x: torch.Tensor
) -> dict[str, Any]:
    """Microseconds of each way, and the first way's over each."""
    repeats = max(1, round(WORK / (shape[0] * shape[1] * rows)))
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, product in ways.items():
            took = seconds(lambda each=product: [each(x) for _ in range(repeats)]) / repeats
            best[way] = min(best[way], took)
    first = next(iter(best.values()))
    return {
        "weights": name,
        "rows": rows,
        **{f"{way}_us": round(each * 1e6, 1) for way, each in best.items()},
        **{f"{way}_x": round(first / each, 2) for way, each in best.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Packed products of 16, 8 and 4 bits against float32.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 64])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--against", type=Path, help="another checkout whose kernels were built")
    arguments = parser.parse_args()
    if cpu.build is None:
        raise SystemExit("the CPU kernels were not built")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sides = {"": cpu} if arguments.against is None else {"other ": other_kernels(arguments.against), "": cpu}
    table = []
    for name in arguments.shapes:
        out, inside = SHAPES[name]
        codes = torch.randint(0, 16, (out, inside), dtype=torch.uint8)
        weight = codes.float() * _SCALE  # exact in every dtype
        ways: dict[str, Any] = {
            f"{side}{dtype}": kernels.PackedLinear(weight.to(DTYPES[dtype]), None)
            for side, kernels in sides.items()
            for dtype in DTYPES
        }
        scales = torch.full((out, inside // _GROUP), _SCALE)
        ways["int8"] = cpu.PackedLinear(codes.to(torch.int8), None, codes=cpu.Codes(scales[:, :1], inside))
        numbers = torch.arange(16).float()
        for way, offsets in (("int4", None), ("int4, zero points", torch.zeros_like(scales))):
            four = cpu.Codes(scales, _GROUP, table=numbers, offsets=offsets)
            ways[way] = cpu.PackedLinear(codes, None, codes=four)
        same = list(ways.values())
        integers = cpu.Codes(scales[:, :1], inside, integers=True)
        ways["integers"] = cpu.PackedLinear(codes.to(torch.int8), None, codes=integers)
        for rows in arguments.rows:
            x = torch.randn(rows, inside)
            results = [each(x) for each in same]
            if not all(torch.equal(each, results[0]) for each in results):
                raise SystemExit(f"{name}, {rows} rows: results differ")
            row = row_of(name, (out, inside), rows, ways, arguments.rounds, x)
            print(row, flush=True)
            table.append([name, rows, row[f"{next(iter(ways))}_us"], *(f"{row[f'{way}_x']:.2f}x" for way in ways)])
    header = ["weights", "rows", f"{next(iter(ways))}, us", *ways]
    print(f"\nFirst way's time over each, build {cpu.build}, {arguments.threads} threads\n")
    print(measure.table(header, table))


if __name__ == "__main__":
    main()
