"""Decoder layers of the plain Llama shape in a dozen calls, for the CPU, where the calls themselves take most of a
step's time.

A fused layer replaces a Hugging Face layer and uses that layer's parameters. It computes the same; the tests compare it
with the unmodified model.
"""

from typing import Any

import torch
from torch import nn

from lockstep_engine.attention_cpu import CompiledAttention
from lockstep_engine.interception import intercepted
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import FusedRmsNorm
from lockstep_engine.own_attention import CurrentStep
from lockstep_engine.plain_layer import PlainLayer


class FusedLayer(nn.Module):
    """A plain layer on the CPU (see `PlainLayer`).

    Args:
        layer: a layer for which `PlainLayer.fits` holds; its parameters stay where they are.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        attention: Any = layer.self_attn
        self._step: CurrentStep = attention.current_step
        self._parts = parts = PlainLayer.of(layer)
        q_norm, k_norm = parts.head_norms or (None, None)
        self._rotation = cpu.RopeCall(
            q_norm=None if q_norm is None else q_norm.weight.data_ptr(),
            k_norm=None if k_norm is None else k_norm.weight.data_ptr(),
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.head_dim,
            eps=0.0 if q_norm is None else q_norm.eps,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden], changed in place; cosines and sines [1, tokens, head dim]."""
        paged = self._step.take()
        assert isinstance(paged, CompiledAttention)
        self.advance(hidden_states[0], *position_embeddings, paged)
        return hidden_states

    def advance(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, paged: CompiledAttention) -> None:
        """The layer on x [tokens, hidden], in place; cosine and sine [tokens, head dim], contiguous."""
        parts, rotation = self._parts, self._rotation
        first, second = parts.norms
        rotation.cosine, rotation.sine = cosine.data_ptr(), sine.data_ptr()
        qkv = parts.qkv.forward(cpu.add_rms_norm(x, None, first.weight, first.eps))
        attended = paged.attend_merged(parts.number, qkv, rotation, scale=parts.scale, window=parts.window)
        normed = cpu.add_rms_norm(x, parts.out.forward(attended), second.weight, second.eps)
        x.add_(parts.down.forward(cpu.silu_mul(parts.gate_up.forward(normed))))


def fuse_layers(model: nn.Module, hidden_act: str) -> list[FusedLayer]:
    """Put fused layers in place of all that fit. Call it when weights are loaded on the CPU in float32.

    Returns:
        The new layers, in order.
    """
    fused: list[FusedLayer] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(module, FusedLayer) and PlainLayer.fits(child, hidden_act):
                fused.append(FusedLayer(child))
                setattr(module, name, fused[-1])
    return fused


class FusedDecoder:
    """A model of fused layers, called without the modules around them.

    Args:
        model: a model for which `is_plain_model` holds.
        layers: all its layers.
        context_length: number of positions for which rotary tables are made.
    """

    def __init__(self, model: nn.Module, layers: list[FusedLayer], context_length: int) -> None:
        self._layers = layers
        self._embed: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._norm: FusedRmsNorm = model.model.norm  # type: ignore[assignment]
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        positions = torch.arange(context_length).unsqueeze(0)
        with torch.inference_mode(), intercepted():  # equal tables on every CPU
            cosine, sine = rotary(torch.empty(1, context_length, 1), positions)
        self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()

    def logits(self, ids: torch.Tensor, attention: CompiledAttention, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        logits: torch.Tensor = self._head(self._states(self._stream(ids, attention), rows))
        return logits

    def logits_and_states(
        self, ids: torch.Tensor, attention: CompiledAttention, rows: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BuiltModel.logits_and_states`."""
        x = self._stream(ids, attention)
        return self._head(self._states(x, rows)), self._states(x, pooled)

    def _states(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return cpu.add_rms_norm(x.index_select(0, rows), None, self._norm.weight, self._norm.eps)

    def _stream(self, ids: torch.Tensor, attention: CompiledAttention) -> torch.Tensor:
        x: torch.Tensor = self._embed(ids)
        cosine = self._cosine.index_select(0, attention.positions)
        sine = self._sine.index_select(0, attention.positions)
        for layer in self._layers:
            layer.advance(x, cosine, sine, attention)
        return x
