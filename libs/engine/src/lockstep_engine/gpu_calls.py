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
from lockstep_engine.quantized.coded import CodeForm


def plain_calls(
    model: nn.Module, hidden_act: str, dtype: torch.dtype, *, exact: bool, compressed: bool, hot_alone: bool = False
) -> list[Call]:
    """The launches of a rank's part of a model of the plain shape; none for others, whose kernels are few.

    Args:
        model: after `build_model`, and when it is known which weights stay codes, with its weights or without.
        hidden_act: its activation.
        dtype: of its activations.
        exact: for the exact mode.
        compressed: whether the cache has cold blocks.
        hot_alone: whether layers with a window have none.
    """
    if not GpuDecoder.fits(model, hidden_act):
        return []
    layers: Any = model.model.layers  # type: ignore[union-attr]
    config: Any = model.config
    parts = [PlainLayer.of(layer) for layer in layers]
    first, found = parts[0], list[Call]()
    products = list(_products(model))
    plain = [each[:3] for each in products if each[3] is None]
    coded = [(ins, outs, biased, form) for ins, outs, biased, form in products if form is not None]
    for window in sorted({each.window is not None for each in parts}):
        shape = ModelShape(
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            hidden=first.norms[0].weight.shape[0],
            inner=first.down.in_features,
            dtype=dtype,
            vocabulary=config.get_text_config().vocab_size,
            rotated=first.head_dim,
            head_norms=first.head_norms is not None,
            window=window,
            compressed=compressed and not (window and hot_alone),
        )
        found += launches.exact_calls(shape, plain) if exact else launches.calls(shape)
    found[:0] = launches.coded_calls(coded, dtype)
    if not exact:
        found.insert(0, Call("product", (dtype,)))  # not a kernel of ours: cuBLAS takes 0.2 s for its first product
    return list(dict.fromkeys(found))


def _products(model: nn.Module) -> Iterator[tuple[int, int, bool, CodeForm | None]]:
    """Inputs, outputs, whether there is a bias, and the form of codes that stay, of each linear layer."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | VocabHead):
            yield module.in_features, len(module.weight), module.bias is not None, module.code_form
