"""The `lockstep` command: picks a subcommand and turns its failures into a sentence and an exit code.

Only the chosen subcommand's module is imported, so that help and mistakes answer at once.
"""

import argparse
import errno
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TextIO

from lockstep_tools import __version__
from lockstep_tools.escaping import harmless_lines
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.interruption import unwinding_signals

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Errors of a full disk, or of a terminal that is gone, behind stdout or stderr."""

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
    _open_closed_streams()
    _accept_any_text()
    try:
        with unwinding_signals():
            try:
                return _run(sys.argv[1:] if arguments is None else arguments)
            finally:  # also when the command ends by an exception
                sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader (`| head`) has ended
        return FAILED
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard(sys.stdout)
        _complain(f"the output cannot be written: {error.strerror}")
        return FAILED


def _run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    try:
        parsed = parse(arguments)
        code: int = parsed.run(parsed)
    except CommandError as error:
        _complain(error.message)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _ENGINE:
            raise
        _complain(f"{error.name} is not installed here; it comes with lockstep-tools[engine]")
        return UNUSABLE
    return code


def _complain(sentence: str) -> None:
    """Say why the command fails. Where nothing can be said, the exit code remains."""
    try:
        print(f"lockstep: {harmless_lines(sentence)}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Let what is left in a stream's buffer go nowhere: the interpreter's flush at exit would report it again."""
    with suppress(OSError, ValueError):  # a stream of a test, without a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _open_closed_streams() -> None:
    """Connect standard streams that the caller has closed (`>&-`) to /dev/null, for this process and its children.

    Python has None in their place, and the next file that is opened would get the number of the closed one.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))


def _accept_any_text() -> None:
    """Characters that the terminal's encoding lacks are shown escaped, and bytes of stdin that are no text replaced."""
    for file, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors=errors)


if __name__ == "__main__":
    sys.exit(main())
