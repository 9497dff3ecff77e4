"""The plain Llama shape: which layers and models of Hugging Face have it, and the parts of such a layer.

`fused_layer` computes it on the CPU, `gpu_decoder` on a GPU; both use the parameters of the layers that they replace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep_engine.linear import ColumnLinear, FusedRmsNorm, MergedPart, RowLinear

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_LAYERS = frozenset(f"{family}DecoderLayer" for family in _FAMILIES)
_MODELS = frozenset(f"{family}ForCausalLM" for family in _FAMILIES)
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose angles do not depend on the sequence's length."""


@dataclass(frozen=True)
class PlainLayer:
    """The parts of a layer that computes x + attention(norm(x)), then x + mlp(norm(x)), with rotary positions and
    SiLU-gated products.
    """

    number: int
    heads: int
    kv_heads: int
    """`heads` and `kv_heads`: numbers of heads on this rank."""
    head_dim: int
    scale: float
    window: int | None
    """`scale` and `window`: as in `Scoring`."""
    qkv: ColumnLinear
    out: RowLinear
    gate_up: ColumnLinear
    down: RowLinear
    norms: tuple[FusedRmsNorm, FusedRmsNorm]
    """The norm before attention, and the one before the gated products."""
    head_norms: tuple[FusedRmsNorm, FusedRmsNorm] | None
    """Norms of each head's query and key before they are rotated (Qwen 3)."""

    @staticmethod
    def of(layer: nn.Module) -> "PlainLayer":
        """The parts of a layer for which `fits` holds."""
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        qkv: ColumnLinear = attention.q_proj.merged_linear
        heads, kv_heads, _ = (width // attention.head_dim for width in qkv.widths)
        first: Any = layer.input_layernorm
        second: Any = layer.post_attention_layernorm
        return PlainLayer(
            number=attention.layer_idx,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=_window(attention),
            qkv=qkv,
            out=attention.o_proj,
            gate_up=mlp.gate_proj.merged_linear,
            down=mlp.down_proj,
            norms=(first, second),
            head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        )

    @staticmethod
    def fits(layer: nn.Module, hidden_act: str) -> bool:
        """Whether this layer has the plain shape, after its linears and norms have been replaced by ours."""
        if type(layer).__name__ not in _LAYERS or hidden_act != "silu":
            return False
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        return (
            isinstance(attention.q_proj, MergedPart)
            and isinstance(getattr(mlp, "gate_proj", None), MergedPart)
            and isinstance(attention.o_proj, RowLinear)
            and isinstance(mlp.down_proj, RowLinear)
            and all(isinstance(norm, FusedRmsNorm) for norm in norms)
        )


def _window(attention: Any) -> int | None:
    """The window of a layer's own code. Qwen's layers decide it one by one, Mistral's read it from the configuration,
    and Llama's have none: their configuration keeps a `sliding_window` that a checkpoint names, without a meaning.
    """
    given: int | None
    if hasattr(attention, "sliding_window"):
        given = attention.sliding_window
    else:
        config = attention.config
        given = config.sliding_window if hasattr(type(config), "sliding_window") else None
    return given


def plain_windows(model: nn.Module) -> dict[int, int | None]:
    """The windows of a model's layers of the plain families, by their numbers."""
    attentions: list[Any] = [each.self_attn for each in model.modules() if type(each).__name__ in _LAYERS]
    return {each.layer_idx: _window(each) for each in attentions}


def is_plain_model(model: nn.Module, plain_layers: Sequence[object]) -> bool:
    """Whether the model is embedding, plain layers, norm and head, with angles that depend on positions alone."""
    inner: Any = getattr(model, "model", None)
    return (
        type(model).__name__ in _MODELS
        and len(plain_layers) == len(inner.layers)
        and isinstance(inner.norm, FusedRmsNorm)
        and inner.rotary_emb.rope_type in _STATIC_ROPE
    )
