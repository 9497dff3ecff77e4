"""Tensor-parallel layers that replace those of a Hugging Face model.

Column-parallel layers keep some of the output features; row-parallel ones keep some of the input features and sum over
ranks (Shoeybi et al. 2019, Megatron-LM). Every layer lists the slices of checkpoint tensors that its parameters hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from lockstep_engine import rowwise
from lockstep_engine.distributed import Collectives
from lockstep_engine.gpu_codes import CodedWeight
from lockstep_engine.kernels import cpu
from lockstep_engine.quantized.coded import IN_WORD, CodeForm
from lockstep_engine.virtual_shards import add_in_tree


@dataclass(frozen=True)
class Piece:
    """A slice of a checkpoint tensor, and its place in the parameter."""

    source: str
    """Name in the checkpoint."""
    dim: int
    """Sliced dimension, of source and parameter alike (the source has one dimension less when `index` is set)."""
    start: int
    length: int
    offset: int
    """Start of the slice in the parameter, along `dim`."""
    index: int | None = None
    """Row of the parameter's first dimension that this source fills (experts stored one by one)."""
    full_size: int | None = None
    """Size of the source along `dim`, where it is known."""
    transposed: bool = False
    """The source is the transpose of the parameter; `dim` is the parameter's dimension."""


@dataclass(frozen=True)
class HeadShard:
    """A rank's heads: number of the first, their count, and the count of all ranks together."""

    first: int
    count: int
    total: int

    def rows(self, width: int, offset: int = 0) -> tuple[int, int]:
        """(start, length) of these heads where each has `width` rows and head 0 begins at `offset`."""
        return offset + self.first * width, self.count * width


class ColumnLinear(nn.Module):
    """Several linears with the same input as one product; each keeps its rank's part of the output features.

    Args:
        sources: checkpoint prefixes, e.g. ("…q_proj", "…k_proj", "…v_proj"); one may come more than once.
        shards: for each source (start, length) of the rows that this rank keeps.
        in_features: number of input features.
        bias: whether the linears have a bias.
        full_sizes: for each source the number of its rows on all ranks, where it is known.
        transposed: the weights are stored as [in, out].
    """

    def __init__(
        self,
        sources: Sequence[str],
        shards: Sequence[tuple[int, int]],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        full_sizes: Sequence[int] | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.widths = [length for _, length in shards]
        self.in_features = in_features
        total = sum(self.widths)
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype), requires_grad=False) if bias else None
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        self.offsets: nn.Parameter | None = None
        self.code_form: CodeForm | None = None
        self.codes_on_gpu = False
        self.packed: cpu.PackedLinear | CodedWeight | None = None
        self.pieces: dict[str, list[Piece]] = {}
        for name in ("weight", "bias") if bias else ("weight",):
            is_transposed = transposed and name == "weight"
            offset = 0
            pieces = []
            sizes: Sequence[int | None] = full_sizes or [None] * len(sources)
            for source, (start, length), full_size in zip(sources, shards, sizes, strict=True):
                pieces.append(
                    Piece(f"{source}.{name}", 0, start, length, offset, full_size=full_size, transposed=is_transposed)
                )
                offset += length
            self.pieces[name] = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, sum of widths]."""
        return self.packed(x) if self.packed else functional.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """After loading: lay the weight out for the fastest product on this device."""
        self.packed = _pack_codes(self, self.bias) if self.code_form else _pack(self.weight, self.bias)


def _pack(weight: nn.Parameter, bias: torch.Tensor | None, parts: int = 1) -> cpu.PackedLinear | None:
    """The weight in the CPU kernel's layout, which replaces the parameter's memory; None where the kernel cannot
    run.
    """
    if not cpu.available(weight):
        return None
    packed = cpu.PackedLinear(weight, bias, parts=parts)
    weight.data = weight.data.new_empty(0)
    return packed


def keep_codes(layer: "ColumnLinear | RowLinear | VocabHead", form: CodeForm, *, on_gpu: bool = False) -> None:
    """Before the layer's memory is allocated: let its weight be codes, and give it `scales` [out, groups] and, where
    the form has them, `offsets`, otherwise `zeros` where codes have four bits. Only kernels compute with them.

    Args:
        layer: whose weight is still [out, in].
        form: of its codes.
        on_gpu: the kernels are the GPU's: codes of four bits are words [out, in / 8] from the beginning, as memory that
            is allocated there is taken.
    """
    out, inside = layer.weight.shape
    if on_gpu and form.table is not None:
        layer.weight.data = layer.weight.data.new_empty(out, inside // IN_WORD, dtype=torch.int32)
    else:
        layer.weight.data = layer.weight.data.to(torch.int8 if form.table is None else torch.uint8)
    layer.codes_on_gpu = on_gpu
    scales = torch.empty(out, form.groups(inside), dtype=torch.float32, device=layer.weight.device)
    layer.scales = nn.Parameter(scales, requires_grad=False)
    if form.offsets:
        layer.offsets = nn.Parameter(torch.empty_like(scales), requires_grad=False)
    elif form.table is not None:
        layer.zeros = nn.Parameter(torch.empty_like(scales), requires_grad=False)
    layer.code_form = form


def _pack_codes(
    layer: "ColumnLinear | RowLinear | VocabHead", bias: torch.Tensor | None, parts: int = 1
) -> cpu.PackedLinear | CodedWeight:
    """As `_pack`, of a layer that keeps codes."""
    form, scales, inside = layer.code_form, layer.scales, layer.weight.shape[1]
    assert form is not None
    assert scales is not None
    weight: torch.Tensor = layer.weight.data
    if layer.codes_on_gpu:
        zeros, offsets = (None if each is None else each.data for each in (layer.zeros, layer.offsets))
        coded = CodedWeight(weight, scales.data, zeros, form, bias, offsets)
        for other in (scales, layer.zeros, layer.offsets):
            if other is not None:
                other.data = other.data.new_empty(0)
        return coded
    codes = cpu.Codes(scales, form.group or inside, per_127=form.per_127, integers=form.integers)
    if form.offsets:
        table = None if form.table is None else torch.tensor(form.table)
        codes = replace(codes, table=table, offsets=layer.offsets)
    elif form.table is not None:
        assert layer.zeros is not None
        table, zeros = torch.tensor(form.table), layer.zeros
        first, offsets = zeros[0, 0], -zeros * scales
        if bool((zeros == first).all()):  # symmetric: the table has it, and products need no offset
            codes = replace(codes, table=table - first)
        elif torch.equal(offsets.double(), -zeros.double() * scales.double()):
            codes = replace(codes, table=table, offsets=offsets)
        else:  # scales with more than 20 bits: an offset would be rounded, so that values had other bits
            weight = (weight - zeros.repeat_interleave(codes.group, 1)[:, :inside]).to(torch.int8)
    packed = cpu.PackedLinear(weight, bias, codes=codes, parts=parts)
    for parameter in (layer.weight, scales, layer.zeros, layer.offsets):
        if parameter is not None:
            parameter.data = parameter.data.new_empty(0)
    return packed


def multiplies_integers(model: nn.Module) -> bool:
    """Whether some products of a loaded model are those of integers (see `CodeForm`)."""
    layers = (each for each in model.modules() if isinstance(each, ColumnLinear | RowLinear | VocabHead))
    return any(each.code_form is not None and each.code_form.integers for each in layers)


class MergedPart(nn.Module):
    """One of the linears that a `ColumnLinear` has merged, under its old name in the model.

    The first part computes the product for all. The others return their slice of it, as long as they are called with
    the same input.
    """

    def __init__(self, merged: ColumnLinear, part: int) -> None:
        super().__init__()
        self.part = part
        self.out_features = merged.widths[part]
        self.in_features = merged.in_features
        self._shared: dict[str, object] = {}
        if part == 0:
            self.merged = merged

    @classmethod
    def split(cls, merged: ColumnLinear) -> list["MergedPart"]:
        """The parts of `merged`, in order; they share one box for input and results."""
        parts = [cls(merged, part) for part in range(len(merged.widths))]
        box: dict[str, object] = {"input": None, "results": None, "merged": merged}
        for part in parts:
            part._shared = box
        return parts

    @property
    def merged_linear(self) -> ColumnLinear:
        """The product that this is a part of."""
        merged = self._shared["merged"]
        assert isinstance(merged, ColumnLinear)
        return merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, width of this part] (a view of the merged product)."""
        box = self._shared
        if self.part == 0 or box["input"] is not x:
            box["input"] = x
            box["results"] = self.merged_linear(x).split(self.merged_linear.widths, dim=-1)
        results = box["results"]
        assert isinstance(results, tuple)
        if self.part == len(results) - 1:
            box["input"] = box["results"] = None  # keep no activation alive beyond the layer
        result: torch.Tensor = results[self.part]
        return result


class RowLinear(nn.Module):
    """A linear over this rank's part of the input features; the sum over ranks is the result.

    On the CPU sums stay in float32 until they are complete, and the bias is added before they are rounded.

    Args:
        source: checkpoint prefix.
        shard: (start, length) of the input features that this rank has; every rank has as many.
        out_features: number of output features.
        bias: whether the linear has a bias.
        transposed: the weight is stored as [in, out].
        parts: virtual shards that the rank has (see `virtual_shards`); on the CPU.
    """

    def __init__(
        self,
        source: str,
        shard: tuple[int, int],
        out_features: int,
        group: Collectives,
        *,
        bias: bool,
        dtype: torch.dtype,
        transposed: bool = False,
        parts: int = 1,
    ) -> None:
        super().__init__()
        start, length = shard
        self.group = group
        self.parts = parts
        self._part_weights: tuple[torch.Tensor, ...] = ()
        """Those of the parts, where the weight was laid out for torch."""
        self.in_features, self.out_features = length, out_features
        self.weight = nn.Parameter(torch.empty(out_features, length, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        self.offsets: nn.Parameter | None = None
        self.code_form: CodeForm | None = None
        self.codes_on_gpu = False
        self.packed: cpu.PackedLinear | CodedWeight | None = None
        full_size = length * group.size
        self.pieces = {
            "weight": [Piece(f"{source}.weight", 1, start, length, 0, full_size=full_size, transposed=transposed)]
        }
        if bias:
            self.pieces["bias"] = [Piece(f"{source}.bias", 0, 0, out_features, 0, full_size=out_features)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in / tp] → […, out]."""
        alone, packed = self.group.size == 1, self.packed
        if packed and alone:
            return packed(x)
        if isinstance(packed, CodedWeight):
            out = self.group.all_reduce(packed(x))
            return out if self.bias is None else out + self.bias
        if not x.is_cpu or (alone and self.parts == 1):  # torch rounds a 16-bit product once if it adds the bias itself
            out = functional.linear(x, self.weight, self.bias if alone else None)
            out = self.group.all_reduce(out)
            return out if alone or self.bias is None else out + self.bias
        return self.complete(packed.wide(x) if packed else self._product(x)).to(x.dtype)

    def complete(self, own: torch.Tensor) -> torch.Tensor:
        """The result from the sum over this rank's input features, both [..., out] in float32; on the CPU."""
        out = self.group.all_reduce(own)
        return out if self.bias is None else out + self.bias.float()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over this rank's input features without the kernels, in float32."""
        if self.parts == 1:
            return functional.linear(x, self.weight).float()
        weights = self._part_weights or self.weight.chunk(self.parts, 1)
        inputs = x.chunk(self.parts, -1)
        return add_in_tree([functional.linear(*each).float() for each in zip(inputs, weights, strict=True)])

    def pack(self) -> None:
        """After loading: lay the weight out for the fastest product on this device."""
        bias = self.bias if self.group.size == 1 else None
        self.packed = _pack_codes(self, bias, self.parts) if self.code_form else _pack(self.weight, bias, self.parts)
        if self.packed is None and self.weight.is_cpu and self.parts > 1:
            self._part_weights = tuple(each.contiguous() for each in self.weight.chunk(self.parts, 1))
            self.weight.data = self.weight.data.new_empty(0)


class HeadExpansion(nn.Module):
    """The projection from a latent to the keys and values of this rank's heads (DeepSeek-V2's MLA), in absorbed form.

    A score q · (U c) is (Uᵀ q) · c, and a weighted sum of values V c is V times the weighted sum of c. Therefore
    `absorb` multiplies queries by Uᵀ, `expand` multiplies sums by V, and attention works on the latents c.

    Args:
        source: checkpoint prefix of the weight [all heads * (key width + value width), latent width].
        shard: this rank's heads.
        widths: widths of a head's key and of its value.
        latent: width of the latent.
    """

    def __init__(self, source: str, shard: HeadShard, widths: tuple[int, int], latent: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.widths, self.latent = shard.count, widths, latent
        each = sum(widths)
        start, rows = shard.rows(each)
        self.weight = nn.Parameter(torch.empty(rows, latent, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, rows, 0, full_size=shard.total * each)]}

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries for keys [heads, tokens, key width] → queries for latents [heads, tokens, latent width]."""
        return torch.bmm(queries, self._matrices()[:, : self.widths[0]])

    def expand(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of latents [heads, tokens, latent width] → sums of values [heads, tokens, value width]."""
        return torch.bmm(sums, self._matrices()[:, self.widths[0] :].transpose(1, 2))

    def _matrices(self) -> torch.Tensor:
        return self.weight.view(self.heads, sum(self.widths), self.latent)


class VocabEmbedding(nn.Module):
    """Rows of the embedding for this rank's part of the vocabulary; rows beyond it (padding) are never read.

    Args:
        scale: factor of the result (Gemma's is the root of the width), in the embedding's dtype.
    """

    def __init__(
        self, source: str, vocab_size: int, width: int, group: Collectives, dtype: torch.dtype, scale: float | None
    ) -> None:
        super().__init__()
        self.group = group
        self.scale = scale
        self._dtype = dtype
        self.start, self.rows, kept = vocab_shard(vocab_size, group)
        self.weight = nn.Parameter(torch.zeros(self.rows, width, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, self.start, kept, 0, full_size=vocab_size)]}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[…] token ids → […, width]."""
        rows = self._rows(ids)
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self._read(ids)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        rows = self._read(local.masked_fill(elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), -0.0))  # changes no bit of a sum

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows of the table, which may be kept in 16 bits."""
        return functional.embedding(rows, self.weight).to(self._dtype)


class VocabHead(nn.Module):
    """Logits of this rank's part of the vocabulary: [rows, hidden] → [rows, vocab / tp, rounded up]."""

    def __init__(
        self, source: str, vocab_size: int, width: int, group: Collectives, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        start, rows, kept = vocab_shard(vocab_size, group)
        self.in_features = width
        self.weight = nn.Parameter(torch.zeros(rows, width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype), requires_grad=False) if bias else None
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        self.offsets: nn.Parameter | None = None
        self.code_form: CodeForm | None = None
        self.codes_on_gpu = False
        self.tied = False
        self.packed: cpu.PackedLinear | CodedWeight | None = None
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, kept, 0, full_size=vocab_size)]}
        if bias:
            self.pieces["bias"] = [Piece(f"{source}.bias", 0, start, kept, 0, full_size=vocab_size)]

    def tie(self, embedding: VocabEmbedding) -> None:
        """Before loading: share the embedding's weight."""
        self.weight, self.tied = embedding.weight, True

    def untie(self) -> None:
        """Before loading: have a weight of its own after all."""
        self.weight, self.tied = nn.Parameter(torch.zeros_like(self.weight), requires_grad=False), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → […, rows]."""
        return self.packed(x) if self.packed else functional.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """After loading: lay the weight out for the fastest product on this device. A tied embedding keeps its
        layout.
        """
        if self.code_form:
            self.packed = _pack_codes(self, self.bias)
        elif self.tied and cpu.available(self.weight):
            self.packed = cpu.PackedLinear(self.weight, self.bias)
        elif not self.tied:
            self.packed = _pack(self.weight, self.bias)


def vocab_shard(vocab_size: int, group: Collectives) -> tuple[int, int, int]:
    """This rank's part of the vocabulary: (first id, rows with padding, rows that exist in the checkpoint)."""
    rows = -(-vocab_size // group.size)
    start = min(group.rank * rows, vocab_size)
    return start, rows, min(rows, vocab_size - start)


class SummedExperts(nn.Module):
    """A mixture's experts, each narrowed to a part of its inner width; the sum over parts and ranks is the result.

    Args:
        parts: the experts, narrowed to each of this rank's virtual shards (see `virtual_shards`).
        group: the ranks.
    """

    def __init__(self, parts: Sequence[nn.Module], group: Collectives) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.group = group

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Takes and returns what the model's own experts do. On the CPU sums stay in float32 until they are
        complete.
        """
        outs: list[torch.Tensor] = [part(*args) for part in self.parts]
        dtype = outs[0].dtype
        if outs[0].is_cpu:
            outs = [out.float() for out in outs]
        return self.group.all_reduce(outs[0] if len(outs) == 1 else add_in_tree(outs)).to(dtype)


class FusedRmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) in one operation. A weight that stays in float32 in a model of 16
    bits is not rounded: the product is, once.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, width] → […, width]."""
        if cpu.available(x):
            return rowwise.rms_norm(x, self.weight, self.eps)
        wide = x.float() if self.weight.dtype is torch.float32 else x
        return functional.rms_norm(wide, self._shape, self.weight, self.eps).to(x.dtype)


class SplitRmsNorm(nn.Module):
    """A norm over all heads, of which each rank has a part: the sum of squares is taken over ranks.

    Args:
        source: checkpoint prefix.
        shard: (start, length) of this rank's elements.
        full_width: number of elements on all ranks.
        copies: number of ranks that have the same elements.
        parts: virtual shards that the rank has (see `virtual_shards`).
    """

    def __init__(
        self,
        source: str,
        shard: tuple[int, int],
        full_width: int,
        copies: int,
        eps: float,
        group: Collectives,
        dtype: torch.dtype,
        parts: int = 1,
    ) -> None:
        super().__init__()
        start, length = shard
        self._parts = parts
        self.weight = nn.Parameter(torch.empty(length, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, length, 0, full_size=full_width)]}
        self.group = group
        self.eps = eps
        self._mean_factor = 1 / (full_width * copies)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, width / tp] → […, width / tp]."""
        wide = x.float()
        sums = [part.sum(-1, keepdim=True) for part in wide.square().chunk(self._parts, -1)]
        mean = self.group.all_reduce(sums[0] if len(sums) == 1 else add_in_tree(sums)) * self._mean_factor
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype)
