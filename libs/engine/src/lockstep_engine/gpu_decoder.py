"""A whole model of the plain Llama shape in ten kernels a layer, for GPUs: norms with the residual, rotary positions
with the cache's store, and gates are one kernel each, and what stands between them is products and attention.

It uses the parameters of the Hugging Face model it is made from; the unmodified model is its oracle.
"""

from typing import Any

import torch
from torch import nn

from lockstep_engine.attention_triton import Rotation, TritonAttention
from lockstep_engine.fused_layer import FusedDecoder, FusedLayer
from lockstep_engine.kernels.triton_gate import silu_mul
from lockstep_engine.kernels.triton_norm import add_rms_norm
from lockstep_engine.linear import FusedRmsNorm


class GpuLayer(FusedLayer):
    """A layer; see `FusedLayer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        attention: Any = layer.self_attn
        q_norm: FusedRmsNorm | None = getattr(attention, "q_norm", None)
        self._heads = int(self._qkv.widths[0] // attention.head_dim)
        self._eps = 0.0 if q_norm is None else q_norm.eps
        self._norm_weights = None if q_norm is None else (q_norm.weight, attention.k_norm.weight)

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
        first, second = self._norms
        rotation = Rotation(*angles, self._norm_weights, self._eps, self._heads)
        qkv = self._qkv.forward(add_rms_norm(x, delta, first.weight, first.eps))
        attended = paged.attend_merged(self._layer, qkv, rotation, scale=self._scale, window=self._window)
        normed = add_rms_norm(x, self._out.forward(attended), second.weight, second.eps)
        return self._down.forward(silu_mul(self._gate_up.forward(normed)))


class GpuDecoder:
    """A model for which `fits` holds, called without its modules.

    Args:
        model: with its weights loaded.
        context_length: positions that will be asked for.
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
        return all(FusedLayer.fits(layer, hidden_act) for layer in layers) and FusedDecoder.fits(model, layers)

    def logits(self, ids: torch.Tensor, attention: TritonAttention, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        x = self._embed(ids)
        angles = self._cosine.index_select(0, attention.positions), self._sine.index_select(0, attention.positions)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            delta = layer.step(x, delta, angles, attention)
        assert delta is not None
        last = add_rms_norm(x.index_select(0, rows), delta.index_select(0, rows), self._norm.weight, self._norm.eps)
        logits: torch.Tensor = self._head(last)
        return logits
