"""A model of the plain Llama shape in ten kernels a layer, for GPUs: norms with the residual, rotary positions
with the cache's store, and gates are one kernel each, beside products and attention.

It uses the parameters of the Hugging Face model it is made from. The tests compare it with the unmodified model.
"""

from typing import Any

import torch
from torch import nn

from lockstep_engine.attention_triton import Rotation, TritonAttention
from lockstep_engine.kernels.triton_gate import silu_mul
from lockstep_engine.kernels.triton_norm import add_rms_norm
from lockstep_engine.linear import FusedRmsNorm
from lockstep_engine.plain_layer import PlainLayer, is_plain_model


class GpuLayer:
    """A plain layer on a GPU (see `PlainLayer`).

    Args:
        layer: a layer for which `PlainLayer.fits` holds; its parameters stay where they are.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._parts = parts = PlainLayer.of(layer)
        self._norm_weights, self._norm_eps = None, 0.0
        if parts.head_norms is not None:
            q_norm, k_norm = parts.head_norms
            self._norm_weights, self._norm_eps = (q_norm.weight, k_norm.weight), q_norm.eps

    def step(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        paged: TritonAttention,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            x: [tokens, hidden], the residual stream without `delta`; changed in place.
            delta: [tokens, hidden], what the layer before adds to it.
            angles: cosines and sines [tokens, rotated].
            paged: the step's attention.

        Returns:
            [tokens, hidden], what this layer adds.
        """
        parts = self._parts
        first, second = parts.norms
        rotation = Rotation(*angles, self._norm_weights, self._norm_eps, parts.heads)
        qkv = parts.qkv.forward(add_rms_norm(x, delta, first.weight, first.eps))
        attended = paged.attend_merged(parts.number, qkv, rotation, scale=parts.scale, window=parts.window)
        normed = add_rms_norm(x, parts.out.forward(attended), second.weight, second.eps)
        return parts.down.forward(silu_mul(parts.gate_up.forward(normed)))


class GpuDecoder:
    """A model for which `fits` holds, called without its modules.

    Args:
        model: with its weights loaded.
        context_length: number of positions for which rotary tables are made.
    """

    def __init__(self, model: nn.Module, context_length: int) -> None:
        inner: Any = model.model
        self._layers = [GpuLayer(layer) for layer in inner.layers]
        self._embed: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._norm: FusedRmsNorm = inner.norm
        device = self._norm.weight.device
        positions = torch.arange(context_length, device=device).unsqueeze(0)
        with torch.inference_mode():
            angles = inner.rotary_emb(torch.empty(1, context_length, 1, device=device), positions)
        self._cosine, self._sine = (each[0].contiguous() for each in angles)

    @staticmethod
    def fits(model: nn.Module, hidden_act: str) -> bool:
        """Whether the model is embedding, plain layers, norm and head, with angles that depend on positions alone."""
        layers = list(getattr(getattr(model, "model", None), "layers", []))
        return all(PlainLayer.fits(layer, hidden_act) for layer in layers) and is_plain_model(model, layers)

    def logits(self, ids: torch.Tensor, attention: TritonAttention, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        logits: torch.Tensor = self._head(self._states(*self._stream(ids, attention), rows))
        return logits

    def logits_and_states(
        self, ids: torch.Tensor, attention: TritonAttention, rows: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BuiltModel.logits_and_states`."""
        x, delta = self._stream(ids, attention)
        return self._head(self._states(x, delta, rows)), self._states(x, delta, pooled)

    def _states(self, x: torch.Tensor, delta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        last = x.index_select(0, rows), delta.index_select(0, rows)
        return add_rms_norm(*last, self._norm.weight, self._norm.eps)

    def _stream(self, ids: torch.Tensor, attention: TritonAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after all layers, and what the last one adds to it."""
        x: torch.Tensor = self._embed(ids)
        angles = self._cosine.index_select(0, attention.positions), self._sine.index_select(0, attention.positions)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            delta = layer.step(x, delta, angles, attention)
        assert delta is not None
        return x, delta
