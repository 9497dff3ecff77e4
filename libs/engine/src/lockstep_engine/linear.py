"""Tensor-parallel layers that take the place of a Hugging Face model's own.

Column-parallel layers keep some of the output features, row-parallel ones some of the input features and add up over
ranks (Shoeybi et al. 2019, Megatron-LM). Every layer knows which part of which checkpoint tensor each of its
parameters is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from lockstep_engine.distributed import Collectives
from lockstep_engine.kernels import cpu

TORCH_GRAIN = 16384
"""Elements that torch leaves to one thread."""
_TORCH_VECTORS = 32
"""Elements that its loops take at once: two of the widest vectors."""


@dataclass(frozen=True)
class Piece:
    """A slice of a checkpoint tensor, and where in the parameter it goes."""

    source: str
    """Name in the checkpoint."""
    dim: int
    """Sliced dimension, of source and parameter alike (the source has one dimension less when `index` is set)."""
    start: int
    length: int
    offset: int
    """Where the slice begins in the parameter, along `dim`."""
    index: int | None = None
    """Row of the parameter's first dimension that this source fills (experts stored one by one)."""
    whole: int | None = None
    """Size of the source along `dim`, where it is known."""
    transposed: bool = False
    """The source has its two dimensions the other way round; `dim` is the parameter's."""


@dataclass(frozen=True)
class HeadShard:
    """A rank's heads: which is the first, how many, of how many."""

    first: int
    count: int
    whole: int

    def rows(self, width: int, offset: int = 0) -> tuple[int, int]:
        """(start, length) of these heads where each has `width` rows and head 0 begins at `offset`."""
        return offset + self.first * width, self.count * width


class ColumnLinear(nn.Module):
    """Several linears with the same input as one product; each keeps its rank's part of the output features.

    Args:
        sources: checkpoint prefixes, e.g. ("…q_proj", "…k_proj", "…v_proj"); one may come more than once.
        shards: for each source (start, length) of the rows kept here.
        in_features: of all of them.
        bias: they have one.
        wholes: for each source all its rows, where they are known.
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
        wholes: Sequence[int] | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.widths = [length for _, length in shards]
        self.in_features = in_features
        total = sum(self.widths)
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype), requires_grad=False) if bias else None
        self.packed: cpu.PackedLinear | None = None
        self.pieces: dict[str, list[Piece]] = {}
        for name in ("weight", "bias") if bias else ("weight",):
            turned = transposed and name == "weight"
            offset = 0
            pieces = []
            sizes: Sequence[int | None] = wholes or [None] * len(sources)
            for source, (start, length), whole in zip(sources, shards, sizes, strict=True):
                pieces.append(Piece(f"{source}.{name}", 0, start, length, offset, whole=whole, transposed=turned))
                offset += length
            self.pieces[name] = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, sum of widths]."""
        return self.packed(x) if self.packed else functional.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """After loading: lay the weight out as the device multiplies fastest."""
        self.packed = _pack(self.weight, self.bias)


def _pack(weight: nn.Parameter, bias: torch.Tensor | None) -> cpu.PackedLinear | None:
    """The weight as the CPU kernel wants it, instead of the parameter's own memory; None where it cannot run."""
    if not cpu.available(weight):
        return None
    packed = cpu.PackedLinear(weight, bias)
    weight.data = weight.data.new_empty(0)
    return packed


class MergedPart(nn.Module):
    """One of the linears that a `ColumnLinear` has merged, under its old name in the model.

    The first part computes the product for all; the others pick up theirs, as long as they are called with the same
    input.
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
    def whole(self) -> ColumnLinear:
        """The product that this is a part of."""
        merged = self._shared["merged"]
        assert isinstance(merged, ColumnLinear)
        return merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, width of this part] (a view of the merged product)."""
        box = self._shared
        if self.part == 0 or box["input"] is not x:
            box["input"] = x
            box["results"] = self.whole(x).split(self.whole.widths, dim=-1)
        results = box["results"]
        assert isinstance(results, tuple)
        if self.part == len(results) - 1:
            box["input"] = box["results"] = None  # keep no activation alive beyond the layer
        result: torch.Tensor = results[self.part]
        return result


class RowLinear(nn.Module):
    """A linear over this rank's part of the input features; the sum over ranks is the result."""

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
    ) -> None:
        super().__init__()
        start, length = shard
        self.group = group
        self.in_features, self.out_features = length, out_features
        self.weight = nn.Parameter(torch.empty(out_features, length, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.packed: cpu.PackedLinear | None = None
        self.pieces = {"weight": [Piece(f"{source}.weight", 1, start, length, 0, transposed=transposed)]}
        if bias:
            self.pieces["bias"] = [Piece(f"{source}.bias", 0, 0, out_features, 0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in / tp] → […, out]."""
        if self.group.size == 1:
            return self.packed(x) if self.packed else functional.linear(x, self.weight, self.bias)
        out = self.group.all_reduce(self.packed(x) if self.packed else functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

    def pack(self) -> None:
        """After loading: lay the weight out as the device multiplies fastest."""
        self.packed = _pack(self.weight, self.bias if self.group.size == 1 else None)


class OneNumberGate(nn.Module):
    """A linear with one output, for an activation that rounds each number alike.

    Numbers that lie apart torch computes one by one. Of numbers that lie side by side it takes whole vectors, and what
    is left at the end is rounded otherwise.
    """

    def __init__(self, linear: ColumnLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, 1], not contiguous."""
        number: torch.Tensor = self.linear(x)
        return number.expand(*number.shape[:-1], 2).contiguous()[..., :1]


class WholeVectors(nn.Module):
    """An activation that rounds an element alike wherever it stands among others.

    On the CPU torch gives each thread a part of the elements and takes these in whole vectors; what is left at the end
    of a part is computed by other code. Here nothing is left.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…] → […]."""
        if x.is_cpu:
            count, threads = x.numel(), torch.get_num_threads()
            whole = _whole_vectors(count, threads)
            by_rows = (threads == 1 or count <= TORCH_GRAIN) and x.shape[-1] % _TORCH_VECTORS == 0
            if not (whole == count if x.is_contiguous() else by_rows):
                flat = functional.pad(x.reshape(-1), (0, whole - count))
                return self.activation(flat)[:count].view(x.shape)  # type: ignore[no-any-return]
        return self.activation(x)  # type: ignore[no-any-return]


@cache
def _whole_vectors(count: int, threads: int) -> int:
    """The least number of elements, not below `count`, of which every thread gets whole vectors, whether all threads
    share them or as many as torch takes for this number.
    """
    while True:
        shares = 1 if count <= TORCH_GRAIN else math.lcm(threads, min(threads, -(-count // (2 * TORCH_GRAIN))))
        rounded = count + -count % (_TORCH_VECTORS * shares)
        if rounded == count:
            return count
        count = rounded


class HeadExpansion(nn.Module):
    """A latent's way to the keys and values of this rank's heads, and the way back (DeepSeek-V2's MLA).

    A score q · (U c) is (Uᵀ q) · c, and a weighted sum of values V c is V times the weighted sum of c: with queries
    turned and sums expanded, attention needs the latents c alone.

    Args:
        source: checkpoint prefix of the weight [all heads * (key width + value width), latent width].
        shard: this rank's heads.
        widths: of a head's key and value.
    """

    def __init__(self, source: str, shard: HeadShard, widths: tuple[int, int], latent: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.widths, self.latent = shard.count, widths, latent
        each = sum(widths)
        start, rows = shard.rows(each)
        self.weight = nn.Parameter(torch.empty(rows, latent, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, rows, 0, whole=shard.whole * each)]}

    def turn(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [heads, tokens, key width] → for latents [heads, tokens, latent width]."""
        return _product(queries, self._matrices()[:, : self.widths[0]])

    def expand(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of latents [heads, tokens, latent width] → sums of values [heads, tokens, value width]."""
        return _product(sums, self._matrices()[:, self.widths[0] :].transpose(1, 2))

    def _matrices(self) -> torch.Tensor:
        return self.weight.view(self.heads, sum(self.widths), self.latent)


def _product(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Batched; never of a single row, which libraries round otherwise."""
    if x.shape[1] > 1:
        return torch.bmm(x, matrices)
    return torch.bmm(x.expand(-1, 2, -1), matrices)[:, :1]


class VocabEmbedding(nn.Module):
    """Rows of the embedding for this rank's part of the vocabulary; rows beyond it (padding) are never read.

    Args:
        scale: of the result (Gemma's is the root of the width), in the embedding's dtype.
    """

    def __init__(
        self, source: str, vocab_size: int, width: int, group: Collectives, dtype: torch.dtype, scale: float | None
    ) -> None:
        super().__init__()
        self.group = group
        self.scale = scale
        self.start, self.rows, kept = vocab_shard(vocab_size, group)
        self.weight = nn.Parameter(torch.zeros(self.rows, width, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, self.start, kept, 0, whole=vocab_size)]}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[…] token ids → […, width]."""
        rows = self._rows(ids)
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return functional.embedding(ids, self.weight)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabHead(nn.Module):
    """Logits of this rank's part of the vocabulary: [rows, hidden] → [rows, vocab / tp, rounded up]."""

    def __init__(
        self, source: str, vocab_size: int, width: int, group: Collectives, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        start, rows, kept = vocab_shard(vocab_size, group)
        self.weight = nn.Parameter(torch.zeros(rows, width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype), requires_grad=False) if bias else None
        self.tied = False
        self.packed: cpu.PackedLinear | None = None
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, kept, 0, whole=vocab_size)]}
        if bias:
            self.pieces["bias"] = [Piece(f"{source}.bias", 0, start, kept, 0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → […, rows]."""
        return self.packed(x) if self.packed else functional.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """After loading: lay the weight out as the device multiplies fastest. A tied embedding keeps its own."""
        if self.tied and cpu.available(self.weight):
            self.packed = cpu.PackedLinear(self.weight, self.bias)
        elif not self.tied:
            self.packed = _pack(self.weight, self.bias)


def vocab_shard(vocab_size: int, group: Collectives) -> tuple[int, int, int]:
    """This rank's part of the vocabulary: (first id, rows with padding, rows that exist in the checkpoint)."""
    rows = -(-vocab_size // group.size)
    start = min(group.rank * rows, vocab_size)
    return start, rows, min(rows, vocab_size - start)


class SummedExperts(nn.Module):
    """A mixture's experts, each narrowed to this rank's part of its inner width; the sum over ranks is the result."""

    def __init__(self, experts: nn.Module, group: Collectives) -> None:
        super().__init__()
        self.experts = experts
        self.group = group

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Whatever the model's own experts take and give."""
        out: torch.Tensor = self.experts(*args)
        return self.group.all_reduce(out)


class FusedRmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) in one operation."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, width] → […, width]."""
        if cpu.available(x):
            return cpu.add_rms_norm(x.contiguous(), None, self.weight, self.eps)
        return functional.rms_norm(x, self._shape, self.weight, self.eps)


class SplitRmsNorm(nn.Module):
    """A norm over all heads at once, of which each rank has its own: the sum of squares goes over ranks.

    Args:
        source: checkpoint prefix.
        shard: (start, length) of this rank's elements.
        whole: elements in all.
        copies: ranks that have the same elements.
    """

    def __init__(
        self,
        source: str,
        shard: tuple[int, int],
        whole: int,
        copies: int,
        eps: float,
        group: Collectives,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        start, length = shard
        self.weight = nn.Parameter(torch.empty(length, dtype=dtype), requires_grad=False)
        self.pieces = {"weight": [Piece(f"{source}.weight", 0, start, length, 0, whole=whole)]}
        self.group = group
        self.eps = eps
        self._share = 1 / (whole * copies)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, width / tp] → […, width / tp]."""
        wide = x.float()
        mean = self.group.all_reduce(wide.square().sum(-1, keepdim=True)) * self._share
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype)
