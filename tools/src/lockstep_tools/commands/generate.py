"""`lockstep generate`: text from a model, offline: an engine started by this process, without a server."""

import argparse
import sys
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lockstep_common.errors import LockstepError
from rich.console import Console
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import add_engine, integer, real, unicode
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError

if TYPE_CHECKING:
    from lockstep_engine import Engine, SamplingParams

DESCRIPTION = "Generate text offline, without a server: the continuation of PROMPT goes to stdout, the speed to stderr."

EXAMPLES = """\
  lockstep generate models/reference 'It was a dark night, and' --max-tokens 100
  lockstep generate models/reference - --tp 2 --temperature 0 < prompt.txt"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="directory of the model")
    parser.add_argument("prompt", type=unicode, metavar="PROMPT", help="text to continue; - reads stdin")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=integer(1), default=128, metavar="N", help="default: 128")
    group.add_argument("--temperature", type=real(0, 100), default=0.8, metavar="T", help="0 is greedy (default: 0.8)")
    group.add_argument("--top-k", type=integer(0), default=0, metavar="K", help="keep the K most likely tokens; 0: all")
    group.add_argument(
        "--top-p",
        type=real(1e-9, 1),
        default=1.0,
        metavar="P",
        help="keep the most likely tokens with a total probability of P",
    )
    group.add_argument(
        "--min-p",
        type=real(0, 1),
        default=0.0,
        metavar="P",
        help="drop tokens below P times the probability of the most likely one",
    )
    group.add_argument("--repetition-penalty", type=real(0.01, 100), default=1.0, metavar="R")
    group.add_argument("--seed", type=integer(0, 2**64 - 1), default=0, metavar="N", help="default: 0")
    group.add_argument("--ignore-eos", action="store_true", help="ignore end tokens: generate --max-tokens")
    add_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load the model, stream the continuation, report the speed."""
    from lockstep_engine import Engine, SamplingParams  # noqa: PLC0415 - help and usage errors need no engine

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandError("the PROMPT is empty", UNUSABLE)
    names = {field.name for field in fields(SamplingParams)}
    params = SamplingParams(**{name: value for name, value in vars(arguments).items() if name in names})
    notes = console.notes()
    try:
        with notes.status(Text(f"loading {arguments.model}")):
            engine = Engine(arguments.model, **_engine_settings(arguments))
        with engine:
            _generate(engine, prompt, params, notes)
    except LockstepError as error:
        raise CommandError(error.message, UNUSABLE if error.meaning.http_status < 500 else FAILED) from None
    return 0


def _generate(engine: "Engine", prompt: str, params: "SamplingParams", notes: Console) -> None:
    began_s = time.monotonic()
    first_s = None
    pieces: list[str] = []
    for piece in engine.stream(prompt, params):
        first_s = first_s or time.monotonic()
        pieces.append(piece)
        print(console.generated(piece, sys.stdout), end="", flush=True)
    ended_s = time.monotonic()
    print(flush=True)
    # The stream gives text only: tokens are counted by tokenizing the text.
    tokens = len(engine.encode("".join(pieces)))
    if first_s is not None and ended_s > first_s:
        first_ms = (first_s - began_s) * 1e3
        notes.print(
            f"{tokens} tokens, {tokens / (ended_s - began_s):.1f} tokens/s; first after {first_ms:.0f} ms", style="dim"
        )


def _engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("tp", "device", "dtype", "threads", "max_context")}
