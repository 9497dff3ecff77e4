"""Decoder layers of the plain Llama shape in one call of the CPU kernels, because calls take most of a small step's
time: one call for a whole model, or two a layer where ranks add up their parts of a sum.

A fused layer replaces a Hugging Face layer and uses that layer's parameters. It computes the same; the tests compare it
with the unmodified model.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep_engine.attention_cpu import CompiledAttention
from lockstep_engine.interception import intercepted
from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.cpu_structs import PlainEndsCall, PlainLayerCall, PlainStepCall, RopeCall
from lockstep_engine.linear import ColumnLinear, FusedRmsNorm, RowLinear, VocabEmbedding, VocabHead
from lockstep_engine.own_attention import CurrentStep
from lockstep_engine.plain_layer import PlainLayer

_ALIGNED = 16
"""Floats of a cache line. Each buffer begins at a multiple of it."""
_SMALL = 16
"""Most rows of a step whose buffers are kept, and most numbers of rows for which they are."""


class FusedLayers:
    """Plain layers that follow one another.

    Args:
        layers: with packed weights, at least one; the parameters stay where they are.
    """

    def __init__(self, layers: Sequence[PlainLayer]) -> None:
        self._layers = layers
        self._products = [[_packed(each) for each in (of.qkv, of.out, of.gate_up, of.down)] for of in layers]
        self._rotations = [_rotation(each) for each in layers]
        calls = map(_call, layers, self._products, self._rotations)
        self._calls = (PlainLayerCall * len(layers))(*calls)
        every = [each for products in self._products for each in products]
        self._parts = [each for each in every if each.call.parts > 1]
        self._widest_in = max(each.call.inputs for each in every)
        self._widest_out = max(each.out_features for each in every)
        self._is_alone = layers[0].out.group.size == 1
        self._small: dict[tuple[int, int, int], _Buffers] = {}
        """Of small steps of a whole model, by their numbers of rows, wanted rows and threads: steps that decode often
        have the same."""

    def step(
        self,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        positions: torch.Tensor,
        paged: CompiledAttention,
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            x: [tokens, hidden], the residual stream, changed in place: contiguous, float32.
            cosine, sine: [positions, head dim], contiguous, float32.
            positions: [tokens], int64: the row of `cosine` and `sine` for each token.
            paged: the step's attention.

        Returns:
            [tokens, hidden], what the last layer adds to x.
        """
        rows, hidden = x.shape
        halves, threads = 2 * len(self._layers), torch.get_num_threads()
        buffers = self._buffers(rows, hidden, threads, None)
        room, step = buffers.room, buffers.call
        step.x, step.cosine, step.sine = x.data_ptr(), cosine.data_ptr(), sine.data_ptr()
        step.positions = positions.data_ptr()
        paged.give_to(step)
        result = room[: rows * hidden].view(rows, hidden)
        if self._is_alone:
            cpu.plain(self._calls, 0, halves, step, threads)
            return result
        for half in range(halves):
            cpu.plain(self._calls, half, half + 1, step, threads)
            layer = self._layers[half // 2]
            delta = (layer.down if half % 2 else layer.out).complete(result)
            step.delta = delta.data_ptr()
        return delta

    def run_model(
        self, model: "PlainEnds", ids: torch.Tensor, paged: CompiledAttention, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run a model, from ids to logits, in one call; on one rank.

        Args:
            model: what it has around the layers.
            ids: [tokens], int64, contiguous.
            paged: the step's attention.
            wanted: [count], int64, contiguous: indices of the tokens whose logits are wanted.

        Returns:
            [count, vocabulary].
        """
        rows, count, threads = len(ids), len(wanted), torch.get_num_threads()
        key = (rows, count, threads)
        buffers = self._small.get(key) or self._buffers(rows, model.hidden, threads, count)
        if max(rows, count) <= _SMALL:
            if len(self._small) >= _SMALL:
                self._small.clear()
            self._small[key] = buffers
        step, (x, last) = buffers.call, buffers.ends
        step.x, step.cosine, step.sine = x, model.cosine.data_ptr(), model.sine.data_ptr()
        if buffers.paged is not paged:  # steps that decode often have the same
            step.positions = paged.positions.data_ptr()
            paged.give_to(step)
            buffers.paged = paged
        logits = torch.empty(count, model.head.out_features)
        ends = model.call
        ends.ids, ends.wanted, ends.count = ids.data_ptr(), wanted.data_ptr(), count
        ends.last, ends.logits = last, logits.data_ptr()
        cpu.plain(self._calls, 0, 2 * len(self._layers), step, threads, ends)
        return logits

    def _buffers(self, rows: int, hidden: int, threads: int, count: int | None) -> "_Buffers":
        """Those of a step; `count`: wanted rows of a whole model, None: it is no whole model."""
        sums = max((each.sums_size(rows) for each in self._parts), default=0)
        tiled = max(rows, count or 0)
        sizes = [rows * width for width in (hidden, hidden, self._widest_out, self._widest_in)]
        sizes += [max(tiled * self._widest_in, threads * cpu.OWN_TILES), threads * sums]
        if count is not None:
            sizes += [rows * hidden, count * hidden]
        sizes = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        room = torch.empty(sum(sizes))
        places = list(itertools.accumulate(sizes[:-1], lambda at, size: at + 4 * size, initial=room.data_ptr()))
        call = PlainStepCall(None, *places[:6], rows=rows, hidden=hidden, sums_size=sums)
        return _Buffers(room, call, places[6:])


@dataclass
class _Buffers:
    """What a step computes in."""

    room: torch.Tensor
    """The memory of all buffers; the result is the first."""
    call: PlainStepCall
    """With their places."""
    ends: list[int]
    """Places of a whole model's residual stream and of its last rows."""
    paged: CompiledAttention | None = None
    """The attention that the call has. It is kept as long as its memory may be used."""


class PlainEnds:
    """What a model of plain layers has around them.

    Args:
        embedding: not scaled.
        norm: the last one.
        head: packed.
        cosine, sine: [positions, head dim], contiguous, float32.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        norm: FusedRmsNorm,
        head: cpu.PackedLinear,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> None:
        self.hidden = embedding.shape[1]
        self.head, self.cosine, self.sine = head, cosine, sine
        self._kept = embedding, norm
        self.call = PlainEndsCall(
            embedding=embedding.data_ptr(),
            norm=norm.weight.data_ptr(),
            head=ctypes.addressof(head.call),
            kind=cpu.kind(embedding.dtype),
            eps=norm.eps,
        )


def _packed(linear: ColumnLinear | RowLinear) -> cpu.PackedLinear:
    assert isinstance(linear.packed, cpu.PackedLinear)
    return linear.packed


def _rotation(layer: PlainLayer) -> RopeCall:
    q_norm, k_norm = layer.head_norms or (None, None)
    return RopeCall(
        q_norm=None if q_norm is None else q_norm.weight.data_ptr(),
        k_norm=None if k_norm is None else k_norm.weight.data_ptr(),
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        dim=layer.head_dim,
        eps=0.0 if q_norm is None else q_norm.eps,
    )


def _call(layer: PlainLayer, products: Sequence[cpu.PackedLinear], rotation: RopeCall) -> PlainLayerCall:
    first, second = layer.norms
    return PlainLayerCall(
        *(ctypes.addressof(each.call) for each in products),
        rotation=ctypes.addressof(rotation),
        first_norm=first.weight.data_ptr(),
        second_norm=second.weight.data_ptr(),
        number=layer.number,
        window=layer.window or 0,
        first_eps=first.eps,
        second_eps=second.eps,
        scale=layer.scale,
    )


class FusedLayer(nn.Module):
    """A plain layer on the CPU (see `PlainLayer`), alone in a model that has others, too.

    Args:
        layer: a layer for which `PlainLayer.fits` holds; its parameters stay where they are.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        attention: Any = layer.self_attn
        self._step: CurrentStep = attention.current_step
        self.parts = PlainLayer.of(layer)
        self._layers = FusedLayers([self.parts])

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden], changed in place; cosines and sines [1, tokens, head dim]."""
        paged = self._step.take(self.parts.number, self.parts.window)
        assert isinstance(paged, CompiledAttention)
        cosine, sine = position_embeddings
        own = torch.arange(hidden_states.shape[1])
        hidden_states[0].add_(self._layers.step(hidden_states[0], cosine[0], sine[0], own, paged))
        return hidden_states


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
        self._layers = FusedLayers([layer.parts for layer in layers])
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        self._embed: nn.Module = embedding
        self._head: nn.Module = head
        self._norm: FusedRmsNorm = model.model.norm  # type: ignore[assignment]
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        positions = torch.arange(context_length).unsqueeze(0)
        with torch.inference_mode(), intercepted():  # equal tables on every CPU
            cosine, sine = rotary(torch.empty(1, context_length, 1), positions)
        self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()
        self._ends: PlainEnds | None = None
        if (
            isinstance(embedding, VocabEmbedding)
            and embedding.group.size == 1
            and embedding.scale is None
            and isinstance(head, VocabHead)
            and isinstance(head.packed, cpu.PackedLinear)
        ):
            self._ends = PlainEnds(embedding.weight, self._norm, head.packed, self._cosine, self._sine)

    def logits(self, ids: torch.Tensor, attention: CompiledAttention, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        if self._ends is not None:
            return self._layers.run_model(self._ends, ids, attention, rows)
        logits: torch.Tensor = self._head(self._states(*self._stream(ids, attention), rows))
        return logits

    def logits_and_states(
        self, ids: torch.Tensor, attention: CompiledAttention, rows: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BuiltModel.logits_and_states`."""
        stream = self._stream(ids, attention)
        return self._head(self._states(*stream, rows)), self._states(*stream, pooled)

    def _states(self, x: torch.Tensor, delta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        last = x.index_select(0, rows), delta.index_select(0, rows)
        return cpu.add_rms_norm(*last, self._norm.weight, self._norm.eps)

    def _stream(self, ids: torch.Tensor, attention: CompiledAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream before the last layer's sum, and that sum."""
        x: torch.Tensor = self._embed(ids)
        return x, self._layers.step(x, self._cosine, self._sine, attention.positions, attention)
