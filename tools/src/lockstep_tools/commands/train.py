"""`lockstep train`: a small Llama-shaped language model from a text file, by the recipe of the reference model."""

import argparse
from pathlib import Path

from lockstep_tools.arguments import integer, real
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.model.training import Phase, Shape, Training

DESCRIPTION = """\
Train a small Llama-shaped model on a text file, as the reference model was trained. The defaults are its recipe:
6,350 steps of 8 windows of 256 tokens, then 1,641 steps on windows of 1,024 and 2,047 tokens: hours on a CPU."""

EXAMPLES = """\
  lockstep train out/reference books.txt --valid held-out.txt
  lockstep train out/tiny books.txt --hidden 64 --layers 2 --heads 2 --steps 200 --long-steps 0"""

_LONG_WINDOWS = (1024, 2047)
_WARMUP_STEPS = 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    shape = Shape()
    parser.add_argument("out", metavar="MODEL_OUT", help="directory to write the model to; must not hold one already")
    parser.add_argument("text", metavar="TEXT_FILE", help="UTF-8 text to train on")
    parser.add_argument("--valid", metavar="TEXT_FILE", help="held-out text: report the perplexity on it at the end")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="default: 0")
    parser.add_argument("--threads", type=integer(1), metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    group = parser.add_argument_group("recipe")
    group.add_argument("--steps", type=integer(1), default=6350, metavar="N", help="short windows (default: 6350)")
    group.add_argument("--batch", type=integer(1), default=8, metavar="N", help="short windows in a step (default: 8)")
    group.add_argument("--window", type=integer(8), default=256, metavar="TOKENS", help="default: 256")
    group.add_argument("--rate", type=real(0, 1), default=2e-3, metavar="R", help="peak learning rate (default: 0.002)")
    group.add_argument("--long-steps", type=integer(0), default=1641, metavar="N", help="long windows (default: 1641)")
    group.add_argument("--long-rate", type=real(0, 1), default=8e-4, metavar="R", help="default: 0.0008")
    group = parser.add_argument_group("model")
    group.add_argument("--hidden", type=integer(16), default=shape.hidden, metavar="N", help="default: %(default)s")
    group.add_argument("--layers", type=integer(1), default=shape.layers, metavar="N", help="default: %(default)s")
    group.add_argument("--heads", type=integer(1), default=shape.heads, metavar="N", help="default: %(default)s")
    group.add_argument("--vocab", type=integer(300), default=shape.vocab, metavar="N", help="default: %(default)s")
    group.add_argument("--context", type=integer(16), default=shape.context, metavar="N", help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Train, write the model, report."""
    shape = Shape(arguments.hidden, arguments.layers, arguments.heads, arguments.vocab, arguments.context)
    if shape.hidden % (2 * shape.heads):
        raise CommandError(f"--hidden {shape.hidden} is not a multiple of twice --heads {shape.heads}", UNUSABLE)
    out = Path(arguments.out)
    if (out / "config.json").exists():
        raise CommandError(f"{out} holds a model already", UNUSABLE)
    text = _read(arguments.text)
    valid = _read(arguments.valid) if arguments.valid else None
    phases = [
        Phase(
            "short windows",
            arguments.steps,
            (arguments.window,),
            arguments.batch * arguments.window,
            arguments.rate,
            min(_WARMUP_STEPS, arguments.steps // 10),
        ),
        Phase(
            "long windows",
            arguments.long_steps,
            tuple(min(window, shape.context - 1) for window in _LONG_WINDOWS),
            arguments.batch * arguments.window,
            arguments.long_rate,
        ),
    ]
    training = Training(shape, phases, seed=arguments.seed, device=arguments.device, threads=arguments.threads)
    outcome = training.run(text, valid, out)
    print(f"{outcome.parameters / 1e6:.2f} M parameters")
    print(f"loss from {outcome.first_loss:.3f} to {outcome.last_loss:.3f} nats a token")
    for window, value in outcome.perplexity.items():
        print(f"perplexity at windows of {window}: {value:.1f}")
    print(f"written to {out}")
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}", UNUSABLE) from None
