"""The options of `lockstep bench state`. Imports nothing heavy."""

import argparse

from lockstep_tools.arguments import add_engine, integer, real

DESCRIPTION = """\
Measure what the state server gives as the third tier of the prefix cache: MB/s in and out by a worker's own code, the
round trip, and the length of a prefix from which an idle worker fetches it instead of computing it. The last table has
figures of others, with their sources."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--target", metavar="ADDRESS", help="a state server that runs (default: some of this machine)")
    parser.add_argument("--blocks", type=integer(1, 1024), default=48, metavar="N", help="of 1 MiB (default: 48)")
    parser.add_argument("--rounds", type=integer(1), default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--model-directory", metavar="DIR", help="the model at hand (default: models/reference of the repository)"
    )
    parser.add_argument(
        "--prefill",
        type=real(0.001, 1e9),
        metavar="TOKENS_PER_S",
        help="how fast the model computes prompts (default: measured here)",
    )
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the results as JSON")
    add_engine(parser, context=False)
