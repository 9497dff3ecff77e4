"""Argument types and groups that several commands share. Imports nothing heavy: `lockstep --help` must be quick."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from lockstep_common.cpu_limit import usable_cpus

from lockstep_tools.failure import UNUSABLE, CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8001"
API_KEY_VARIABLE = "LOCKSTEP_API_KEY"

_REFERENCE_MODEL = Path("models/reference")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if number < least or (most is not None and number > most):
            limits = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {limits} (given: {number})")
        return number

    return parse


def real(least: float, most: float) -> Callable[[str], float]:
    """An argparse type: a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be between {least:g} and {most:g} (given: {text})")
        return number

    return parse


def unicode(text: str) -> str:
    """An argparse type: text that can be sent. Bytes that are no text become surrogates, which no request can have."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError(f"not text in this terminal's encoding: {text!r}")
    return text


def add_model(parser: argparse.ArgumentParser) -> None:
    """The optional positional MODEL; resolve it with `model_directory`."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory of the model (default: models/reference of the repository)"
    )


def model_directory(given: str | None) -> str:
    """The model asked for, else the repository's reference model.

    Raises:
        CommandError: none was given and there is no reference model.
    """
    if given is not None:
        return given
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / _REFERENCE_MODEL / "config.json").is_file():
            return str(root / _REFERENCE_MODEL)
    raise CommandError("no MODEL given, and there is no models/reference here", UNUSABLE)


def add_engine(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """The options that shape an engine; `--max-context` only where the command does not set it by itself."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tp", type=integer(1), default=1, metavar="N", help="ranks that share the model (default: 1)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    group.add_argument(
        "--threads", type=integer(1), metavar="N", help="CPU threads of each rank (default: the cores divided by --tp)"
    )
    if context:
        group.add_argument(
            "--max-context",
            type=integer(2),
            metavar="TOKENS",
            help="prompt and output together (default: the model's limit)",
        )


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """The options that name an OpenAI endpoint; resolve them with `lockstep_tools.load.endpoint.from_arguments`."""
    parser.add_argument("--url", default=DEFAULT_URL + "/v1", help="base URL of the API (default: %(default)s)")
    _add_access(parser)


def add_endpoints(parser: argparse.ArgumentParser) -> None:
    """The options of `add_endpoint` for several routers that serve the same models: `--url` is a list, or None."""
    parser.add_argument(
        "--url",
        action="extend",
        type=_several,
        metavar="URL,…",
        help=f"base URLs of routers that serve the same models; may be repeated (default: {DEFAULT_URL}/v1)",
    )
    _add_access(parser)


def _several(text: str) -> list[str]:
    """An argparse type: one or more texts with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"an item is empty: {text!r}")
    return parts


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=unicode, metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--api-key-env",
        default=API_KEY_VARIABLE,
        metavar="VARIABLE",
        help="environment variable that holds the API key, so that no key shows in `ps` (default: %(default)s)",
    )
    add_tls(parser)


def api_key(variable: str, path: str | None = None) -> str | None:
    """The key in a file, else in an environment variable; None if there is none. No error shows any of it.

    Raises:
        CommandError: the file has none, or cannot be read, or the key cannot be sent in a header.
    """
    if path is None:
        key = os.environ.get(variable, "").strip()
        if not key.isascii() or not key.isprintable():
            raise CommandError(f"--api-key-env {variable}: the key must be printable ASCII characters", UNUSABLE)
        return key or None
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise CommandError(f"--api-key-file {path}: {reason}", UNUSABLE) from None
    if not key or not key.isprintable():
        raise CommandError(f"--api-key-file {path}: it must have one line with the key", UNUSABLE)
    return key


def add_tls(parser: argparse.ArgumentParser) -> None:
    """The options of HTTPS; resolve them with `lockstep_tools.load.endpoint.tls_context`."""
    group = parser.add_argument_group("HTTPS")
    group.add_argument(
        "--ca-file",
        action="append",
        default=[],
        metavar="FILE",
        help="authorities to trust besides the system's; may be repeated",
    )
    group.add_argument("--client-cert", metavar="FILE", help="certificate to show to the server")
    group.add_argument("--client-key", metavar="FILE", help="its key")


def cores() -> int:
    """CPU cores that this process may use: its affinity, and its container's CPU limit rounded down."""
    return max(1, int(usable_cpus()))
