"""`lockstep convert`: GGUF files to directories that can be served, and back."""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from lockstep_common.errors import LockstepError
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError

DESCRIPTION = """\
Make a directory with safetensors of a GGUF file, so that it can be served, or a GGUF file of a directory. The
name that ends in .gguf decides the direction. Weights that are quantized as q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or
q6_k stay as they are in the directory, which lockstep alone reads then; others are widened to --dtype. With --float all
are."""

EXAMPLES = """\
  lockstep convert llama-3-8b-instruct.Q4_K_M.gguf /models/llama-3-8b-q4 --dtype bfloat16
  lockstep convert llama-3-8b-instruct.Q8_0.gguf /models/llama-3-8b --dtype bfloat16 --float
  lockstep convert models/reference reference.gguf --dtype q8_0"""

_DTYPES = ("float32", "float16", "bfloat16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a .gguf file, or the directory of a model")
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="the directory or the .gguf file to write; must not exist yet"
    )
    parser.add_argument(
        "--dtype",
        choices=(*_DTYPES, "q8_0", "q4_0"),
        default="float16",
        help="type of the weights, in a directory of those that do not stay quantized (default: float16)",
    )
    parser.add_argument(
        "--float", dest="widen", action="store_true", help="write quantized weights in --dtype, for other engines, too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert; the target appears once it is complete."""
    source, target, dtype = arguments.source, arguments.target, arguments.dtype
    to_file = _check(arguments)
    # This command shows its own progress, and nothing is fetched.
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    from lockstep_tools.model import gguf_files  # noqa: PLC0415 - it loads torch
    from lockstep_tools.model.gguf_codes import describe  # noqa: PLC0415

    notes = console.notes()
    with _temporary(target) as folder, notes.status("") as status:
        made = Path(folder) / target.name
        try:
            if to_file:
                gguf_files.write(
                    source, made, dtype, lambda done, total: status.update(f"{done} of {total} tensors, then the file")
                )
                result = f"{target}: {made.stat().st_size / 2**20:.1f} MiB"
            else:
                status.update(Text(f"reading {source}"))
                made.mkdir()
                done = gguf_files.read(source, made, dtype, widen=arguments.widen)
                info, what = done.info, ""
                if done.kept:
                    what += f"; as stored: {describe(done.kept)}"
                if done.widened:
                    what += f"; widened to {dtype}: {describe(done.widened)}"
                result = (
                    f"{target}: {info.architecture}, context {info.context_length}{what}; `lockstep serve {target}`"
                )
            shutil.move(made, target)
        except LockstepError as error:
            raise CommandError(error.message, UNUSABLE) from None
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror or error}", FAILED) from None
    notes.print(result, markup=False)
    return 0


def _check(arguments: argparse.Namespace) -> bool:
    """Refuse what cannot be converted; return whether a file is to be written."""
    source, target, dtype = arguments.source, arguments.target, arguments.dtype
    to_file = bool(target.suffix == ".gguf")
    if to_file == (source.suffix == ".gguf"):
        raise CommandError("one of SOURCE and TARGET has to end in .gguf", UNUSABLE)
    if not source.exists():
        raise CommandError(f"{source} does not exist", UNUSABLE)
    if target.exists():
        raise CommandError(f"{target} exists already", UNUSABLE)
    if to_file and arguments.widen:
        raise CommandError("--float is for a directory that is made of a GGUF file", UNUSABLE)
    if not to_file and dtype not in _DTYPES:
        raise CommandError(f"--dtype {dtype}: a directory holds {', '.join(_DTYPES)}", UNUSABLE)
    return to_file


def _temporary(target: Path) -> "tempfile.TemporaryDirectory[str]":
    try:
        return tempfile.TemporaryDirectory(dir=_folder_of(target), prefix=".convert-")
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror or error}", UNUSABLE) from None


def _folder_of(target: Path) -> Path:
    folder = target.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"{folder} is not a directory", UNUSABLE)
    return folder
