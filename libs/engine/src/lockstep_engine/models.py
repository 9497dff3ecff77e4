"""One model source for all architectures: Hugging Face's modelling code, built without weights, with our
tensor-parallel layers in place of its linears and one attention function.

Its own tensor parallelism and batching are not used. In the tests the unmodified model is the reference.
"""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from lockstep_engine import gpu_codes
from lockstep_engine.architectures import ARCHITECTURES, USUAL_SPLIT_PLAN
from lockstep_engine.attention import StepAttention
from lockstep_engine.chunk_graphs import ChunkInputs
from lockstep_engine.distributed import Collectives
from lockstep_engine.fused_layer import FusedDecoder, fuse_layers
from lockstep_engine.graphs import DecodeInputs
from lockstep_engine.interception import intercepted
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import SETTLED_ROPE, ModelInfo, refuse
from lockstep_engine.own_attention import CurrentStep, prepare_attention
from lockstep_engine.plain_layer import is_plain_model, plain_windows
from lockstep_engine.scoring import Scoring
from lockstep_engine.splitting import Splitter

_ATTENTION = "lockstep_paged"
_CACHED_LAYERS = frozenset({"full_attention", "sliding_attention"})


class Decoder(Protocol):
    """Computes a model without calling its modules; it takes one kind of attention."""

    def logits(self, ids: torch.Tensor, attention: Any, rows: torch.Tensor) -> torch.Tensor:
        """See `BuiltModel.logits`."""
        ...

    def logits_and_states(
        self, ids: torch.Tensor, attention: Any, rows: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BuiltModel.logits_and_states`."""
        ...


@dataclass
class BuiltModel:
    """A model and the geometry of its KV cache."""

    module: nn.Module
    layers: int
    kv_heads: int
    """Key/value heads on this rank."""
    first_kv_head: int
    """The first of them, among those of the model."""
    total_kv_heads: int
    """Of the model."""
    head_dim: int
    latent: int
    """Components of a cached key that are the value, too (DeepSeek's MLA); 0: values are others."""
    vocab_size: int
    hidden_act: str
    step: CurrentStep
    exact: bool = True
    """Compute so that a row's bits depend on that row alone: on the CPU, and on a GPU where the kernels serve it."""
    on_gpu: bool = False
    """Computed with the GPU's kernels; set by `fuse_on_gpu`."""
    decoder: Decoder | None = None
    """Set by `fuse` and `fuse_on_gpu` when the model can be computed without calling its modules."""

    def fuse(self, context_length: int) -> None:
        """Replace layers by fused ones where these fit: on the CPU, in float32, when weights are loaded."""
        layers = fuse_layers(self.module, self.hidden_act)
        if is_plain_model(self.module, layers):
            self.decoder = FusedDecoder(self.module, layers, context_length)

    def fuse_on_gpu(self, context_length: int) -> bool:
        """Compute the model with the GPU's kernels from now on, if it has the plain shape: where these kernels run,
        when weights are loaded. Its steps then need `TritonAttention`.

        Returns:
            Whether the model has the plain shape.
        """
        from lockstep_engine.gpu_decoder import GpuDecoder  # noqa: PLC0415 - it builds on Triton
        from lockstep_engine.gpu_experts import group_experts  # noqa: PLC0415

        self.on_gpu = True
        group_experts(self.module)
        if GpuDecoder.fits(self.module, self.hidden_act):
            self.decoder = GpuDecoder(self.module, context_length)
        return self.decoder is not None

    def launch_products(self, dtype: torch.dtype, most_tokens: int) -> None:
        """Launch the kernels of a mixture, and those of weights that stay codes, in every form that steps of up to so
        many tokens have; other models have none. `dtype`: of the activations.
        """
        from lockstep_engine import gpu_experts  # noqa: PLC0415 - it builds on Triton

        gpu_experts.launch_all(self.module, most_tokens)
        gpu_codes.launch_all(self.module, dtype, most_tokens)

    def logits(self, ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor) -> torch.Tensor:
        """Run the step.

        Args:
            ids: [tokens], those of all sequences one after the other.
            attention: the step's attention.
            rows: [sampled], indices of the tokens whose logits are wanted.

        Returns:
            [sampled, this rank's part of the vocabulary].
        """
        if self.decoder is not None:
            with self._row_by_row() if self.on_gpu else nullcontext():
                return self.decoder.logits(ids, attention, rows)
        with self._row_by_row() if self.on_gpu or ids.is_cpu else nullcontext():
            return self._by_modules(ids, attention, rows)

    def logits_by_modules(self, ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor) -> torch.Tensor:
        """As `logits`, by the model's own code and torch, without the GPU's kernels: for a model on them."""
        from lockstep_engine.gpu_experts import experts_by_own_code  # noqa: PLC0415 - it builds on Triton

        alone = intercepted() if ids.is_cpu else nullcontext()
        with alone, experts_by_own_code(self.module), gpu_codes.codes_by_torch(self.module):
            return self._by_modules(ids, attention, rows)

    def _by_modules(self, ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor) -> torch.Tensor:
        self.step.begin(attention)
        out = self.module(
            input_ids=ids.unsqueeze(0),
            position_ids=attention.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
        if self.step.calls != self.layers:
            version = transformers.__version__
            raise refuse(f"{type(self.module).__name__} of transformers {version} has layers of which none is cached")
        logits: torch.Tensor = out.logits[0]
        return logits

    def logits_and_states(
        self, ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step, and return hidden states as well.

        Args:
            ids: as for `logits`.
            attention: as for `logits`.
            rows: as for `logits`.
            pooled: [pooled], indices of the tokens whose hidden states are wanted.

        Returns:
            The logits as `logits` returns them, and [pooled, hidden]: what the last norm gives to the head.
        """
        if self.decoder is not None:
            with self._row_by_row() if self.on_gpu else nullcontext():
                return self.decoder.logits_and_states(ids, attention, rows, pooled)
        states: list[torch.Tensor] = []
        inner: nn.Module = self.module.base_model  # type: ignore[assignment]
        hook = inner.register_forward_hook(lambda _module, _given, out: states.append(out[0][0, pooled]))
        try:
            logits = self.logits(ids, attention, rows)
        finally:
            hook.remove()
        return logits, states[0]

    def decode(self, cache: KvCache, inputs: DecodeInputs) -> torch.Tensor:
        """A decode step with the GPU's kernels, from tensors that stay in place, so that it can be recorded.

        Returns:
            [sequences, this rank's part of the vocabulary].
        """
        from lockstep_engine.attention_triton import DecodeAttention  # noqa: PLC0415 - it builds on Triton

        attention = DecodeAttention(cache, inputs.positions, inputs.tables, exact=self.exact)
        return self.logits(inputs.ids, attention, torch.arange(len(inputs.ids), device=inputs.ids.device))

    def mix(self, cache: KvCache, inputs: ChunkInputs) -> torch.Tensor:
        """As `decode`, for a step with chunks of prompts.

        Returns:
            [wanted rows, this rank's part of the vocabulary].
        """
        from lockstep_engine.attention_triton import ChunkAttention  # noqa: PLC0415 - it builds on Triton

        return self.logits(inputs.ids, ChunkAttention(cache, inputs, exact=self.exact), inputs.rows.long())

    def _row_by_row(self) -> AbstractContextManager[None]:
        """In the exact mode: a context in which no row's bits depend on other rows."""
        if not self.exact:
            return nullcontext()
        if not self.on_gpu:
            return intercepted()
        from lockstep_engine import gpu_rowwise  # noqa: PLC0415 - it builds on Triton

        return intercepted(gpu_rowwise)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the models call: [1, heads, tokens, dim] each → [1, tokens, heads, dim].

    Reads the step from the module, because some layers drop extra arguments.
    """
    assert attention_mask is None
    step: CurrentStep = module.current_step
    window = step.window_of(module) if sliding_window is None else sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, window, softcap, sinks=s_aux)
    out = step.take(module.layer_idx, window).attend(module.layer_idx, query[0], key[0], value[0], scoring)
    return out.unsqueeze(0), None


AttentionInterface.register(_ATTENTION, paged_attention)


def build_model(info: ModelInfo, group: Collectives, dtype: torch.dtype, *, shards: int = 1) -> BuiltModel:
    """The model of a checkpoint, on the meta device, narrowed to this rank.

    Args:
        info: the checkpoint.
        group: the ranks.
        dtype: that the model computes in.
        shards: most virtual shards of a sum over ranks (see `virtual_shards`); 1: each rank's part is one. More than
            one is for the CPU.

    Raises:
        LockstepError: the architecture is not served, or cannot be split over the group; says why.
    """
    try:
        config = AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = "eager"  # some models choose their attention's class by it
        config._experts_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _keep_float32(model, dtype)
    except (ValueError, KeyError, AttributeError, TypeError, OSError, ImportError) as error:
        raise refuse(f"model {info.path}: {info.architecture} cannot be built: {_first_line(error)}") from None
    model.eval().requires_grad_(requires_grad=False)
    model.config._attn_implementation = _ATTENTION
    text = model.config.get_text_config()
    other_layers = set(getattr(text, "layer_types", None) or ()) - _CACHED_LAYERS
    if other_layers or getattr(text, "attention_chunk_size", None):
        kinds = ", ".join(sorted(other_layers)) or "chunked_attention"
        raise refuse(f"model {info.path}: {info.architecture} has layers of {kinds}, which are not supported")
    architecture = ARCHITECTURES[info.model_type]
    split_plans = (architecture.split_plan, USUAL_SPLIT_PLAN, model.tp_plan or {})
    splitter = Splitter(info, group, dtype, text, split_plans, reads_config=architecture.reads_config, shards=shards)
    splitter.split(model)
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and SETTLED_ROPE.intersection(rope_type.values()):
            kinds = ", ".join(sorted(set(rope_type.values())))
            raise refuse(f"model {info.path}: rotary positions of the kinds {kinds} in one model are not supported")
        if rope_type in tuple(SETTLED_ROPE):
            _settle_frequencies(module, info.context_length)
        if rope_type is not None:
            _settle_magnitude(module, info.context_length)
    widest = {}
    if info.windowed is not None:
        widest = dict.fromkeys(info.windowed.numbers, info.windowed.window.tokens)
    elif info.window is not None:
        widest = dict.fromkeys(range(int(text.num_hidden_layers)), info.window.tokens)
    step = CurrentStep(window=architecture.window, widest=widest)
    prepare_attention(model, step, architecture.attention, splitter.heads, info.context_length, dtype)
    for layer, window in plain_windows(model).items():  # whole models of such layers are computed without `step`
        step.check_window(layer, window)
    return BuiltModel(
        module=model,
        layers=int(text.num_hidden_layers),
        kv_heads=splitter.kv_heads.count,
        first_kv_head=splitter.kv_heads.first,
        total_kv_heads=splitter.kv_heads.total,
        head_dim=splitter.cached_dim,
        latent=splitter.latent,
        vocab_size=info.vocab_size,
        hidden_act=str(getattr(text, "hidden_act", "")),
        step=step,
    )


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Have in float32 what the model's class names for this dtype: `from_pretrained` does so, `from_config` does not. A
    router's correction bias decides between experts whose scores differ by less than 16 bits hold.
    """
    globs = [each.replace("*", ".*") for each in model._get_dtype_plan(dtype)]
    for name, stored in model.state_dict(keep_vars=True).items():
        if any(re.search(each, name) for each in globs):
            stored.data = stored.data.float()


def _settle_frequencies(rotary: Any, context_length: int) -> None:
    """Fix the frequencies of rotary positions that have others for longer sequences: always use those for the longest
    sequence that is served.

    `transformers` decides by the longest sequence of the batch, but a request's result must not depend on the batch.
    """
    forward = rotary.forward

    def first(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        forward(x, torch.full_like(position_ids[:, :1], context_length - 1))
        rotary.rope_type, rotary.forward = "settled", forward
        return forward(x, position_ids)

    rotary.forward = first


def _settle_magnitude(rotary: Any, context_length: int) -> None:
    """Fix the factor of cosines and sines that is another for longer sequences (PhiMoE), for the same reason."""
    rope = rotary.config.rope_parameters
    if "long_mscale" in rope:
        is_long = context_length > rope["original_max_position_embeddings"]
        rope["short_mscale"] = rope["long_mscale"] = rope["long_mscale" if is_long else "short_mscale"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
