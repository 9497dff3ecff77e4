"""`lockstep quantize`: a checkpoint with smaller weights, in the compressed-tensors format."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep_common.errors import LockstepError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep_tools import console
from lockstep_tools.arguments import integer
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError

if TYPE_CHECKING:
    import torch

    from lockstep_tools.quantization.layers import LayeredModel
    from lockstep_tools.quantization.production import Recipe

DESCRIPTION = """\
Write a checkpoint with quantized weights, as compressed-tensors in safetensors. The decoder layers' matrices are
quantized, and with --head the output head, also if it is the embedding; embeddings, norms and routers stay as they
are, but for norms and routers that take the scales of awq. With --calibration the perplexity on the text's second half
is reported before and after; gptq, awq and --auto calibrate on its first half. --auto writes the smallest mixture of
gptq, int8 and float layers that stays within the budget."""

EXAMPLES = """\
  lockstep quantize /models/llama --scheme int8 --out /models/llama-int8
  lockstep quantize /models/llama --scheme int8 --head int8 --out /models/llama-int8
  lockstep quantize /models/llama --scheme gptq --calibration books.txt --out /models/llama-4bit
  lockstep quantize /models/llama --auto --budget 1% --calibration books.txt --out /models/llama-small"""

SCHEMES = ("int8", "w8a8", "fp8", "gptq", "awq", "rtn4", "ternary")
HEADS = ("none", "int8")
_CALIBRATED = ("gptq", "awq")
_MIN_WINDOWS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory of a model in float")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to write; must not exist yet")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--scheme", type=_scheme, metavar="SCHEME", help=f"one of {', '.join(SCHEMES)}")
    what.add_argument("--auto", action="store_true", help="the smallest within --budget, mixed per layer")
    parser.add_argument(
        "--head",
        choices=HEADS,
        default="none",
        help="the output head: int8 with any scheme, or none: as it is (default: none)",
    )
    parser.add_argument(
        "--budget", type=_share, default=0.01, metavar="P%", help="rise of the perplexity for --auto (default: 1%%)"
    )
    parser.add_argument("--calibration", metavar="FILE", type=Path, help="UTF-8 text; gptq, awq and --auto need it")
    parser.add_argument("--samples", type=integer(1), default=128, metavar="N", help="windows of it (default: 128)")
    parser.add_argument("--length", type=integer(16), default=512, metavar="TOKENS", help="of a window (default: 512)")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=128, help="4 bits (default: 128)")
    parser.add_argument("--no-act-order", action="store_true", help="gptq: round inputs in their own order")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="GLOB", help="modules of the layers that stay in float"
    )


def run(arguments: argparse.Namespace) -> int:
    """Quantize; the target appears once it is complete."""
    source, target = arguments.model, arguments.out
    if os.path.lexists(target):  # also a link to nothing: no directory can be renamed to it
        raise CommandError(f"--out {target} exists already", UNUSABLE)
    if not target.absolute().parent.is_dir():
        raise CommandError(f"--out {target}: {target.absolute().parent} is not a directory", UNUSABLE)
    if arguments.calibration is None and (arguments.auto or arguments.scheme in _CALIBRATED):
        raise CommandError(f"--calibration is needed for {'--auto' if arguments.auto else arguments.scheme}", UNUSABLE)
    text = _read(arguments.calibration) if arguments.calibration else None
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}  # this command shows its own progress
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".quantize-") as folder:
            made, scratch = Path(folder) / "made", Path(folder) / "candidates"
            made.mkdir()
            scratch.mkdir()
            report = _quantize(arguments, source, made, scratch, text)
            made.chmod(0o755)
            made.rename(target)
    except LockstepError as error:
        raise CommandError(error.message, UNUSABLE) from None
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror or error}", FAILED) from None
    console.notes().print(f"{target}: {report}; `lockstep serve {target}`", markup=False)
    return 0


def _quantize(arguments: argparse.Namespace, source: Path, made: Path, scratch: Path, text: str | None) -> str:
    """Write the checkpoint to `made`; what was done, in words."""
    from lockstep_engine import EngineConfig  # noqa: PLC0415 - help needs no torch
    from lockstep_engine.model_config import inspect_model, refuse  # noqa: PLC0415

    from lockstep_tools.quantization import production  # noqa: PLC0415
    from lockstep_tools.quantization.layers import LayeredModel  # noqa: PLC0415

    info = inspect_model(EngineConfig(model=str(source)))
    if info.quantization is not None:
        raise refuse(f"model {source}: its weights are quantized already ({info.quantization.method})")
    calibration, held_out = _windows(arguments, source, text, info.context_length)
    model = LayeredModel(info)
    recipe = production.Recipe(
        arguments.scheme or "gptq",
        arguments.group_size,
        not arguments.no_act_order,
        tuple(arguments.skip),
        arguments.head,
    )
    if arguments.auto:
        assert calibration is not None
        assert held_out is not None
        result = _automatic(arguments, model, made, scratch, recipe, calibration, held_out)
    else:
        notes = console.notes()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True) as bar:
            task = bar.add_task("layers", total=len(model.layers))
            done = production.produce(
                model, made, recipe, calibration, lambda done, total: bar.update(task, completed=done, total=total)
            )
        scaled = f" (inputs of {done.scaled} of {len(done.styles)} matrices scaled)" if done.scaled else ""
        result = arguments.scheme + scaled + _named_head(recipe) + _perplexities(model, made, recipe, held_out)
    before, after = (sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (source, made))
    return f"{result}; {before / 2**20:.1f} MiB of weights became {after / 2**20:.1f} MiB"


def _automatic(
    arguments: argparse.Namespace,
    model: "LayeredModel",
    made: Path,
    scratch: Path,
    recipe: "Recipe",
    calibration: "torch.Tensor",
    held_out: "torch.Tensor",
) -> str:
    from lockstep_tools.quantization.automatic import LEVELS, choose  # noqa: PLC0415

    with console.notes().status("") as status:
        choice = choose(model, made, scratch, recipe, calibration, held_out, arguments.budget, status.update)
    if not set(choice.levels) - {"float"}:
        raise CommandError(f"--budget {arguments.budget:.2%}: no quantized layer stays within it", FAILED)
    layers = ", ".join(f"{choice.levels.count(level)} {level}" for level in LEVELS if level in choice.levels)
    return f"layers: {layers}{_named_head(recipe)}; held-out perplexity {choice.perplexity:.3f}, {choice.change:+.2%}"


def _named_head(recipe: "Recipe") -> str:
    return "" if recipe.head == "none" else f", head {recipe.head}"


def _perplexities(model: "LayeredModel", made: Path, recipe: "Recipe", held_out: "torch.Tensor | None") -> str:
    if held_out is None:
        return ""
    from lockstep_engine import EngineConfig  # noqa: PLC0415
    from lockstep_engine.model_config import inspect_model  # noqa: PLC0415
    from lockstep_engine.weights import Checkpoint  # noqa: PLC0415

    with console.notes().status("perplexity"):
        before = model.perplexity(held_out)
        quantized = Checkpoint(inspect_model(EngineConfig(model=str(made))))
        head = None if recipe.head == "none" else quantized
        after = model.perplexity(held_out, [quantized] * len(model.layers), head)
    return f"; held-out perplexity {before:.3f} became {after:.3f}, {after / before - 1:+.2%}"


def _windows(
    arguments: argparse.Namespace, source: Path, text: str | None, context: int
) -> "tuple[torch.Tensor | None, torch.Tensor | None]":
    """Windows to calibrate on, from the first half of the text, and to measure on, from the second."""
    if text is None:
        return None, None
    from lockstep_engine.offline import load_tokenizer  # noqa: PLC0415

    from lockstep_tools.quantization.production import samples  # noqa: PLC0415

    ids = load_tokenizer(source).encode(text, add_special_tokens=False).ids
    length, half = min(arguments.length, context), len(ids) // 2
    if half < _MIN_WINDOWS * length:
        raise CommandError(
            f"--calibration {arguments.calibration} has {len(ids)} tokens, fewer than {2 * _MIN_WINDOWS} windows of "
            f"{length}",
            UNUSABLE,
        )
    return samples(ids[:half], arguments.samples, length), samples(ids[half:], arguments.samples, length)


def _scheme(text: str) -> str:
    if text not in SCHEMES:
        raise argparse.ArgumentTypeError(f"unknown scheme {text!r}; schemes: {', '.join(SCHEMES)}")
    return text


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a share: {text!r} (such as 1% or 0.01)") from None
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100% (given: {text})")
    return share


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--calibration {path} cannot be read: {error.strerror}", UNUSABLE) from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--calibration {path} is no UTF-8 text: byte {error.start}", UNUSABLE) from None
