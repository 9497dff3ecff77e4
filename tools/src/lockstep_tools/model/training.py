"""Training of a small Llama-shaped language model from a text file, by the recipe of the reference model.

Byte-level BPE tokenizer, AdamW over random windows of the text, fp16 safetensors out. Only training itself imports
torch and transformers.
"""

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep_tools import console
from lockstep_tools.failure import UNUSABLE, CommandError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] %}{{ m['content'] }}"
    "{% if not loop.last %}\n\n{% endif %}{% endif %}{% endfor %}"
)
PERPLEXITY_WINDOWS = (256, 512, 1024, 2047)
PERPLEXITY_TOKENS = 20 * 1024

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_CLIP_NORM = 1.0
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
    """A phase of training with one learning rate curve."""

    name: str
    steps: int
    windows: tuple[int, ...]
    """Lengths of windows in tokens; steps use them in turn."""
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
    """The result of training."""

    parameters: int
    first_loss: float
    last_loss: float
    """The loss in nats per token, averaged over the last steps."""
    perplexity: dict[int, float]
    """Perplexity by window; empty without a held-out text."""


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
            CommandError: the text is too short, or `out` cannot be written. Both are found before the training.
        """
        import torch  # noqa: PLC0415

        if self._threads:
            torch.set_num_threads(self._threads)
        tokenizer = train_tokenizer(text, self._shape.vocab)
        ids = torch.tensor(tokenizer.encode(text).ids)
        longest = max(max(phase.windows) for phase in self._phases if phase.steps)
        if len(ids) <= longest + 1:
            raise CommandError(f"the text has {len(ids)} tokens, too few for windows of {longest}", UNUSABLE)
        _check_writable(out)
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


def _check_writable(out: Path) -> None:
    """Make the directory and a file in it.

    Raises:
        CommandError: that fails.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror or error}", UNUSABLE) from None


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
    # Line by line, as the library reads files: otherwise pairs across lines are counted too, and the merges differ.
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
        weights.chmod(0o644)  # the library makes them readable by their owner only
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _progress() -> Progress:
    notes = console.notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[figures]}"), console=notes, disable=not notes.is_terminal)


def _reporter(progress: Progress, phase: Phase) -> Callable[[float], None]:
    """Shows a step's smoothed loss and the speed: in the bar on a terminal, else in occasional lines."""
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
