"""The models for which machine code is built ahead: widths from their published configurations.

Kernels are specialised on widths, not on weights: another model of the same widths uses the same code. Models that are
not here are served too; their kernels are compiled when a worker starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SPLIT_FROM = 4096
"""Hidden width from which a model is split over more than two GPUs."""
_HEAD_NORMS = frozenset({"qwen3"})
_PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class Widths:
    """A model's widths, of all ranks together."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norms: bool = False
    windows: tuple[bool, ...] = (False,)
    """Whether attention has a window; models with two kinds of layers have both."""
    plain: bool = True
    latent: int = 0
    """Components of the one cached key of a token that are its value, too (DeepSeek's MLA); 0: heads have values."""

    def split(self, tp: int) -> tuple[int, int, int] | None:
        """Heads, key/value heads and inner width of one of `tp` ranks; None: it cannot be split so."""
        if self.heads % tp or self.inner % tp or (self.kv_heads % tp and tp % self.kv_heads):
            return None
        return self.heads // tp, max(1, self.kv_heads // tp), self.inner // tp

    @property
    def usual_tp(self) -> tuple[int, ...]:
        """Numbers of GPUs that such a model is usually split over."""
        return (1, 2, 4, 8) if self.hidden >= _SPLIT_FROM else (1, 2)


MODELS: dict[str, Widths] = {
    "llama-2-7b": Widths(4096, 11008, 32, 32, 128, 32000),
    "llama-3.1-8b": Widths(4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Widths(8192, 28672, 64, 8, 128, 128256),
    "llama-3.2-1b": Widths(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Widths(3072, 8192, 24, 8, 128, 128256),
    "mistral-nemo-12b": Widths(5120, 14336, 32, 8, 128, 131072),
    "mistral-small-24b": Widths(5120, 32768, 32, 8, 128, 131072),
    "qwen2.5-0.5b": Widths(896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": Widths(1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-3b": Widths(2048, 11008, 16, 2, 128, 151936),
    "qwen2.5-7b": Widths(3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-14b": Widths(5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": Widths(5120, 27648, 40, 8, 128, 152064),
    "qwen2.5-72b": Widths(8192, 29568, 64, 8, 128, 152064),
    "qwen3-0.6b": Widths(1024, 3072, 16, 8, 128, 151936, head_norms=True),
    "qwen3-1.7b": Widths(2048, 6144, 16, 8, 128, 151936, head_norms=True),
    "qwen3-4b": Widths(2560, 9728, 32, 8, 128, 151936, head_norms=True),
    "qwen3-8b": Widths(4096, 12288, 32, 8, 128, 151936, head_norms=True),
    "qwen3-14b": Widths(5120, 17408, 40, 8, 128, 151936, head_norms=True),
    "qwen3-32b": Widths(5120, 25600, 64, 8, 128, 151936, head_norms=True),
    "tinyllama-1.1b": Widths(2048, 5632, 32, 4, 64, 32000),
}


def from_config(settings: Mapping[str, Any]) -> Widths:
    """The widths that a config.json names.

    Raises:
        ValueError: a field is missing; the message names it.
    """
    hidden, inner, heads, vocabulary = (
        _positive(settings, field)
        for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    )
    kind = settings.get("model_type")
    kv_heads = settings.get("num_key_value_heads") or heads
    head_dim = settings.get("head_dim") or hidden // heads
    latent = settings.get("kv_lora_rank") or 0
    if latent:
        kv_heads, head_dim = 1, _positive(settings, "kv_lora_rank") + _positive(settings, "qk_rope_head_dim")
    # Which layers have the window, and whether any has it, depends on the architecture: code for both is small.
    has_window = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    windows = (False, True) if has_window else (False,)
    norms, plain = kind in _HEAD_NORMS, kind in _PLAIN
    return Widths(hidden, inner, heads, kv_heads, head_dim, vocabulary, norms, windows, plain, latent)


def splits(widths: Widths, tps: tuple[int, ...] = ()) -> Iterator[tuple[int, int, int]]:
    """Parts of a model that ranks hold: heads, key/value heads, inner width."""
    for tp in tps or widths.usual_tp:
        part = widths.split(tp)
        if part is not None:
            yield part


def _positive(settings: Mapping[str, Any], field: str) -> int:
    value = settings.get(field)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json has no usable {field} (given: {value})")
    return value
