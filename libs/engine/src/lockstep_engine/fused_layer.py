"""A decoder layer of the plain Llama shape in a dozen calls, for the CPU, where the calls themselves are what a step
costs.

It takes the place of a Hugging Face layer whose class is known to compute just this, and uses that layer's
parameters. What it computes is the same; the unmodified model is its oracle.
"""

from typing import Any

import torch
from torch import nn

from lockstep_engine.attention import CompiledAttention
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import FusedRmsNorm, MergedPart, RowLinear
from lockstep_engine.own_attention import CurrentStep

_PLAIN_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PLAIN_LAYERS = frozenset(f"{family}DecoderLayer" for family in _PLAIN_FAMILIES)
_PLAIN_MODELS = frozenset(f"{family}ForCausalLM" for family in _PLAIN_FAMILIES)
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose angles do not depend on the sequence's length."""


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with rotary positions and SiLU-gated products.

    Args:
        layer: a layer for which `fits` holds; its parameters stay where they are.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self._layer = attention.layer_idx
        self._step: CurrentStep = attention.current_step
        self._scale: float = attention.scaling
        # Mistral's layers read the window from the configuration; the others decide it layer by layer.
        self._window: int | None = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        self._qkv = attention.q_proj.whole
        heads, kv_heads, _ = (width // attention.head_dim for width in self._qkv.widths)
        self._out: RowLinear = attention.o_proj
        self._gate_up = mlp.gate_proj.whole
        self._down: RowLinear = mlp.down_proj
        self._norms: tuple[FusedRmsNorm, FusedRmsNorm] = (layer.input_layernorm, layer.post_attention_layernorm)  # type: ignore[assignment]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._rotation = cpu.RopeCall(
            q_norm=None if norms[0] is None else norms[0].weight.data_ptr(),
            k_norm=None if norms[1] is None else norms[1].weight.data_ptr(),
            heads=heads,
            kv_heads=kv_heads,
            dim=attention.head_dim,
            eps=0.0 if norms[0] is None else norms[0].eps,
        )

    @staticmethod
    def fits(layer: nn.Module, hidden_act: str) -> bool:
        """Whether this layer computes what `FusedLayer` does, after our linears and norms have been put into it."""
        if type(layer).__name__ not in _PLAIN_LAYERS or hidden_act != "silu":
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

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden], changed in place; cosines and sines [1, tokens, head dim]."""
        paged = self._step.attention
        assert isinstance(paged, CompiledAttention)
        self._step.calls += 1
        self.advance(hidden_states[0], *position_embeddings, paged)
        return hidden_states

    def advance(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, paged: CompiledAttention) -> None:
        """The layer on x [tokens, hidden], in place; cosine and sine [tokens, head dim], contiguous."""
        first, second = self._norms
        rotation = self._rotation
        rotation.cosine, rotation.sine = cosine.data_ptr(), sine.data_ptr()
        qkv = self._qkv.forward(cpu.add_rms_norm(x, None, first.weight, first.eps))
        attended = paged.attend_merged(self._layer, qkv, rotation, scale=self._scale, window=self._window)
        normed = cpu.add_rms_norm(x, self._out.forward(attended), second.weight, second.eps)
        x.add_(self._down.forward(cpu.silu_mul(self._gate_up.forward(normed))))


def fuse_layers(model: nn.Module, hidden_act: str) -> list[FusedLayer]:
    """Put fused layers in place of all that fit. Call it when weights are loaded on the CPU in float32.

    Returns:
        The new layers, in order.
    """
    fused: list[FusedLayer] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(module, FusedLayer) and FusedLayer.fits(child, hidden_act):
                fused.append(FusedLayer(child))
                setattr(module, name, fused[-1])
    return fused


class FusedDecoder:
    """A whole model of fused layers, called without the modules around them.

    Args:
        model: a model for which `fits` holds.
        layers: all its layers.
        context_length: positions that will be asked for.
    """

    def __init__(self, model: nn.Module, layers: list[FusedLayer], context_length: int) -> None:
        self._layers = layers
        self._embed: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._norm: FusedRmsNorm = model.model.norm  # type: ignore[assignment]
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        positions = torch.arange(context_length).unsqueeze(0)
        with torch.inference_mode():
            cosine, sine = rotary(torch.empty(1, context_length, 1), positions)
        self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()

    @staticmethod
    def fits(model: nn.Module, layers: list[FusedLayer]) -> bool:
        """Whether the model is embedding, fused layers, norm and head, with angles that depend on positions alone."""
        inner: Any = getattr(model, "model", None)
        return (
            type(model).__name__ in _PLAIN_MODELS
            and len(layers) == len(inner.layers)
            and isinstance(inner.norm, FusedRmsNorm)
            and inner.rotary_emb.rope_type in _STATIC_ROPE
        )

    def logits(self, ids: torch.Tensor, attention: CompiledAttention, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        x = self._embed(ids)
        cosine = self._cosine.index_select(0, attention.positions)
        sine = self._sine.index_select(0, attention.positions)
        for layer in self._layers:
            layer.advance(x, cosine, sine, attention)
        last = x.index_select(0, rows)
        logits: torch.Tensor = self._head(cpu.add_rms_norm(last, None, self._norm.weight, self._norm.eps))
        return logits
