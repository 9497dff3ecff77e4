"""The architectures that are served, and what each needs beyond the information in `transformers`. Data only, read
without torch.

A style says how a module or parameter is split over ranks. `transformers`' own tensor-parallel plans use the first
three; the others are Lockstep's.

- colwise: some of the output features; undivided heads of a q, k or v projection, key/value heads repeated if need be
- rowwise: some of the input features; results are added up
- packed_colwise, moe_tp_experts: a mixture's stacked experts, see `splitting.Splitter`
- packed: [gate | up], each part colwise
- packed_qkv: [queries | keys | values], each by heads
- interleaved_qkv: for each key/value head [its queries | key | value]
- heads, kv_heads: one entry (or module of a list) for each head
- head_norm, kv_head_norm: a norm over all heads at once, whose sum of squares goes over ranks
- latent: the projection from a latent (DeepSeek's MLA) to each head's keys and values
- split_1, split_2: a parameter, evenly along dimension 1 or 2
- first_rank: a parameter that is added once, so that it is zero on the other ranks
- replicated: every rank has all of it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

USUAL_SPLIT_PLAN: Mapping[str, str] = {
    **{f"*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "*.self_attn.o_proj": "rowwise",
    **{f"*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "*.mlp.down_proj": "rowwise",
    "*.mlp.experts": "moe_tp_experts",
    "*.mlp.experts.gate_up_proj": "packed_colwise",
    "*.mlp.experts.down_proj": "rowwise",
}
"""Used for modules that an architecture's own split plan does not name; `transformers`' plan comes last."""

_PACKED_MLP = {"*.mlp.gate_up_proj": "packed"}
_HEAD_NORMS = {"*.self_attn.q_norm": "head_norm", "*.self_attn.k_norm": "kv_head_norm"}
_GPT = {
    "*.attn.c_attn": "packed_qkv",
    "*.attn.c_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
_FUSED_QKV = {
    "*.query_key_value": "interleaved_qkv",
    "*.self_attention.dense": "rowwise",
    "*.attention.dense": "rowwise",
    "*.self_attn.dense": "rowwise",
    "*.dense_h_to_4h": "colwise",
    "*.dense_4h_to_h": "rowwise",
}
_LATENT = {
    "*.self_attn.q_b_proj": "colwise",
    "*.self_attn.q_a_proj": "replicated",
    "*.self_attn.kv_a_proj_with_mqa": "replicated",
    "*.self_attn.kv_b_proj": "latent",
}
_BLOCK_SPARSE = (".mlp.", ".block_sparse_moe.")


@dataclass(frozen=True)
class Architecture:
    """What an architecture needs beyond the information in `transformers`."""

    split_plan: Mapping[str, str] = field(default_factory=dict)
    """Glob of names of modules and parameters → style."""
    attention: Literal["interleaved", "latent"] | None = None
    """The replacement `forward` (see `own_attention`) of its attention modules; None: they keep their own."""
    reads_config: bool = False
    """Whether its attention modules read their number of heads from the configuration."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Part of a name in the model → its spelling in some checkpoints."""
    context_length: int | None = None
    """Context length if config.json names none."""
    window: Literal["module", "config"] | None = None
    """Which has the `sliding_window` of an attention module that gives it to its mask alone: the module or its
    configuration. None: modules give theirs to the attention function."""
    windowed: Literal["all", "chosen", "later"] | None = None
    """Which layers have the `sliding_window` of config.json, where `layer_types` does not say it: all; all if
    `use_sliding_window` is set; then those from `max_window_layers` on. None: not known, or none of them. What is not
    said here or in `turns` costs memory and nothing else."""
    turns: int | None = None
    """Layers with the `sliding_window` of config.json and layers without alternate: every so many-th has none, where
    `layer_types` and `sliding_window_pattern` do not say it; 0: these alone say it. None: not known, or they do not
    alternate."""
    is_limit_scaled: bool = False
    """Whether max_position_embeddings includes what rotary scaling adds to the context."""
    note: str = ""
    """Text for the table in docs/architectures.md."""


_PLAIN = Architecture()
_MLA = "caches one latent a token on every rank, on the CPU as keys and again as values; heads are split"
_WHOLE_NORM = Architecture(split_plan=_HEAD_NORMS, note="query and key norms over all heads: one more sum")
_GRANITE_SPELLINGS = (
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": _PLAIN,
    "bloom": Architecture(split_plan=_FUSED_QKV, attention="interleaved", context_length=2048, note="ALiBi"),
    "cohere": Architecture(split_plan={"*.q_norm.weight": "heads", "*.k_norm.weight": "kv_heads"}),
    "cohere2": Architecture(turns=4),
    "cwm": Architecture(turns=0),
    "deepseek_v2": Architecture(split_plan=_LATENT, attention="latent", note=_MLA),
    "deepseek_v3": Architecture(split_plan=_LATENT, attention="latent", note=_MLA),
    "dots1": _PLAIN,
    "ernie4_5": _PLAIN,
    "ernie4_5_moe": Architecture(spellings=((".gate.moe_statics.", ".moe_statics."),)),
    "exaone4": Architecture(turns=4),
    "exaone_moe": Architecture(spellings=((".mlp.gate.e_score", ".mlp.e_score"),), turns=4),
    "falcon": Architecture(
        split_plan=_FUSED_QKV, attention="interleaved", context_length=2048, note="old and new decoder, rotary or ALiBi"
    ),
    "flex_olmo": _WHOLE_NORM,
    "gemma": _PLAIN,
    "gemma2": Architecture(turns=2, note="soft caps, sliding window"),
    "gemma3_text": Architecture(turns=6, is_limit_scaled=True, note="sliding window"),
    "glm": Architecture(split_plan=_PACKED_MLP),
    "glm4": Architecture(split_plan=_PACKED_MLP),
    "glm4_moe": _PLAIN,
    "glm4_moe_lite": Architecture(split_plan=_LATENT, attention="latent", note=_MLA),
    "gpt2": Architecture(split_plan=_GPT, note="learned positions"),
    "gpt_bigcode": Architecture(split_plan={**_GPT, "*.attn.c_attn": "interleaved_qkv"}, note="learned positions"),
    "gpt_neox": Architecture(split_plan=_FUSED_QKV, spellings=(("lm_head.", "embed_out."),)),
    "gpt_oss": Architecture(
        split_plan={
            "*.self_attn.sinks": "heads",
            "*.mlp.experts.gate_up_proj": "split_2",
            "*.mlp.experts.gate_up_proj_bias": "split_1",
            "*.mlp.experts.down_proj": "split_1",
            "*.mlp.experts.down_proj_bias": "first_rank",
        },
        turns=2,
        note="attention sinks, sliding window; experts in MXFP4 too",
    ),
    "granite": _PLAIN,
    "granitemoe": Architecture(spellings=_GRANITE_SPELLINGS),
    "granitemoeshared": Architecture(
        split_plan={
            "*.shared_mlp.input_linear": "packed",
            "*.shared_mlp.output_linear": "rowwise",
        },
        spellings=_GRANITE_SPELLINGS,
    ),
    "helium": _PLAIN,
    "hunyuan_v1_dense": _PLAIN,
    "hunyuan_v1_moe": Architecture(
        split_plan={
            "*.mlp.shared_mlp.gate_proj": "colwise",
            "*.mlp.shared_mlp.up_proj": "colwise",
            "*.mlp.shared_mlp.down_proj": "rowwise",
        }
    ),
    "hyperclovax": _PLAIN,
    "jais2": _PLAIN,
    "llama": _PLAIN,
    "mellum": Architecture(turns=0),
    "minimax_m2": Architecture(split_plan=_HEAD_NORMS, spellings=(_BLOCK_SPARSE,)),
    "ministral": Architecture(windowed="all"),
    "mistral": Architecture(windowed="all", note="sliding window"),
    "mixtral": Architecture(spellings=(_BLOCK_SPARSE,), windowed="all"),
    "nanochat": _PLAIN,
    "nemotron": _PLAIN,
    "olmo": _PLAIN,
    "olmo2": _WHOLE_NORM,
    "olmo3": replace(_WHOLE_NORM, turns=4),
    "olmoe": _WHOLE_NORM,
    "opt": Architecture(
        split_plan={"*.self_attn.out_proj": "rowwise", "*.fc1": "colwise", "*.fc2": "rowwise"},
        note="learned positions, offset by two",
    ),
    "persimmon": Architecture(split_plan=_FUSED_QKV),
    "phi": _PLAIN,
    "phi3": Architecture(
        split_plan={"*.self_attn.qkv_proj": "packed_qkv", **_PACKED_MLP}, reads_config=True, windowed="all"
    ),
    "phimoe": Architecture(
        spellings=((".mlp.router.", ".block_sparse_moe.gate."), _BLOCK_SPARSE), window="config", windowed="all"
    ),
    "qwen2": Architecture(windowed="later"),
    "qwen2_moe": Architecture(window="module"),
    "qwen3": Architecture(windowed="later"),
    "qwen3_moe": Architecture(windowed="chosen"),
    "seed_oss": _PLAIN,
    "smollm3": _PLAIN,
    "solar_open": _PLAIN,
    "stablelm": Architecture(
        split_plan={
            "*.self_attn.q_layernorm.norms": "heads",
            "*.self_attn.k_layernorm.norms": "kv_heads",
        }
    ),
    "starcoder2": Architecture(windowed="all", note="sliding window"),
    "vaultgemma": Architecture(turns=2),
    "youtu": Architecture(split_plan=_LATENT, attention="latent", note=_MLA),
}
"""The architectures by `model_type`. Each is tested against `transformers` (`tests/test_architectures.py`); others are
refused."""

_RECURRENT = "has layers that keep a recurrent state instead of keys and values"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5_text",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(("llama4", "llama4_text"), "attends in chunks"),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), "picks the keys that it attends to"),
}
"""By `model_type`: why an architecture is refused, where the reason is known."""
