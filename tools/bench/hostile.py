"""What well-behaved clients notice of hostile ones: every attack on a router, of this checkout and of an older one.

Compares commits in one run, since machines differ: `hostile.py --before CHECKOUT --save`. The checkout needs no build.
Each attack gets a fresh router. An attack that fails, or that the router does not outlast, is a result like others. On
this checkout it makes the run fail, once all attacks have been made and the results are saved.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from measure import ROOT, machine, save, table

sys.path.insert(0, str(ROOT / "tests/hostile"))

from lockstep_tools.hostile.attacks import Door, door_of, names
from lockstep_tools.hostile.observer import Observer
from target import Target, environment_of
from trial import FLAGS, LIMITS, attack, calm

_STREAMS = 8
_START_S = 60.0
_DOORS: dict[str, Door] = {"--port": "http", "--websocket-max-requests": "websocket", "--grpc-port": "grpc"}
"""The flags of routers that have a door."""

Result = dict[str, Any]


@dataclass
class Side:
    """A checkout, and what its router can do."""

    tree: Path

    @cached_property
    def doors(self) -> set[Door]:
        """On which it serves."""
        return {door for flag, door in _DOORS.items() if flag in self._help}

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Those of the trials that it knows."""
        name, _ = FLAGS
        return FLAGS if name in self._help else ()

    @cached_property
    def commit(self) -> str:
        """What is checked out."""
        command = ["git", "-C", str(self.tree), "describe", "--always", "--dirty"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @cached_property
    def _help(self) -> list[str]:
        command = [sys.executable, "-m", "lockstep_router", "--help"]
        environment = environment_of(self.tree)
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()

    def measure(self, name: str, seconds: float) -> Result | None:
        """One attack on a fresh router: what an earlier one has left does not count. None: there is no such door."""
        if door_of(name) not in self.doors:
            return None
        try:
            return self._measure(name, seconds)
        except (AssertionError, OSError, ValueError) as error:
            return {"failed": f"the trial could not be made: {error}"}

    def _measure(self, name: str, seconds: float) -> Result:
        with (
            Target(self.tree, grpc="grpc" in self.doors, flags=self.flags) as target,
            Observer(target.address, streams=_STREAMS) as observer,
        ):
            deadline = time.monotonic() + _START_S
            while target.streams() < _STREAMS:
                assert time.monotonic() < deadline, observer.take().failures
                time.sleep(0.1)
            quiet = calm(observer, 2.0)
            outcome = asdict(attack(target, observer, name, seconds))
            return {"calm": asdict(quiet), "failed": outcome.pop("failed"), "attack": outcome}


COLUMNS = (
    ("silence, s", "silence_s", 1.0, ".1f"),
    ("/healthz p99, ms", "healthz_p99_s", 1000.0, ".0f"),
    ("first token, s", "first_token_s", 1.0, ".1f"),
    ("memory peak, MiB", "memory_peak_bytes", 2.0**-20, ".0f"),
    ("left, MiB", "memory_left_bytes", 2.0**-20, ".0f"),
    ("vanished clients, s", "vanished_s", 1.0, ".1f"),
)
"""Title, name, factor and form of each figure of the table."""


def row(name: str, sides: list[Result | None]) -> list[str]:
    """A line of the table: before and after, or after alone."""
    figures = (
        [format(factor * side["attack"][key], form) if side and "attack" in side else "-" for side in sides]
        for _, key, factor, form in COLUMNS
    )
    return [name, *map(" → ".join, figures), " → ".join(map(failures, sides))]


def failures(result: Result | None) -> str:
    """How many requests of well-behaved clients failed, and why the trial did."""
    if result is None:
        return "no such door"
    count = [str(len(result["attack"]["failures"]))] if "attack" in result else []
    return "; ".join(count + [result["failed"]] * bool(result["failed"])).replace("|", "/")


def reasons(result: Result) -> list[str]:
    """Why an attack has succeeded: the names of the figures beyond their limits, and failures."""
    outcome = result.get("attack", {})
    beyond = [name for name, limit in LIMITS.items() if outcome.get(name, 0) > limit]
    return beyond + ["failures"] * bool(outcome.get("failures")) + ["failed"] * bool(result["failed"])


def summary(succeeded: dict[str, dict[str, list[str]]], made: dict[str, int]) -> str:
    """A line for each side, with the attacks that have succeeded."""
    limits = "; ".join(f"{title}: {factor * LIMITS[key]:g}" for title, key, factor, _ in COLUMNS if key in LIMITS)
    lines = [f"An attack has succeeded if a figure is above its limit ({limits}) or if anything has failed."]
    for side, attacks in succeeded.items():
        which = f": {', '.join(attacks)}" if attacks else ""
        lines.append(f"{side.capitalize()}, {len(attacks)} of {made[side]} attacks have succeeded{which}.")
    return "\n\n".join(lines)


def main() -> None:
    """Run every attack on each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    parser.add_argument("attacks", nargs="*", help="default: all")
    arguments = parser.parse_args()
    sides = {"before": Side(arguments.before)} if arguments.before else {}
    sides |= {"after": Side(ROOT)}
    about = machine() | {"seconds": arguments.seconds} | {name: side.commit for name, side in sides.items()}
    results: dict[str, dict[str, Result | None]] = {}
    for name in arguments.attacks or names():
        results[name] = {which: side.measure(name, arguments.seconds) for which, side in sides.items()}
        print(*row(name, list(results[name].values())), sep=" | ", flush=True)
    of_side = {which: {name: each[which] for name, each in results.items() if each[which]} for which in sides}
    succeeded = {
        which: {name: why for name, each in made.items() if each and (why := reasons(each))}
        for which, made in of_side.items()
    }
    header = ["attack", *(title for title, *_ in COLUMNS), "failures"]
    text = table(header, [row(name, list(each.values())) for name, each in results.items()])
    text += "\n\n" + summary(succeeded, {which: len(made) for which, made in of_side.items()})
    print(f"\n{text}")
    if arguments.save:
        save("hostile", {"machine": about, "attacks": results, "succeeded": succeeded}, text)
    failed = [name for name, why in succeeded["after"].items() if "failed" in why]
    if failed:
        sys.exit(f"failed on this checkout: {', '.join(failed)}")


if __name__ == "__main__":
    main()
