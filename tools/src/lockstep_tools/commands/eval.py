"""`lockstep eval`: how accurate a model is as this engine runs it, offline, on any number of ranks.

`accuracy.py` measures; this file has the options, the engines and the tables.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_common.errors import LockstepError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import add_engine, integer, real
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError

if TYPE_CHECKING:
    from lockstep_engine import Engine

    from lockstep_tools.model.accuracy import Divergence, Perplexity, Recall

DESCRIPTION = """\
Measure how well a model predicts, as this engine runs it: through the paged and compressed KV cache, on any number of
ranks. `perplexity` reads a text; with --against it also says how far the distributions are from those of another kind
of KV compression (`none`: the uncompressed run). `needle` places a random string somewhere in a text and asks for it at
the end."""

EXAMPLES = """\
  lockstep eval perplexity models/reference --text books-valid.txt --window 1024 --stride 512
  lockstep eval perplexity models/reference --text books-valid.txt --tp 2 --kv-compression lazy --against none
  lockstep eval needle /models/llama --text books-valid.txt --contexts 1024,8192 --depths 0,0.5,1 --json"""

_COMPRESSIONS = ("lazy", "immediate", "per_layer", "none")
_STEP_TOKENS = 64
"""Tokens scored in one step. It affects speed and memory only: what a token sees of the cache does not depend on it."""
_SPARE_TOKENS = 2
"""Positions of the context that a window cannot use: the scored token itself, and one that must be generated."""


@dataclass(frozen=True)
class _Compression:
    """The values of `--kv-compression`, `--kv-hot-window` and `--kv-layers`."""

    mode: str
    hot_window: int | None
    layers: tuple[int, ...]

    def settings(self, mode: str | None = None) -> dict[str, Any]:
        """Fields of `EngineConfig`, for this or another mode."""
        chosen = mode or self.mode
        given: dict[str, Any] = {"kv_compression": chosen}
        if self.hot_window is not None:
            given["kv_hot_window"] = self.hot_window
        if chosen == "per_layer":
            given["kv_compressed_layers"] = self.layers
        return given


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    measures = parser.add_subparsers(title="measures", metavar="MEASURE", dest="measure", required=True)
    perplexity = measures.add_parser("perplexity", help="perplexity of a text, in windows; divergence with --against")
    _add_common(perplexity)
    group = perplexity.add_argument_group("windows")
    group.add_argument(
        "--window", type=integer(2), default=1024, metavar="N", help="tokens a prediction may look back on"
    )
    group.add_argument("--stride", type=integer(1), metavar="N", help="tokens scored in a window (default: --window)")
    group.add_argument(
        "--tokens", type=integer(2), metavar="N", help="use the first N tokens of the text (default: all)"
    )
    needle = measures.add_parser("needle", help="recall of a random string placed at some depth of a text")
    _add_common(needle)
    group = needle.add_argument_group("needles")
    group.add_argument(
        "--contexts",
        type=_list(integer(64)),
        default=[1024],
        metavar="N,…",
        help="lengths of the context in tokens (default: 1024)",
    )
    depths = [0.0, 0.25, 0.5, 0.75, 1.0]
    group.add_argument("--depths", type=_list(real(0, 1)), default=depths, metavar="D,…", help="0: begin, 1: end")
    group.add_argument("--trials", type=integer(1), default=10, metavar="N", help="trials at each depth (default: 10)")
    group.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of strings and places (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the report."""
    text = _read(arguments.text)
    compression = _Compression(arguments.kv_compression, arguments.kv_hot_window, tuple(arguments.kv_layers))
    if (compression.mode == "per_layer") != bool(compression.layers):
        raise CommandError("--kv-layers and --kv-compression per_layer go together", UNUSABLE)
    measure = _perplexity if arguments.measure == "perplexity" else _needle
    try:
        measure(arguments, text, compression)
    except LockstepError as error:
        raise CommandError(error.message, UNUSABLE if error.meaning.http_status < 500 else FAILED) from None
    return 0


def _perplexity(arguments: argparse.Namespace, text: str, compression: _Compression) -> None:
    from lockstep_tools.model.accuracy import measure, windows  # noqa: PLC0415 - help needs no numpy

    window, stride = arguments.window, arguments.stride or arguments.window
    if stride > window:
        raise CommandError(f"--stride must be at most --window: {stride} is more than {window}", UNUSABLE)
    with _engine(arguments, compression.settings(), window, "--window") as engine:
        ids = engine.encode(text)[: arguments.tokens]
        if len(ids) < 2:
            raise CommandError(f"{arguments.text} has {len(ids)} tokens, too few for a prediction", UNUSABLE)
        plan = list(windows(len(ids), window, stride))
        with _progress("windows", len(plan)) as advance:
            if arguments.against is None:
                ours, theirs, apart = measure(engine, ids, plan, on_window=lambda _: advance())
            else:
                with _engine(arguments, compression.settings(arguments.against), window, "--window") as reference:
                    ours, theirs, apart = measure(engine, ids, plan, reference, on_window=lambda _: advance())
    report: dict[str, Any] = {
        **_described(arguments),
        "window": window,
        "stride": stride,
        "tokens": ours.tokens,
        "perplexity": ours.value,
        "first_choices": ours.first_choices / ours.tokens,
    }
    if theirs is not None and apart is not None:
        report["against"] = {
            "kv_compression": arguments.against,
            "perplexity": theirs.value,
            "change": ours.value / theirs.value - 1,
            "kl": apart.summary(),
        }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show_perplexity(report, ours, theirs, apart)


def _show_perplexity(
    report: dict[str, Any], ours: "Perplexity", theirs: "Perplexity | None", apart: "Divergence | None"
) -> None:
    out = console.output()
    out.print(f"{ours.tokens} tokens, windows of {report['window']}, stride {report['stride']}")
    share = ours.first_choices / ours.tokens
    out.print(f"perplexity {ours.value:.4f} ({report['kv_compression']}); {share:.1%} of the tokens were first choice")
    if theirs is None or apart is None:
        return
    against, kl = report["against"], apart.summary()
    out.print(f"perplexity {theirs.value:.4f} ({against['kv_compression']}): a change of {against['change']:+.4%}")
    out.print(
        f"KL divergence: mean {kl['mean']:.2e}, p99 {kl['p99']:.2e}, max {kl['max']:.2e} nats; "
        f"same first choice at {kl['same_first_choice']:.2%} of {kl['positions']} positions"
    )


def _needle(arguments: argparse.Namespace, text: str, compression: _Compression) -> None:
    from lockstep_tools.model.accuracy import Haystack, recall  # noqa: PLC0415

    places = [(context, depth) for context in arguments.contexts for depth in arguments.depths]
    results: list[Recall] = []
    with _engine(arguments, compression.settings(), max(arguments.contexts), "--contexts") as engine:
        hay = Haystack(
            lambda string: engine.encode(string, special=False), engine.encode(text, special=False), arguments.seed
        )
        with _progress("places", len(places)) as advance:
            for context, depth in places:
                try:
                    results.append(recall(engine, hay, context, depth, arguments.trials))
                except ValueError as error:
                    raise CommandError(str(error), UNUSABLE) from None
                advance()
    if arguments.json:
        print(json.dumps({**_described(arguments), "places": [each.row() for each in results]}, indent=2))
        return
    table = Table("context", "depth", "recalled", "tokens right", "probability", "gain, nats")
    for each in (result.row() for result in results):
        table.add_row(
            f"{each['context']}",
            f"{each['depth']:g}",
            f"{each['recalled']:.0%}",
            f"{each['tokens_right']:.0%}",
            f"{each['probability']:.2g}",
            f"{each['gain_nats']:+.2f}",
        )
    console.output().print(table)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory of the model")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    group = parser.add_argument_group("KV cache")
    group.add_argument("--kv-compression", choices=_COMPRESSIONS, default="lazy", help="default: lazy")
    group.add_argument("--kv-hot-window", type=integer(16), metavar="TOKENS", help="default: 64")
    group.add_argument("--kv-layers", type=_list(integer(0)), default=[], metavar="N,…", help="for per_layer")
    if parser.prog.endswith("perplexity"):
        group.add_argument(
            "--against", choices=_COMPRESSIONS, help="compare with this compression; holds the model twice"
        )
    add_engine(parser, context=False)


def _list(each: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values with commas between."""

    def parse(text: str) -> list[Any]:
        return [each(part) for part in text.split(",")]

    return parse


@contextmanager
def _engine(
    arguments: argparse.Namespace, compression: dict[str, Any], longest: int, option: str
) -> Iterator["Engine"]:
    from lockstep_engine import Engine  # noqa: PLC0415

    settings = {name: getattr(arguments, name) for name in ("tp", "device", "dtype", "threads")}
    with console.notes().status(Text(f"loading {arguments.model}")):
        engine = Engine(
            arguments.model,
            **settings,
            **compression,
            max_context=longest + _SPARE_TOKENS,
            max_seqs=_STEP_TOKENS,
            max_batch_tokens=_STEP_TOKENS,
            prefix_cache=False,
        )
    with engine:
        context = engine.core.model.context_length
        if context < longest + _SPARE_TOKENS:
            raise CommandError(
                f"with the model's context of {context} tokens {option} can be {context - _SPARE_TOKENS} at most "
                f"(given: {longest})",
                UNUSABLE,
            )
        yield engine


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    notes = console.notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _described(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": Path(arguments.model).name,
        "text": Path(arguments.text).name,
        "tp": arguments.tp,
        "kv_compression": arguments.kv_compression,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", UNUSABLE) from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is no UTF-8 text: byte {error.start} does not belong there", UNUSABLE) from None
