"""Runs simulations by hand: one seed, or with `--streams` as many as it takes from that seed on."""

import argparse
import sys

from simulated.plan import SHARED_SCALE, USUAL_SCALE, make_plan
from simulated.runner import explain, run_seeds
from simulated.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulated", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=0, help="as many as this, of consecutive seeds")
    parser.add_argument("--shared", action="store_true", help="the routers share a state server")
    parser.add_argument("--trace", action="store_true", help="print the whole trace of the seed")
    arguments = parser.parse_args()
    scale = SHARED_SCALE if arguments.shared else USUAL_SCALE
    if arguments.streams:
        report = run_seeds(arguments.seed, arguments.streams, scale, most_failures=10)
        print(report)
        for failure in report.failures:
            print(explain(failure, scale))
        return bool(report.failures)
    outcome = World(make_plan(arguments.seed, scale), keep_lines=1_000_000 if arguments.trace else 0).run()
    print(*outcome.lines, sep="\n", end="\n" if outcome.lines else "")
    print(outcome.trace_hash, len(outcome.histories), "streams", len(outcome.violations), "violations")
    if outcome.violations:
        print(explain(outcome, scale))
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
