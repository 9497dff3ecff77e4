"""Replaces a model's layers by tensor-parallel ones, after its split plan (`architectures` lists the styles)."""

import copy
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lockstep_common.errors import LockstepError
from torch import nn
from transformers.pytorch_utils import Conv1D

from lockstep_engine.distributed import Collectives
from lockstep_engine.linear import (
    ColumnLinear,
    FusedRmsNorm,
    HeadExpansion,
    HeadShard,
    MergedPart,
    Piece,
    RowLinear,
    SplitRmsNorm,
    SummedExperts,
    VocabEmbedding,
    VocabHead,
)
from lockstep_engine.model_config import ModelInfo, refuse
from lockstep_engine.virtual_shards import held_shards

_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PARAMETER_STYLES = frozenset({"heads", "kv_heads", "split_1", "split_2", "first_rank"})
_EXPERT_STYLES = {"packed_colwise": 1, "rowwise": 2}
"""Stacked experts [experts, 2 * inner, hidden] and [experts, hidden, inner]: the dimension that holds `inner`."""
_REPLICATED_STYLES = frozenset({"replicated", "replicated_with_grad_allreduce"})
_COUNTS = ("num_heads", "num_attention_heads")
"""Attributes of attention modules that hold the number of heads."""
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads")
"""Attributes that hold the number of key/value heads."""
_WIDTHS = ("split_size", "embed_dim")
"""Attributes that hold the width of all heads together."""


class Splitter:
    """Walks a model and narrows it to a rank.

    Args:
        config: the text model's configuration.
        split_plans: globs of names → styles; the first that matches a name decides.
        reads_config: whether attention modules read their number of heads from the configuration.
        shards: most virtual shards of a sum over ranks (see `virtual_shards`).
    """

    def __init__(
        self,
        info: ModelInfo,
        group: Collectives,
        dtype: torch.dtype,
        config: Any,
        split_plans: Sequence[Mapping[str, str]],
        *,
        reads_config: bool = False,
        shards: int = 1,
    ) -> None:
        self._info = info
        self._group = group
        self._dtype = dtype
        self._split_plans = split_plans
        self._reads_config = reads_config
        self._shards = shards
        self._sums = group.size > 1 or shards > 1
        """Whether anything is a sum of several parts."""
        heads = int(config.num_attention_heads)
        self.cached_dim, self.latent = _cached_dim(config), _latent(config)
        first, count = self._even(heads, "the model", "attention heads")
        self.heads = HeadShard(first, count, heads)
        self.kv_heads = self._kv_shard(count_kv_heads(config))

    def split(self, model: nn.Module) -> None:
        """Replace all modules that hold weights; merge linears where names match; fuse plain norms."""
        self._replace_vocab(model)
        for name, module in list(model.named_modules()):
            for names in _MERGED:
                if all(self._is_column(name, module, child) for child in names):
                    self._merge(name, module, names)
            if self._has_heads(name, module):
                self._narrow_counts(module)
            for child, layer in list(module.named_children()):
                self._replace(module, child, layer, f"{name}.{child}" if name else child)
            self._split_parameters(name, module)

    def _style(self, name: str) -> str | None:
        for split_plan in self._split_plans:
            for glob, style in split_plan.items():
                if fnmatch.fnmatchcase(name, glob):
                    return style
        return None

    def _refusal(self, sentence: str) -> LockstepError:
        return refuse(f"model {self._info.path}: {sentence}")

    def _even(self, features: int, name: str, what: str = "features", part: int = 0, parts: int = 1) -> tuple[int, int]:
        """(start, length) of this rank's features, or of one of equal parts of them."""
        size = self._group.size
        if features % size:
            raise self._refusal(f"the {features} {what} of {name} cannot be split over tp = {size} ranks")
        length = features // size // parts
        return (self._group.rank * parts + part) * length, length

    def _kv_shard(self, heads: int) -> HeadShard:
        """This rank's key/value heads. They are repeated if there are fewer than ranks."""
        size = self._group.size
        if heads < size and size % heads == 0:
            return HeadShard(self._group.rank * heads // size, 1, heads)
        if heads % size:
            raise self._refusal(f"{heads} key/value heads can be neither split nor repeated over tp = {size} ranks")
        return HeadShard(self._group.rank * (heads // size), heads // size, heads)

    def _has_heads(self, name: str, module: nn.Module) -> bool:
        return any(
            self._style(f"{name}.{child}") in ("packed_qkv", "interleaved_qkv")
            or (child == "q_proj" and self._style(f"{name}.{child}") == "colwise")
            for child, _ in module.named_children()
        )

    def _narrow_counts(self, module: Any) -> None:
        """Set the number of heads in an attention module to that of this rank."""
        for names, shard in ((_COUNTS, self.heads), (_KV_COUNTS, self.kv_heads)):
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, shard.count)
        for name in _WIDTHS:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // self._group.size)
        if self._reads_config:
            module.config = copy.copy(module.config)
            module.config.num_attention_heads = self.heads.count

    # --- linears -----------------------------------------------------------------------------------------------------

    def _replace(self, parent: nn.Module, child: str, layer: nn.Module, name: str) -> None:
        style = self._style(name)
        if style == "latent":
            assert isinstance(layer, nn.Linear)
            setattr(parent, child, self._expansion(parent, name, layer))
        elif (form := _Form.of(layer)) is not None:
            setattr(parent, child, self._linear(parent, name, form, style or "replicated"))
        elif style == "moe_tp_experts" and self._sums:
            setattr(parent, child, SummedExperts(self._expert_parts(layer, name), self._group))
        elif style in ("heads", "kv_heads") and isinstance(layer, nn.ModuleList):
            setattr(parent, child, self._kept_modules(layer, name, style))
        elif style in ("head_norm", "kv_head_norm") and self._sums:
            setattr(parent, child, self._head_norm(layer, name, style))
        elif type(layer).__name__.endswith("RMSNorm") and _is_plain_rms_norm(type(layer)):
            assert isinstance(layer.weight, nn.Parameter)
            eps = layer.variance_epsilon
            assert isinstance(eps, float)
            setattr(parent, child, FusedRmsNorm(layer.weight, eps))

    def _linear(self, parent: nn.Module, name: str, form: "_Form", style: str) -> nn.Module:
        if style == "rowwise":
            shard = self._even(form.inside, name)
            return RowLinear(
                name,
                shard,
                form.out,
                self._group,
                bias=form.bias,
                dtype=form.dtype,
                transposed=form.transposed,
                parts=self._held_shards(form.inside),
            )
        if style == "colwise":
            shards = [self._column_shard(parent, name, form.out)]
        elif style == "packed":
            start, length = self._even(form.out // 2, name)
            shards = [(start, length), (form.out // 2 + start, length)]
        elif style == "packed_qkv":
            shards = self._packed_heads(form.out)
        elif style == "interleaved_qkv":
            shards = self._interleaved_heads(form.out)
        elif style in _REPLICATED_STYLES:
            shards = [(0, form.out)]
        else:
            raise self._refusal(f"{name} cannot be split in the style {style}")
        return ColumnLinear(
            [name] * len(shards),
            shards,
            form.inside,
            bias=form.bias,
            dtype=form.dtype,
            full_sizes=[form.out] * len(shards),
            transposed=form.transposed,
        )

    def _packed_heads(self, rows: int) -> list[tuple[int, int]]:
        """This rank's rows of [queries | keys | values]."""
        heads, kv_heads = self.heads.total, self.kv_heads.total
        width = rows // (heads + 2 * kv_heads)
        return [
            self.heads.rows(width),
            self.kv_heads.rows(width, heads * width),
            self.kv_heads.rows(width, (heads + kv_heads) * width),
        ]

    def _interleaved_heads(self, rows: int) -> list[tuple[int, int]]:
        """This rank's rows of [its queries | key | value] for each key/value head. Ranks that share the queries of a
        head have its key and value each.
        """
        each = self.heads.total // self.kv_heads.total
        width = rows // (self.heads.total + 2 * self.kv_heads.total)
        block = (each + 2) * width
        if self.kv_heads.total >= self._group.size:
            return [self.kv_heads.rows(block)]
        start = self.kv_heads.first * block
        before = self.heads.first - self.kv_heads.first * each
        return [(start + before * width, self.heads.count * width), (start + each * width, 2 * width)]

    def _is_column(self, name: str, module: nn.Module, child: str) -> bool:
        return type(getattr(module, child, None)) is nn.Linear and self._style(f"{name}.{child}") == "colwise"

    def _merge(self, name: str, module: nn.Module, names: tuple[str, ...]) -> None:
        layers: list[nn.Linear] = [getattr(module, child) for child in names]
        sources = [f"{name}.{child}" for child in names]
        full_sizes = [layer.out_features for layer in layers]
        merged = ColumnLinear(
            sources,
            [self._column_shard(module, source, rows) for source, rows in zip(sources, full_sizes, strict=True)],
            layers[0].in_features,
            bias=layers[0].bias is not None,
            dtype=layers[0].weight.dtype,
            full_sizes=full_sizes,
        )
        for child, part in zip(names, MergedPart.split(merged), strict=True):
            setattr(module, child, part)

    def _column_shard(self, parent: nn.Module, name: str, rows: int) -> tuple[int, int]:
        """This rank's rows; a head is not divided."""
        head_dim = getattr(parent, "head_dim", None)
        child = name.rpartition(".")[2]
        if child not in ("q_proj", "k_proj", "v_proj") or not isinstance(head_dim, int):
            return self._even(rows, name)
        return (self.heads if child == "q_proj" else self.kv_heads).rows(head_dim)

    def _expansion(self, parent: Any, name: str, layer: nn.Linear) -> HeadExpansion:
        return HeadExpansion(
            name,
            self.heads,
            (int(parent.qk_nope_head_dim), int(parent.v_head_dim)),
            layer.in_features,
            layer.weight.dtype,
        )

    # --- everything else ---------------------------------------------------------------------------------------------

    def _held_shards(self, features: int) -> int:
        return held_shards(features, self._group.size, self._shards)

    def _expert_parts(self, experts: nn.Module, name: str) -> list[nn.Module]:
        """The experts, narrowed to each of this rank's virtual shards of their inner width."""
        split = 0
        for child, parameter in experts.named_parameters(recurse=False):
            style = self._style(f"{name}.{child}") or ""
            if style in _EXPERT_STYLES and parameter.dim() == 3:
                split = math.gcd(split, parameter.shape[_EXPERT_STYLES[style]] // (3 - _EXPERT_STYLES[style]))
            elif style in ("split_1", "split_2"):
                split = math.gcd(split, parameter.shape[int(style[-1])])
        parts = self._held_shards(split)
        narrowed = [self._narrow_experts(copy.deepcopy(experts), name, part, parts) for part in range(parts)]
        for part, each in enumerate(narrowed):
            self._split_parameters(name, each, part, parts)
        return narrowed

    def _narrow_experts(self, experts: nn.Module, name: str, part: int, parts: int) -> nn.Module:
        for parameter_name, parameter in list(experts.named_parameters(recurse=False)):
            style = self._style(f"{name}.{parameter_name}") or ""
            if style in _PARAMETER_STYLES:
                continue  # left to `_split_parameters`
            dim = _EXPERT_STYLES.get(style)
            if dim is None or parameter.dim() != 3:
                raise self._refusal(f"{name}.{parameter_name} has no way to be split over tp ranks")
            shape = list(parameter.shape)
            inner = shape[dim] // (3 - dim)
            shape[dim] = self._even(inner, f"{name}.{parameter_name}", part=part, parts=parts)[1] * (3 - dim)
            narrow = torch.empty(shape, dtype=parameter.dtype, device="meta")
            setattr(experts, parameter_name, nn.Parameter(narrow, requires_grad=False))
        experts.narrowed = (self._group.size * parts, self._group.rank * parts + part)  # type: ignore[assignment]
        return experts

    def _split_parameters(self, name: str, module: nn.Module, part: int = 0, parts: int = 1) -> None:
        """Narrow the parameters that belong to the module itself and that the split plan names, to one of equal parts
        of what this rank has.
        """
        styles = {
            child: style
            for child, _ in module.named_parameters(recurse=False)
            if (style := self._style(f"{name}.{child}")) in _PARAMETER_STYLES
        }
        if not styles:
            return
        pieces = {
            child: [Piece(f"{name}.{child}", 0, 0, parameter.shape[0], 0, full_size=parameter.shape[0])]
            for child, parameter in module.named_parameters(recurse=False)
        }
        for child, style in styles.items():
            parameter = getattr(module, child)
            dim, start, length = self._parameter_shard(f"{name}.{child}", style, parameter, part, parts)
            shape = list(parameter.shape)
            full_size, shape[dim] = shape[dim], length
            narrow = torch.empty(shape, dtype=parameter.dtype, device="meta")
            setattr(module, child, nn.Parameter(narrow, requires_grad=False))
            kept = 0 if style == "first_rank" and self._group.rank + part > 0 else length
            pieces[child] = [Piece(f"{name}.{child}", dim, start, kept, 0, full_size=full_size)]
        module.pieces = pieces  # type: ignore[assignment]

    def _parameter_shard(
        self, name: str, style: str, parameter: torch.Tensor, part: int, parts: int
    ) -> tuple[int, int, int]:
        if style in ("heads", "kv_heads"):
            return 0, *(self.heads if style == "heads" else self.kv_heads).rows(1)
        if style == "first_rank":
            return 0, 0, parameter.shape[0]
        dim = int(style[-1])
        return dim, *self._even(parameter.shape[dim], name, part=part, parts=parts)

    def _kept_modules(self, modules: nn.ModuleList, name: str, style: str) -> nn.ModuleList:
        shard = self.heads if style == "heads" else self.kv_heads
        kept = nn.ModuleList()
        for index in range(shard.first, shard.first + shard.count):
            module: Any = modules[index]
            module.pieces = {
                child: [Piece(f"{name}.{index}.{child}", 0, 0, parameter.shape[0], 0, full_size=parameter.shape[0])]
                for child, parameter in module.named_parameters(recurse=False)
            }
            kept.append(module)
        return kept

    def _head_norm(self, norm: Any, name: str, style: str) -> SplitRmsNorm:
        shard = self.heads if style == "head_norm" else self.kv_heads
        full_width = norm.weight.shape[0]
        return SplitRmsNorm(
            name,
            shard.rows(full_width // shard.total),
            full_width,
            shard.count * self._group.size // shard.total,
            norm.variance_epsilon,
            self._group,
            norm.weight.dtype,
            self._held_shards(shard.total),
        )

    def _replace_vocab(self, model: Any) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise self._refusal(f"{self._info.architecture} has no plain embedding and head")
        scale = getattr(embedding, "scalar_embed_scale", None)
        if type(embedding) is not nn.Embedding and not isinstance(scale, float):
            raise self._refusal(f"the embedding of {self._info.architecture} is not a plain table")
        source = names[id(embedding)]
        rows, width = embedding.weight.shape
        ours = VocabEmbedding(source, rows, width, self._group, self._dtype, scale)
        our_head = VocabHead(
            names[id(head)],
            head.out_features,
            head.in_features,
            self._group,
            self._dtype,
            bias=head.bias is not None,
        )
        if getattr(model.config, "tie_word_embeddings", False):
            our_head.tie(ours)
        model.set_input_embeddings(ours)
        model.set_output_embeddings(our_head)


@dataclass(frozen=True)
class _Form:
    """The shape of a linear layer, whichever class it has."""

    inside: int
    out: int
    bias: bool
    dtype: torch.dtype
    transposed: bool

    @staticmethod
    def of(layer: nn.Module) -> "_Form | None":
        """None if it is not a plain linear layer; a router, for instance, may have its own `forward`."""
        if isinstance(layer, Conv1D):
            return _Form(layer.nx, layer.nf, bias=True, dtype=layer.weight.dtype, transposed=True)
        if type(layer) is nn.Linear or type(layer).__name__ == "FalconLinear":
            assert isinstance(layer, nn.Linear)
            bias = layer.bias is not None
            return _Form(layer.in_features, layer.out_features, bias=bias, dtype=layer.weight.dtype, transposed=False)
        return None


def count_kv_heads(config: Any) -> int:
    """Number of key/value heads in a text configuration; 1 if the model caches a latent for all heads."""
    if _latent(config):
        return 1
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    for name in ("num_kv_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and hasattr(type(config), name):  # not just any field of config.json
            return count
    return int(config.num_attention_heads)


def _cached_dim(config: Any) -> int:
    """Number of components that are cached for a token and key/value head."""
    if latent := _latent(config):
        return latent + int(config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _latent(config: Any) -> int:
    """Width of the latent that is cached for all heads, before the rotary part; 0: heads have keys and values."""
    latent = getattr(config, "kv_lora_rank", None)
    return latent if isinstance(latent, int) else 0


_plain_norms: dict[type, bool] = {}


def _is_plain_rms_norm(cls: type[nn.Module]) -> bool:
    """Whether the class computes weight * x / rms(x). It is tried on numbers, because names do not show offsets and
    scales.
    """
    known = _plain_norms.get(cls)
    if known is None:
        try:
            norm = cls(8, eps=1e-5)
            with torch.no_grad():
                generator = torch.Generator().manual_seed(0)
                norm.weight.copy_(torch.randn(8, generator=generator))  # type: ignore[operator]
                x = torch.randn(3, 8, generator=generator)
                ours = torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5)  # type: ignore[arg-type]
                known = hasattr(norm, "variance_epsilon") and torch.allclose(norm(x), ours, atol=1e-6)
        except (TypeError, RuntimeError, AttributeError):
            known = False
        _plain_norms[cls] = known
    return known
