"""The launches of a built model's kernels, so that they can be built before its weights are there."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep_engine.gpu_decoder import GpuDecoder
from lockstep_engine.kernels import launches
from lockstep_engine.kernels.launches import Call, ModelShape
from lockstep_engine.linear import ColumnLinear, RowLinear, VocabHead
from lockstep_engine.plain_layer import PlainLayer


def plain_calls(model: nn.Module, hidden_act: str, dtype: torch.dtype, *, exact: bool, compressed: bool) -> list[Call]:
    """The launches of a rank's part of a model of the plain shape; none for others, whose kernels are few.

    Args:
        model: after `build_model`, with its weights or on the meta device.
        hidden_act: its activation.
        dtype: of its activations.
        exact: for the exact mode.
        compressed: whether the cache has cold blocks.
    """
    if not GpuDecoder.fits(model, hidden_act):
        return []
    layers: Any = model.model.layers  # type: ignore[union-attr]
    config: Any = model.config
    parts = [PlainLayer.of(layer) for layer in layers]
    first, found = parts[0], list[Call]()
    for window in sorted({each.window is not None for each in parts}):
        shape = ModelShape(
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            hidden=first.norms[0].weight.shape[0],
            inner=first.down.weight.shape[1],
            dtype=dtype,
            vocabulary=config.get_text_config().vocab_size,
            rotated=first.head_dim,
            head_norms=first.head_norms is not None,
            window=window,
            compressed=compressed,
        )
        found += launches.exact_calls(shape, _products(model)) if exact else launches.calls(shape)
    if not exact:
        found.insert(0, Call("product", (dtype,)))  # not a kernel of ours: cuBLAS takes 0.2 s for its first product
    return list(dict.fromkeys(found))


def _products(model: nn.Module) -> Iterator[tuple[int, int, bool]]:
    """Inputs, outputs and whether there is a bias, of each linear layer."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | VocabHead):
            outs, ins = module.weight.shape
            yield ins, outs, module.bias is not None
