"""Tensor-parallel layers that take the place of a Hugging Face model's own.

Column-parallel layers keep some of the output features, row-parallel ones some of the input features and add up over
ranks (Shoeybi et al. 2019, Megatron-LM). Every layer knows which part of which checkpoint tensor each of its
parameters is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from lockstep_engine.distributed import Collectives
from lockstep_engine.kernels import cpu


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


class ColumnLinear(nn.Module):
    """Several linears with the same input as one product; each keeps its rank's part of the output features.

    Args:
        sources: checkpoint prefixes, e.g. ("…q_proj", "…k_proj", "…v_proj").
        shards: for each source (start, length) of the rows kept here.
        in_features: of all of them.
        bias: they have one.
    """

    def __init__(
        self,
        sources: Sequence[str],
        shards: Sequence[tuple[int, int]],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
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
            offset = 0
            pieces = []
            for source, (start, length) in zip(sources, shards, strict=True):
                pieces.append(Piece(f"{source}.{name}", 0, start, length, offset))
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
    ) -> None:
        super().__init__()
        start, length = shard
        self.group = group
        self.in_features, self.out_features = length, out_features
        self.weight = nn.Parameter(torch.empty(out_features, length, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.packed: cpu.PackedLinear | None = None
        self.pieces = {"weight": [Piece(f"{source}.weight", 1, start, length, 0)]}
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


class GatheredLinear(nn.Module):
    """A column-parallel linear whose parts are put together again, for models that need all features at once."""

    def __init__(self, column: ColumnLinear, group: Collectives) -> None:
        super().__init__()
        self.column = column
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        return self.group.all_gather(self.column(x))


class SplitInputLinear(nn.Module):
    """A row-parallel linear whose input is whole on every rank: each takes its part of it."""

    def __init__(self, row: RowLinear, start: int) -> None:
        super().__init__()
        self.row = row
        self.start = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        return self.row(x.narrow(-1, self.start, self.row.in_features))  # type: ignore[no-any-return]


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
