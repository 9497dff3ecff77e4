"""`lockstep train`: a small Llama-shaped language model from a text file, by the recipe of the reference model.

Byte-level BPE tokenizer, AdamW over random windows of the text, fp16 safetensors out. Only training itself imports
torch and transformers.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep_tools import console
from lockstep_tools.arguments import real, whole
from lockstep_tools.failure import UNUSABLE, CommandError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

DESCRIPTION = """\
Train a small Llama-shaped model on a text file, as the reference model was trained. The defaults are its recipe:
6,350 steps of 8 windows of 256 tokens, then 1,641 steps on windows of 1,024 and 2,047 tokens: hours on a CPU."""

EXAMPLES = """\
  lockstep train out/reference books.txt --valid held-out.txt
  lockstep train out/tiny books.txt --hidden 64 --layers 2 --heads 2 --steps 200 --long-steps 0"""

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] %}{{ m['content'] }}"
    "{% if not loop.last %}\n\n{% endif %}{% endif %}{% endfor %}"
)
PERPLEXITY_WINDOWS = (256, 512, 1024, 2047)
PERPLEXITY_TOKENS = 20 * 1024

_LONG_WINDOWS = (1024, 2047)
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_CLIP_NORM = 1.0
_WARMUP_STEPS = 100
_LOSS_SMOOTHING = 0.98


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    hidden: int = 256
    layers: int = 5
    heads: int = 4
    vocab: int = 4096
    context: int = 2048

    @property
    def intermediate(self) -> int:
        """Width of the gated MLP: 8/3 of the hidden size, rounded up to 64 (SwiGLU, Shazeer 2020)."""
        return math.ceil(self.hidden * 8 / 3 / 64) * 64


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one learning rate curve."""

    name: str
    steps: int
    windows: tuple[int, ...]
    """Tokens of a window; steps take them in turn."""
    tokens_per_step: int
    peak_rate: float
    warmup_steps: int = 0

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from the peak to 0."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_rate * 0.5 * (1 + math.cos(math.pi * done))

    def shape(self, step: int) -> tuple[int, int]:
        """(windows, tokens of each) of a step."""
        window = self.windows[step % len(self.windows)]
        return max(1, self.tokens_per_step // window), window


@dataclass(frozen=True)
class Outcome:
    """What training gave."""

    parameters: int
    first_loss: float
    last_loss: float
    """In nats for a token; averaged over the last steps."""
    perplexity: dict[int, float]
    """By window; empty without a held-out text."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    shape = Shape()
    parser.add_argument("out", metavar="MODEL_OUT", help="directory to write the model to; must not hold one already")
    parser.add_argument("text", metavar="TEXT_FILE", help="UTF-8 text to train on")
    parser.add_argument("--valid", metavar="TEXT_FILE", help="held-out text: report the perplexity on it at the end")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="default: 0")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    group = parser.add_argument_group("recipe")
    group.add_argument("--steps", type=whole(1), default=6350, metavar="N", help="on short windows (default: 6350)")
    group.add_argument("--batch", type=whole(1), default=8, metavar="N", help="short windows in a step (default: 8)")
    group.add_argument("--window", type=whole(8), default=256, metavar="TOKENS", help="default: 256")
    group.add_argument("--rate", type=real(0, 1), default=2e-3, metavar="R", help="peak learning rate (default: 0.002)")
    group.add_argument("--long-steps", type=whole(0), default=1641, metavar="N", help="on long windows (default: 1641)")
    group.add_argument("--long-rate", type=real(0, 1), default=8e-4, metavar="R", help="default: 0.0008")
    group = parser.add_argument_group("model")
    group.add_argument("--hidden", type=whole(16), default=shape.hidden, metavar="N", help="default: %(default)s")
    group.add_argument("--layers", type=whole(1), default=shape.layers, metavar="N", help="default: %(default)s")
    group.add_argument("--heads", type=whole(1), default=shape.heads, metavar="N", help="default: %(default)s")
    group.add_argument("--vocab", type=whole(300), default=shape.vocab, metavar="N", help="default: %(default)s")
    group.add_argument("--context", type=whole(16), default=shape.context, metavar="N", help="default: %(default)s")


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


class Training:
    """A recipe: the same text, shape, phases, seed and machine give the same model."""

    def __init__(
        self, shape: Shape, phases: list[Phase], *, seed: int = 0, device: str = "cpu", threads: int | None = None
    ) -> None:
        self._shape = shape
        self._phases = phases
        self._seed = seed
        self._device = device
        self._threads = threads

    def run(self, text: str, valid: str | None, out: Path) -> Outcome:
        """Train on `text`, write the model to `out`, measure it on `valid`.

        Raises:
            CommandError: the text is too short.
        """
        import torch  # noqa: PLC0415

        if self._threads:
            torch.set_num_threads(self._threads)
        tokenizer = train_tokenizer(text, self._shape.vocab)
        ids = torch.tensor(tokenizer.encode(text).ids)
        longest = max(max(phase.windows) for phase in self._phases if phase.steps)
        if len(ids) <= longest + 1:
            raise CommandError(f"the text has {len(ids)} tokens, too few for windows of {longest}", UNUSABLE)
        torch.manual_seed(self._seed)
        model = make_model(self._shape, tokenizer.get_vocab_size()).to(self._device)
        losses = list(self._learn(model, ids))
        save(model, tokenizer, out, self._shape.context)
        tail = losses[-max(1, len(losses) // 20) :]
        return Outcome(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            first_loss=losses[0],
            last_loss=sum(tail) / len(tail),
            perplexity=self._perplexities(model, tokenizer.encode(valid).ids) if valid else {},
        )

    def _learn(self, model: Any, ids: "torch.Tensor") -> Iterator[float]:
        """Run the phases; yields the loss of each step."""
        import torch  # noqa: PLC0415

        decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}], betas=_BETAS
        )
        random = torch.Generator().manual_seed(self._seed)
        model.train()
        with _progress() as progress:
            for phase in self._phases:
                report = _reporter(progress, phase)
                for step in range(phase.steps):
                    for group in optimizer.param_groups:
                        group["lr"] = phase.rate(step)
                    inputs, targets = windows(ids, *phase.shape(step), random)
                    logits = model(inputs.to(self._device)).logits
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(self._device).flatten())
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
                    optimizer.step()
                    report(loss.item())
                    yield loss.item()

    def _perplexities(self, model: Any, ids: list[int]) -> dict[int, float]:
        usable = [window for window in PERPLEXITY_WINDOWS if window < self._shape.context and window < len(ids)]
        return {window: perplexity(model, ids, window) for window in usable}


def train_tokenizer(text: str, vocab: int) -> "Tokenizer":
    """A byte-level BPE tokenizer with `SPECIAL_TOKENS` as its first ids; a pure function of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Line by line, as the library reads files: pairs across lines are counted otherwise, and other merges come out.
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def make_model(shape: Shape, vocab: int) -> Any:
    """A Llama with fresh weights and tied embeddings, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
    )
    return LlamaForCausalLM(config)


def windows(
    ids: "torch.Tensor", count: int, length: int, random: "torch.Generator"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Random windows of the text, and the same shifted by one: both int64 [count, length]."""
    import torch  # noqa: PLC0415

    starts = torch.randint(len(ids) - length, (count,), generator=random)
    picked = ids[starts[:, None] + torch.arange(length + 1)]
    return picked[:, :-1], picked[:, 1:]


def perplexity(model: Any, ids: list[int], window: int) -> float:
    """The exponential of the mean loss over the first `PERPLEXITY_TOKENS` tokens, in windows that do not overlap."""
    import torch  # noqa: PLC0415

    text = torch.tensor(ids[:PERPLEXITY_TOKENS])
    total = 0.0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(text) - 1, window):
            piece = text[start : start + window + 1].to(model.device)
            logits = model(piece[None, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
    return math.exp(total / (len(text) - 1))


def save(model: Any, tokenizer: "Tokenizer", out: Path, context: int) -> None:
    """Write configuration, fp16 weights, and tokenizer with the chat template, in the Hugging Face layout."""
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to("cpu").half().save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # the library leaves them to their owner alone
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}", UNUSABLE) from None


def _progress() -> Progress:
    notes = console.notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[figures]}"), console=notes, disable=not notes.is_terminal)


def _reporter(progress: Progress, phase: Phase) -> Callable[[float], None]:
    """Shows a step's loss, smoothed, and the speed: in the bar on a terminal, else a line now and then."""
    task = progress.add_task(phase.name, total=phase.steps, figures="")
    began_s = time.monotonic()
    smoothed = 0.0
    done = 0

    def report(loss: float) -> None:
        nonlocal smoothed, done
        smoothed = loss if done == 0 else _LOSS_SMOOTHING * smoothed + (1 - _LOSS_SMOOTHING) * loss
        done += 1
        speed = done * phase.tokens_per_step / (time.monotonic() - began_s)
        progress.update(task, advance=1, figures=f"loss {smoothed:.3f}, {speed:.0f} tokens/s")
        if progress.disable and (done % 100 == 0 or done == phase.steps):
            progress.console.print(
                f"{phase.name}: step {done} of {phase.steps}, loss {smoothed:.3f}, {speed:.0f} tokens/s"
            )

    return report
