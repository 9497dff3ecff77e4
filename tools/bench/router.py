"""What a router costs: this checkout's, an older one's and those of other projects, before the same scripted backend.

All sides take turns in each round, so that a noisy machine slows all alike; read the ratios. CPU time is that of a
router's own processes: what backends and clients need does not count, and neither does waiting for a core. Rates and
delays depend on the load of the machine. `direct` has no router: clients talk to the backend of the others, and its
delays are taken from theirs. Lockstep's backend speaks its own protocol, and gives the same tokens at the same pace.

`router.py --against b8a0a07 --peers PYTHON --save` takes about half an hour; `--quick` only shows that all of it runs.
The revision is one of this repository's, or a folder with a checkout. PYTHON is the interpreter of a virtual
environment with `peers.txt`:

    python -m venv build/peers
    build/peers/bin/pip install --only-binary :all: --compile -r tools/bench/peers.txt

A router of another project that does not start is left out, and the output says why.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from measure import ROOT, machine, save
from router_measure import (
    FULL_STEP_S,
    MANY,
    PACED_STEP_S,
    QUICK,
    SLOW_STEP_S,
    STEP_S,
    TOKENS,
    Extent,
    at_rate,
    costs,
    full_cost,
    memory,
    raise_file_limit,
    rates,
    step_cost,
)
from router_sides import Side, Trees, names, running
from router_tables import (
    Found,
    cost_table,
    full_table,
    medians_of,
    memory_table,
    process_table,
    rate_tables,
    step_table,
    without_nan,
)

_SOURCES = ("services/router", "libs", "models/reference")

Measured = TypeVar("Measured")


@contextlib.contextmanager
def checkout(revision: str | None) -> Iterator[Path | None]:
    """The sources of a revision: of a folder, or of this repository's history, in a folder of its own."""
    if revision is None or Path(revision).is_dir():
        yield None if revision is None else Path(revision).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        archive = subprocess.run(
            ["git", "archive", "--format=tar", revision, "--", *_SOURCES], cwd=ROOT, capture_output=True, check=False
        )
        if archive.returncode:
            sys.exit(f"--against {revision}: no folder and no revision: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


class Bench:
    """Runs measurements on sides, and leaves out those of other projects that fail."""

    def __init__(self, trees: Trees, extent: Extent) -> None:
        self.extent = extent
        self.problems: dict[str, str] = {}
        """Of sides that are left out."""
        self._trees = trees

    def run(self, name: str, step_s: float, measure: Callable[[Side, Extent], Awaitable[Measured]]) -> Measured | None:
        """What `measure` finds on a side that is started for it; None: the side is left out."""
        if name in self.problems:
            return None
        try:
            with running(name, step_s, self._trees) as side:
                found = uvloop.run(measure(side, self.extent))  # type: ignore[arg-type]
        except Exception as error:
            if name.startswith("lockstep") or name in ("before", "direct"):
                raise
            self.problems[name] = f"{type(error).__name__}: {error}"
            print(f"{name} is left out: {self.problems[name]}", flush=True)
            return None
        print(name, _rounded(found), flush=True)
        return found

    def rounds(
        self, sides: list[str], count: int, step_s: float, measure: Callable[[Side, Extent], Awaitable[Measured]]
    ) -> dict[str, list[Measured]]:
        """What it finds in each round on each side."""
        found: dict[str, list[Measured]] = {name: [] for name in sides}
        for _ in range(count):
            for name in sides:
                if (each := self.run(name, step_s, measure)) is not None:
                    found[name].append(each)
        return found

    def halves(self, medians: dict[str, Found], count: int) -> dict[str, list[Found]]:
        """Each router at half of its rate, in fresh processes, and clients without a router at the same rate."""
        found: dict[str, list[Found]] = {name: [] for name, loads in medians.items() if loads and name != "direct"}
        for _ in range(count):
            for name, measured in found.items():
                measure = partial(at_rate, rate=max(1.0, medians[name][f"requests, {MANY}"]["per_s"] / 2))
                direct, router = self.run("direct", STEP_S, measure), self.run(name, STEP_S, measure)
                if direct is not None and router is not None:
                    measured.append({"router": router, "direct": direct})
        return found


def _rounded(found: Any) -> dict[str, float]:
    figures = found.get("costs", found)
    return {name: round(value, 2) for name, value in figures.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="an older revision, or a folder with its checkout")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="with the other routers")
    parser.add_argument("--processes", type=int, default=2, help="measure Lockstep with so many too (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of rates and delays (default: %(default)s)")
    parser.add_argument("--cost-rounds", type=int, default=5, help="of CPU time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default: %(default)s)")
    parser.add_argument("--idle", type=int, default=10_000, help="idle connections; 0: no memory (default: 10000)")
    parser.add_argument("--only", nargs="+", help="sides besides direct and lockstep (default: all)")
    parser.add_argument("--only-costs", action="store_true", help="measure CPU time alone")
    parser.add_argument("--quick", action="store_true", help="a smoke test of everything; its figures mean nothing")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    if arguments.peers is not None and not arguments.peers.exists():
        parser.error(f"--peers: there is no {arguments.peers}")
    return arguments


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    arguments = _arguments()
    most = raise_file_limit()
    extent = QUICK if arguments.quick else Extent(seconds=arguments.seconds, idle=arguments.idle)
    if extent.idle > most:
        print(f"only {most} idle connections: the limit of open files allows no more", flush=True)
        extent = replace(extent, idle=most)
    cost_rounds = 1 if arguments.quick else arguments.cost_rounds
    about = machine() | {"tokens": TOKENS, "step_s": STEP_S, "seconds": extent.seconds, "against": arguments.against}
    with checkout(arguments.against) as before:
        trees = Trees(before, arguments.peers.absolute() if arguments.peers else None)
        sides = names(trees, arguments.processes)
        if arguments.only:
            sides = [side for side in sides if side in ("direct", "lockstep", *arguments.only)]
        bench = Bench(trees, extent)
        own = [name for name in sides if name.startswith("lockstep") or name == "before"]
        # Few sides take turns, so that the compared ones are measured within seconds.
        found_costs: dict[str, list[dict[str, float]]] = bench.rounds(own, cost_rounds, STEP_S, costs)
        full = bench.rounds(own, cost_rounds, FULL_STEP_S, full_cost)
        parts = [cost_table(found_costs), full_table(full), process_table(found_costs)]
        steps = bench.rounds(own, max(1, cost_rounds // 2), PACED_STEP_S, step_cost)
        parts.append(step_table(steps))
        report: dict[str, Any] = {"machine": about, "costs": found_costs, "full": full, "steps": steps}
        if not arguments.only_costs:
            others = bench.rounds([name for name in sides[1:] if name not in own], 1, STEP_S, costs)
            if others:
                parts.append(cost_table({"lockstep": found_costs["lockstep"]} | others))
            rounds = bench.rounds(sides, 1 if arguments.quick else arguments.rounds, STEP_S, rates)
            medians = {name: medians_of(each) for name, each in rounds.items()}
            halves = bench.halves(medians, 1 if arguments.quick else arguments.rounds)
            parts.append(rate_tables(medians, {name: medians_of(each) for name, each in halves.items()}))
            memories = {}
            for name in sides[1:] if extent.idle else ():
                if (each := bench.run(name, SLOW_STEP_S, memory)) is not None:
                    memories[name] = each
            parts.append(memory_table(memories))
            report |= {"other_costs": others, "rounds": rounds, "halves": halves, "memory": memories}
    parts += [f"{name} is left out: it did not run." for name in bench.problems]
    text = "\n\n".join(part for part in parts if part)
    print(f"\n{text}")
    if arguments.save:
        save("router", without_nan(report | {"problems": bench.problems}), text)


if __name__ == "__main__":
    main()
