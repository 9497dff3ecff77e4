"""One model source for all architectures: Hugging Face's modelling code, built without weights, with our
tensor-parallel layers in place of its linears and one attention function.

Its own tensor parallelism and batching are not used; the unmodified model is the tests' oracle.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lockstep_common.errors import ErrorCode, LockstepError
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from lockstep_engine.attention import CompiledAttention, StepAttention
from lockstep_engine.distributed import Collectives
from lockstep_engine.fused_layer import FusedDecoder, fuse_layers
from lockstep_engine.linear import (
    ColumnLinear,
    FusedRmsNorm,
    GatheredLinear,
    MergedPart,
    Piece,
    RowLinear,
    SplitInputLinear,
    SummedExperts,
    VocabEmbedding,
    VocabHead,
)
from lockstep_engine.model_config import ModelInfo, refuse

_ATTENTION = "lockstep_paged"
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_REPLICATED_STYLES = frozenset({"replicated", "replicated_with_grad_allreduce"})
_KNOWN_STYLES = _REPLICATED_STYLES | {
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "moe_tp_experts",
    "embedding_rowwise",
}


@dataclass
class BuiltModel:
    """A model without weights, and what the cache must hold for it."""

    module: nn.Module
    layers: int
    kv_heads: int
    """On this rank."""
    head_dim: int
    vocab_size: int
    hidden_act: str
    decoder: FusedDecoder | None = None
    """Set by `fuse` when the whole model can go without its modules."""

    def fuse(self, context_length: int) -> int:
        """Put fused layers in place of what they can replace: on the CPU, in float32, when weights are loaded.

        Returns:
            How many layers were replaced.
        """
        layers = fuse_layers(self.module, self.hidden_act)
        if FusedDecoder.fits(self.module, layers):
            self.decoder = FusedDecoder(self.module, layers, context_length)
        return len(layers)

    def logits(self, ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor) -> torch.Tensor:
        """Run the step.

        Args:
            ids: [tokens], of all sequences one after the other.
            attention: the step's attention.
            rows: [sampled], the tokens whose logits are wanted.

        Returns:
            [sampled, this rank's part of the vocabulary].
        """
        if self.decoder is not None:
            assert isinstance(attention, CompiledAttention)
            return self.decoder.logits(ids, attention, rows)
        out = self.module(
            input_ids=ids.unsqueeze(0),
            position_ids=attention.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            paged=attention,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the models call: [1, heads, tokens, dim] each, to [1, tokens, heads, dim]."""
    assert attention_mask is None
    if s_aux is not None:
        raise LockstepError(ErrorCode.INVALID_REQUEST, "attention with sink logits is not supported", field="model")
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = paged.attend(
        layer,
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(_ATTENTION, paged_attention)


def build_model(info: ModelInfo, group: Collectives, dtype: torch.dtype) -> BuiltModel:
    """The model of a checkpoint, on the meta device, narrowed to this rank.

    Raises:
        LockstepError: the architecture has no tensor-parallel plan, or cannot be split over the group; says why.
    """
    try:
        config = AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = _ATTENTION
        config._experts_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, AttributeError, TypeError, OSError, ImportError) as error:
        raise refuse(f"model {info.path}: {info.architecture} cannot be built: {_first_line(error)}") from None
    model.eval().requires_grad_(requires_grad=False)
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not any(style in ("rowwise", "rowwise_split_input") for style in plan.values()):
        raise refuse(f"model {info.path}: {info.architecture} has no tensor-parallel plan in transformers")
    if getattr(config.get_text_config(), "attention_chunk_size", None):
        raise refuse(f"model {info.path}: {info.architecture} attends in chunks, which is not supported")
    unknown = sorted(set(plan.values()) - _KNOWN_STYLES)
    if unknown:
        raise refuse(
            f"model {info.path}: the tensor-parallel plan of {info.architecture} has unknown styles: {unknown}"
        )
    builder = _Builder(info, group, dtype, plan)
    builder.replace_layers(model)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return BuiltModel(
        module=model,
        layers=int(text.num_hidden_layers),
        kv_heads=max(1, kv_heads // group.size) if builder.splits_heads else kv_heads,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab_size=info.vocab_size,
        hidden_act=str(getattr(text, "hidden_act", "")),
    )


class _Builder:
    """Walks a model and puts our layers in place of its own."""

    def __init__(self, info: ModelInfo, group: Collectives, dtype: torch.dtype, plan: dict[str, str]) -> None:
        self._info = info
        self._group = group
        self._dtype = dtype
        self._plan = plan

    @property
    def splits_heads(self) -> bool:
        """Each rank has its own heads; otherwise the projections are gathered and every rank has all heads."""
        gathered = ("*.k_proj", "*.qkv_proj", "*.query_key_value")
        return not any(
            style == "colwise_gather_output" and any(fnmatch.fnmatchcase(name, glob) for glob in gathered)
            for name, style in self._plan.items()
        )

    def replace_layers(self, model: nn.Module) -> None:
        """Everything that holds weights by the plan; merged where names match; norms fused where they are plain."""
        self._replace_vocab(model)
        for name, module in list(model.named_modules()):
            for names in _MERGED:
                if all(self._is_column(name, module, child) for child in names):
                    self._merge(name, module, names)
            for child, layer in list(module.named_children()):
                self._replace(module, child, layer, f"{name}.{child}" if name else child)

    def _style(self, name: str) -> str | None:
        return next((style for glob, style in self._plan.items() if fnmatch.fnmatchcase(name, glob)), None)

    def _is_column(self, name: str, module: nn.Module, child: str) -> bool:
        layer = getattr(module, child, None)
        return isinstance(layer, nn.Linear) and self._style(f"{name}.{child}") == "colwise"

    def _replace(self, parent: nn.Module, child: str, layer: nn.Module, name: str) -> None:
        style = self._style(name)
        if isinstance(layer, nn.Linear):
            if style == "colwise":
                setattr(parent, child, self._column(parent, (name,), (layer,)))
            elif style == "colwise_gather_output":
                shard = self._even(layer.out_features, name)
                bias = layer.bias is not None
                column = ColumnLinear((name,), (shard,), layer.in_features, bias=bias, dtype=self._dtype)
                setattr(parent, child, GatheredLinear(column, self._group))
            elif style in ("rowwise", "rowwise_split_input"):
                shard = self._even(layer.in_features, name)
                bias = layer.bias is not None
                row = RowLinear(name, shard, layer.out_features, self._group, bias=bias, dtype=self._dtype)
                setattr(parent, child, row if style == "rowwise" else SplitInputLinear(row, shard[0]))
            else:  # every rank has all of it; ours all the same, for its kernel
                whole = (0, layer.out_features)
                bias = layer.bias is not None
                setattr(parent, child, ColumnLinear((name,), (whole,), layer.in_features, bias=bias, dtype=self._dtype))
        elif style == "moe_tp_experts" and self._group.size > 1:
            setattr(parent, child, SummedExperts(self._narrow_experts(layer, name), self._group))
        elif type(layer).__name__.endswith("RMSNorm") and _is_plain_rms_norm(type(layer)):
            assert isinstance(layer.weight, nn.Parameter)
            eps = layer.variance_epsilon
            assert isinstance(eps, float)
            setattr(parent, child, FusedRmsNorm(layer.weight, eps))

    def _merge(self, name: str, module: nn.Module, names: tuple[str, ...]) -> None:
        layers = tuple(getattr(module, child) for child in names)
        merged = self._column(module, tuple(f"{name}.{child}" for child in names), layers)
        for child, part in zip(names, MergedPart.split(merged), strict=True):
            setattr(module, child, part)

    def _column(self, parent: nn.Module, names: tuple[str, ...], layers: tuple[nn.Linear, ...]) -> ColumnLinear:
        shards = [self._column_shard(parent, name, layer) for name, layer in zip(names, layers, strict=True)]
        bias = layers[0].bias is not None
        column = ColumnLinear(names, shards, layers[0].in_features, bias=bias, dtype=self._dtype)
        for name, pieces in column.pieces.items():
            sizes = [layer.out_features for layer in layers]
            column.pieces[name] = [replace(each, whole=size) for each, size in zip(pieces, sizes, strict=True)]
        return column

    def _column_shard(self, parent: nn.Module, name: str, layer: nn.Linear) -> tuple[int, int]:
        """Heads stay whole; key/value heads are repeated when there are fewer than ranks."""
        head_dim = getattr(parent, "head_dim", None)
        child = name.rpartition(".")[2]
        if child not in ("q_proj", "k_proj", "v_proj") or not isinstance(head_dim, int):
            return self._even(layer.out_features, name)
        heads, size = layer.out_features // head_dim, self._group.size
        if child != "q_proj" and heads < size and size % heads == 0:
            return self._group.rank * heads // size * head_dim, head_dim
        start, length = self._even(heads, name, "heads")
        return start * head_dim, length * head_dim

    def _even(self, features: int, name: str, what: str = "features") -> tuple[int, int]:
        size = self._group.size
        if features % size:
            raise refuse(
                f"model {self._info.path}: the {features} {what} of {name} cannot be split over tp = {size} ranks"
            )
        return self._group.rank * (features // size), features // size

    def _narrow_experts(self, experts: nn.Module, name: str) -> nn.Module:
        """Stacked expert weights [experts, 2 * inner, hidden] and [experts, hidden, inner]: keep a part of `inner`."""
        for parameter_name, parameter in list(experts.named_parameters(recurse=False)):
            style = self._style(f"{name}.{parameter_name}")
            dim = {"packed_colwise": 1, "rowwise": 2}.get(style or "")
            if dim is None or parameter.dim() != 3:
                raise refuse(f"model {self._info.path}: {name}.{parameter_name} has no way to be split over tp ranks")
            shape = list(parameter.shape)
            shape[dim] = self._even(shape[dim] // (2 if dim == 1 else 1), f"{name}.{parameter_name}")[1] * (3 - dim)
            narrow = torch.empty(shape, dtype=self._dtype, device="meta")
            setattr(experts, parameter_name, nn.Parameter(narrow, requires_grad=False))
        return experts

    def _replace_vocab(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        head = model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise refuse(f"model {self._info.path}: {self._info.architecture} has no plain embedding and head")
        scale = getattr(embedding, "scalar_embed_scale", None)
        if type(embedding) is not nn.Embedding and not isinstance(scale, float):
            raise refuse(f"model {self._info.path}: the embedding of {self._info.architecture} is not a plain table")
        source = names[id(embedding)]
        rows, width = embedding.weight.shape
        ours = VocabEmbedding(source, rows, width, self._group, self._dtype, scale)
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        bias = head.bias is not None
        head_source = source if tied else names[id(head)]
        our_head = VocabHead(head_source, head.out_features, head.in_features, self._group, self._dtype, bias=bias)
        if tied:
            our_head.weight, our_head.tied = ours.weight, True
        model.set_input_embeddings(ours)  # type: ignore[operator]
        model.set_output_embeddings(our_head)  # type: ignore[operator]


def expert_pieces(name: str, parameter: torch.Tensor, size: int, rank: int) -> Iterator[tuple[str, list[Piece]]]:
    """Where a stacked expert parameter's parts are in checkpoints that store experts one by one.

    Yields:
        For each known spelling a glob-free name of its first source, and the pieces to read if that source exists.
    """
    prefix, _, kind = name.rpartition(".")
    count, rows, columns = parameter.shape
    for old_prefix, gate, up, down in (
        (prefix, "gate_proj", "up_proj", "down_proj"),
        (prefix.replace(".mlp.", ".block_sparse_moe."), "w1", "w3", "w2"),
    ):
        pieces: list[Piece] = []
        for expert in range(count):
            base = f"{old_prefix}.{expert}"
            if kind == "gate_up_proj":
                inner = rows // 2
                pieces.append(Piece(f"{base}.{gate}.weight", 0, rank * inner, inner, 0, expert))
                pieces.append(Piece(f"{base}.{up}.weight", 0, rank * inner, inner, inner, expert))
            elif kind == "down_proj":
                pieces.append(Piece(f"{base}.{down}.weight", 1, rank * columns, columns, 0, expert))
        if pieces:
            yield pieces[0].source, pieces
    if size == 1:
        yield name, [Piece(name, 0, 0, count, 0)]
    elif kind == "gate_up_proj":
        inner, full = rows // 2, rows // 2 * size
        yield name, [Piece(name, 1, rank * inner, inner, 0), Piece(name, 1, full + rank * inner, inner, inner)]
    elif kind == "down_proj":
        yield name, [Piece(name, 2, rank * columns, columns, 0)]


_plain_norms: dict[type, bool] = {}


def _is_plain_rms_norm(cls: type[nn.Module]) -> bool:
    """Whether the class computes weight * x / rms(x): tried out, since names say nothing of offsets and scales."""
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
