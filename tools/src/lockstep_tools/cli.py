"""The `lockstep` command: picks a subcommand and turns its failures into a sentence and an exit code.

Only the chosen subcommand's module is imported, so that help and mistakes answer at once.
"""

import argparse
import io
import os
import sys
from importlib import import_module

from lockstep_tools import __version__
from lockstep_tools.escaping import harmless_lines
from lockstep_tools.failure import UNUSABLE, CommandError

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_ENGINE = frozenset(
    {"lockstep_engine", "lockstep_router", "lockstep_worker", "torch", "safetensors", "tokenizers", "gguf"}
)
"""Packages that commands for a served system do not need."""

_EPILOG = """\
examples:
  lockstep serve models/reference --workers 2 --tp 2   a router and two workers on this machine
  lockstep chat                                        talk to it
  lockstep status --watch                              see workers, ranks, queues
  lockstep demo                                        watch a stream survive killed processes

`lockstep COMMAND --help` explains a command. Exit codes: 0 done, 1 failed, 2 cannot be used as given.
"""


COMMANDS = {
    "serve": "run a router and workers on this machine",
    "chat": "talk to a model in the terminal",
    "generate": "generate text offline, without a server",
    "bench": "put an endpoint under load and measure it",
    "eval": "measure perplexity, KL divergence, recall",
    "load": "steady streams, each one's history a line of JSON",
    "check": "check a served system: chat, stream, workers' health",
    "chaos": "run a fault experiment on a cluster and check it",
    "convert": "make a servable directory of a GGUF file, or the other way round",
    "quantize": "write a checkpoint with smaller weights",
    "keys": "make an API key for a tenant",
    "status": "show workers, ranks, process ids, queues",
    "debug": "collect what explains a hang, name the rank",
    "profile": "profile the ranks, name the one that holds up the others",
    "trace": "draw a request's timeline over router and ranks",
    "logs": "show log lines by request, rank, level, time",
    "demo": "watch a stream survive killed processes",
    "train": "train a small model like the reference model",
}
"""Each subcommand with its summary. Its module in `commands` has DESCRIPTION, EXAMPLES, configure(parser) and
run(arguments) -> exit code.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed command line; `run` is the chosen command's function. Ends the process for help and usage errors."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Serve large language models so that streams continue when a process or a node dies.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=summary)
            continue
        module = import_module(f"lockstep_tools.commands.{name}")
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line given (the process's own when None) and return its exit code."""
    _accept_any_text()
    try:
        parsed = parse(sys.argv[1:] if arguments is None else arguments)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except CommandError as error:
        print(f"lockstep: {harmless_lines(error.message)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _ENGINE:
            raise
        print(f"lockstep: {error.name} is not installed here; it comes with lockstep-tools[engine]", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        # The reader (`| head`) has ended; the interpreter's own flush at exit must not report it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _accept_any_text() -> None:
    """Characters that the terminal's encoding lacks are shown escaped, and bytes of stdin that are no text replaced."""
    for file, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors=errors)


if __name__ == "__main__":
    sys.exit(main())
