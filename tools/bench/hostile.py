"""What well-behaved clients notice of hostile ones: every attack on a router, of this checkout and of an older one.

Compares commits in one run, since machines differ: `hostile.py --before CHECKOUT --save`. The checkout needs no build.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import ROOT, machine, save, table

sys.path.insert(0, str(ROOT / "tests/hostile"))

from lockstep_tools.hostile.attacks import names
from lockstep_tools.hostile.observer import Observer
from target import Target
from trial import FLAGS, attack, calm

_STREAMS = 8
_START_S = 60.0


def measure(tree: Path, name: str, seconds: float) -> dict[str, Any]:
    """One attack on a fresh router: what an earlier one has left does not count."""
    with Target(tree, flags=FLAGS) as target, Observer(target.address, streams=_STREAMS) as observer:
        deadline = time.monotonic() + _START_S
        while target.streams() < _STREAMS:
            assert time.monotonic() < deadline, observer.take().failures
            time.sleep(0.1)
        quiet = calm(observer, 2.0)
        outcome = attack(target, observer, name, seconds)
        return {"calm": asdict(quiet), "attack": asdict(outcome), "alive": target.is_alive}


def commit(tree: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


COLUMNS = (
    ("silence, s", "silence_s", 1.0, ".1f"),
    ("/healthz p99, ms", "healthz_p99_s", 1000.0, ".0f"),
    ("first token, s", "first_token_s", 1.0, ".1f"),
    ("memory peak, MiB", "memory_peak_bytes", 2.0**-20, ".0f"),
    ("left, MiB", "memory_left_bytes", 2.0**-20, ".0f"),
    ("vanished clients, s", "vanished_s", 1.0, ".1f"),
)
"""Title, name, factor and form of each figure of the table."""


def row(name: str, sides: list[dict[str, Any]]) -> list[str]:
    """A line of the table: before and after, or after alone."""
    figures = ([format(factor * side["attack"][key], form) for side in sides] for _, key, factor, form in COLUMNS)
    return [name, *map(" → ".join, figures), str(sum(len(side["attack"]["failures"]) for side in sides[-1:]))]


def main() -> None:
    """Run every attack on each checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    parser.add_argument("attacks", nargs="*", help="default: all")
    arguments = parser.parse_args()
    trees = {"before": arguments.before, "after": ROOT} if arguments.before else {"after": ROOT}
    results: dict[str, dict[str, Any]] = {}
    about = machine() | {"seconds": arguments.seconds}
    about |= {side: commit(tree) for side, tree in trees.items()}
    for name in arguments.attacks or names():
        results[name] = {side: measure(tree, name, arguments.seconds) for side, tree in trees.items()}
        print(*row(name, list(results[name].values())), sep=" | ", flush=True)
    header = ["attack", *(title for title, *_ in COLUMNS), "failures"]
    text = table(header, [row(name, list(sides.values())) for name, sides in results.items()])
    print(f"\n{text}")
    if arguments.save:
        save("hostile", {"machine": about, "attacks": results}, text)


if __name__ == "__main__":
    main()
