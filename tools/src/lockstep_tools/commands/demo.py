"""`lockstep demo`: a stream whose workers are killed, compared with the same stream undisturbed."""

import argparse
import asyncio
import sys
import tempfile

from lockstep_common.lifecycle import name_process

from lockstep_tools import console
from lockstep_tools.arguments import add_model, integer, model_directory, real, unicode
from lockstep_tools.demo.demonstration import STREAM_S, Demo
from lockstep_tools.failure import CommandError
from lockstep_tools.serving.stack import Stack, StackSettings

DESCRIPTION = """\
Start two workers with two ranks each on the CPU and stream a completion twice: once undisturbed, and once while a
rank and then a worker with all its ranks are killed under it. Shows the gaps that the client saw and compares both
texts. Exit code 0 only when both kills hit the serving worker and no token was lost, doubled or different."""

EXAMPLES = """\
  lockstep demo
  lockstep demo /models/llama --prompt 'Once upon a time' --max-tokens 400 --seed 1"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    parser.add_argument("--prompt", type=unicode, default="It was a dark night, and", help="default: %(default)r")
    parser.add_argument(
        "--max-tokens",
        type=integer(100),
        metavar="N",
        help=f"default: as many as take {STREAM_S:.0f} s on this machine",
    )
    parser.add_argument("--temperature", type=real(0, 2), default=0.8, metavar="T", help="default: %(default)s")
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--port", type=integer(0, 65535), default=0, help="0: any free one (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; returns 0 on success."""
    name_process("demo")
    out = console.output()
    settings = StackSettings(model_directory(arguments.model), workers=2, tp=2, port=arguments.port, device="cpu")
    with tempfile.TemporaryFile() as log:
        try:
            with Stack(settings, output=log) as stack:
                demo = Demo(
                    stack,
                    out,
                    prompt=arguments.prompt,
                    max_tokens=arguments.max_tokens,
                    temperature=arguments.temperature,
                    seed=arguments.seed,
                )
                demo.start()
                return asyncio.run(demo.run())
        except CommandError:
            log.seek(0)
            sys.stderr.buffer.write(log.read())
            raise
