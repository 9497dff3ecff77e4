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

_PLAIN_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


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
        self._scale: float = attention.scaling
        # Mistral's layers read the window from the configuration; the others decide it layer by layer.
        self._window: int | None = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        self._qkv = attention.q_proj.whole
        self._dim: int = attention.head_dim
        self._heads, self._kv_heads = (width // self._dim for width in self._qkv.widths[:2])
        self._out: RowLinear = attention.o_proj
        self._gate_up = mlp.gate_proj.whole
        self._down: RowLinear = mlp.down_proj
        self._norms: tuple[FusedRmsNorm, FusedRmsNorm] = (layer.input_layernorm, layer.post_attention_layernorm)  # type: ignore[assignment]
        self._q_norm: FusedRmsNorm | None = getattr(attention, "q_norm", None)
        self._k_norm: FusedRmsNorm | None = getattr(attention, "k_norm", None)

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
        paged: CompiledAttention,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden], changed in place; cosines and sines [1, tokens, head dim]."""
        x = hidden_states[0]
        first, second = self._norms
        qkv = self._qkv(cpu.add_rms_norm(x, None, first.weight, first.eps))
        self._rotate(qkv, *position_embeddings)
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, -1, self._dim).transpose(0, 1)
        q, k, v = heads.split((self._heads, self._kv_heads, self._kv_heads))
        attended = paged.attend(self._layer, q, k, v, scale=self._scale, window=self._window)
        delta = self._out(attended.view(tokens, -1))
        normed = cpu.add_rms_norm(x, delta, second.weight, second.eps)
        x.add_(self._down(cpu.silu_mul(self._gate_up(normed))))
        return hidden_states

    def _rotate(self, qkv: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        q_norm, k_norm = self._q_norm, self._k_norm
        cpu.rope(
            cpu.RopeCall(
                qkv=qkv.data_ptr(),
                cosine=cosine.data_ptr(),
                sine=sine.data_ptr(),
                q_norm=None if q_norm is None else q_norm.weight.data_ptr(),
                k_norm=None if k_norm is None else k_norm.weight.data_ptr(),
                tokens=qkv.shape[0],
                heads=self._heads,
                kv_heads=self._kv_heads,
                dim=self._dim,
                eps=0.0 if q_norm is None else q_norm.eps,
            )
        )


def fuse_layers(model: nn.Module, hidden_act: str) -> int:
    """Put fused layers in place of all that fit. Call it when weights are loaded on the CPU in float32.

    Returns:
        How many were replaced.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(module, FusedLayer) and FusedLayer.fits(child, hidden_act):
                setattr(module, name, FusedLayer(child))
                count += 1
    return count
