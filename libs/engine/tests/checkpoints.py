"""Tiny random checkpoints of every architecture, written to disk as their users would have them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 331  # not a multiple of any tp
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_SHAPE = {
    **_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_DEEP = {**_GROUPED, "num_hidden_layers": 3}
_OLD = {**_TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_EIGHT_HEADS = {"num_attention_heads": 8, "intermediate_size": 128}

_TO_4 = (1, 2, 4)
_TO_8 = (1, 2, 4, 8)

_HEADS = {"head_dim": 16}
_WINDOW = {"head_dim": 16, "sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
_CHOSEN_WINDOW = {"use_sliding_window": True, "sliding_window": 37}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SIGMOID_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}  # 32: whole vectors
_ROUTED = {**_SIGMOID_EXPERTS, "n_routed_experts": 32, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_TWO_ROPES = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + each for each in range(8)],
}
_TWO_MAGNITUDES = {**_TWO_ROPES, "short_mscale": 1.0, "long_mscale": 1.4}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_FALCON = {key: _SHAPE[key] for key in _SHAPE if key != "intermediate_size"}


@dataclass(frozen=True)
class Case:
    """A checkpoint to be made, and where it is to be tested."""

    model_type: str
    settings: dict[str, Any]
    tps: tuple[int, ...]
    exact: bool
    """A token has the same bits in a chunk and alone, on every number of ranks."""
    seed: int


CASES: dict[str, Case] = {}


def _add(
    name: str, settings: dict[str, Any], tps: tuple[int, ...] = (1, 2), *, exact: bool = True, seed: int = 0
) -> None:
    CASES[name] = Case(name.partition("-")[0], settings, tps, exact, seed)


_add("arcee", _GROUPED)
_add("bloom", {**_TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}, _TO_4)
_add("bloom-six-heads", {**_TOKENS, "hidden_size": 96, "n_layer": 2, "n_head": 6})  # slopes of two series
_add("cohere", {**_GROUPED, "logit_scale": 1.0})
_add("cohere-norms", {**_GROUPED, "logit_scale": 1.0, "use_qk_norm": True}, _TO_4)
_add("cohere2", {**_GROUPED, **_WINDOW, "logit_scale": 1.0})
_add("cwm", {**_GROUPED, **_WINDOW})
_add(
    "deepseek_v2",
    {**_GROUPED, **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
)
_add("deepseek_v3", {**_GROUPED, **_LATENT, **_ROUTED, "first_k_dense_replace": 1}, _TO_4)
_add("deepseek_v3-one-query", {**_GROUPED, **_LATENT, "q_lora_rank": None, "first_k_dense_replace": 2})
_add("dots1", {**_GROUPED, **_ROUTED, "first_k_dense_replace": 1})
_add("dots1-window", {**_GROUPED, **_WINDOW, **_ROUTED, "first_k_dense_replace": 1})
_add("ernie4_5", _GROUPED)
_add("ernie4_5_moe", {**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32})
_add("exaone4", {**_GROUPED, **_WINDOW})
_add("exaone_moe", {**_GROUPED, **_WINDOW, **_SIGMOID_EXPERTS, "num_experts": 32, "first_k_dense_replace": 1})
_add("falcon", _FALCON, _TO_4)  # one key/value head
_add("falcon-alibi", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}, _TO_4)
_add("falcon-new", {**_FALCON, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True}, _TO_8)
_add("flex_olmo", {**_GROUPED, **_EXPERTS})
_add("gemma", {**_GROUPED, **_HEADS})
_add("gemma2", {**_GROUPED, **_WINDOW})
_add("gemma3_text", {**_GROUPED, **_WINDOW})
_add("glm", {**_GROUPED, **_HEADS})
_add("glm4", {**_GROUPED, **_HEADS})
_add("glm4_moe", {**_GROUPED, **_ROUTED, "first_k_dense_replace": 1}, seed=1)
_add("glm4_moe_lite", {**_GROUPED, **_LATENT, **_ROUTED})
_add("gpt2", _OLD, _TO_4)
_add("gpt_bigcode", _OLD, _TO_4)  # one key/value head
_add("gpt_bigcode-many-keys", {**_OLD, "multi_query": False}, seed=1)
_add("gpt_neox", _SHAPE, _TO_4)
_add("gpt_oss", {**_GROUPED, **_WINDOW, **_LOCAL_EXPERTS, "intermediate_size": 128}, _TO_4)
_add("granite", _GROUPED)
_add("granitemoe", {**_GROUPED, **_LOCAL_EXPERTS})
_add("granitemoeshared", {**_GROUPED, **_LOCAL_EXPERTS, "shared_intermediate_size": 32})
_add("helium", {**_GROUPED, **_HEADS})
_add("hunyuan_v1_dense", {**_GROUPED, **_HEADS})
_add("hunyuan_v1_moe", {**_GROUPED, **_HEADS, "num_experts": 4, "moe_topk": 2})
_add("hyperclovax", {**_GROUPED, **_HEADS})
_add("jais2", {**_GROUPED, **_HEADS})
_add("llama", {**_DEEP, "num_key_value_heads": 4}, _TO_4)
_add("llama-grouped-untied", {**_DEEP, "tie_word_embeddings": False, "head_dim": 32}, _TO_4)
_add("llama-odd-heads", {**_SHAPE, "hidden_size": 40, "head_dim": 10}, _TO_4)  # no compiled kernel takes 10
_add("llama-eight-heads", {**_GROUPED, **_EIGHT_HEADS}, _TO_8)
_add("llama-six-heads", {**_SHAPE, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, (1, 3, 6))
_add("mellum", {**_GROUPED, **_WINDOW, **_EXPERTS, "moe_intermediate_size": 32})
_add("minimax_m2", {**_GROUPED, **_HEADS, "num_local_experts": 32, "num_experts_per_tok": 4})
_add("ministral", {**_GROUPED, **_WINDOW})
_add("mistral", {**_DEEP, "sliding_window": 37, "head_dim": 16}, _TO_4)
_add("mixtral", {**_DEEP, **_LOCAL_EXPERTS}, _TO_4)
_add("mixtral-window", {**_GROUPED, **_LOCAL_EXPERTS, "sliding_window": 37})
_add("nanochat", _GROUPED)
_add("nemotron", {**_GROUPED, **_HEADS})
_add("olmo", _GROUPED)
_add("olmo2", _GROUPED, _TO_4)
_add("olmo3", {**_GROUPED, **_WINDOW})
_add("olmoe", {**_GROUPED, **_EXPERTS}, _TO_4)
_add("opt", {**_FALCON, "ffn_dim": 96, "word_embed_proj_dim": 64})
_add("opt-projected", {**_FALCON, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False})
_add("persimmon", _SHAPE)
_add("phi", _GROUPED)
_add("phi3", {**_GROUPED, **_EIGHT_HEADS}, _TO_8)
_add("phi3-window", {**_GROUPED, "sliding_window": 37})
_add("llama-dynamic-rope", {**_GROUPED, "rope_parameters": _DYNAMIC_ROPE, "max_position_embeddings": 64}, ())
_add("phi3-two-ropes", {**_GROUPED, "rope_parameters": _TWO_ROPES, "original_max_position_embeddings": 64}, ())
_add("phimoe", {**_GROUPED, **_LOCAL_EXPERTS})
_add("phimoe-window", {**_GROUPED, **_LOCAL_EXPERTS, "sliding_window": 37})
_add("phimoe-two-ropes", {**_GROUPED, **_LOCAL_EXPERTS, "rope_parameters": _TWO_MAGNITUDES}, ())
_add("qwen2", _DEEP, _TO_4)
_add("qwen2-window", {**_GROUPED, **_CHOSEN_WINDOW, "max_window_layers": 1})
_add(
    "qwen2_moe",
    {**_GROUPED, **_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
)
_add(
    "qwen2_moe-window",
    {**_GROUPED, **_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    | {**_CHOSEN_WINDOW, "max_window_layers": 2},
)
_add("qwen3", {**_DEEP, "head_dim": 32}, _TO_4)
_add("qwen3-window", {**_GROUPED, **_HEADS, **_CHOSEN_WINDOW, "max_window_layers": 1})
_add("qwen3_moe", {**_DEEP, **_EXPERTS, **_HEADS, "moe_intermediate_size": 32, "mlp_only_layers": [1]}, _TO_4)
_add("qwen3_moe-window", {**_GROUPED, **_EXPERTS, **_HEADS, "moe_intermediate_size": 32, **_CHOSEN_WINDOW})
_add("seed_oss", {**_GROUPED, **_HEADS})
_add("smollm3", _GROUPED)
_add("smollm3-window", {**_GROUPED, **_WINDOW, "use_sliding_window": True})
_add("solar_open", {**_GROUPED, **_HEADS, **_ROUTED})
_add("stablelm", _GROUPED)
_add("stablelm-norms", {**_GROUPED, "qk_layernorm": True, "use_parallel_residual": True}, _TO_4)
_add("starcoder2", {**_GROUPED, "sliding_window": 37})
_add("vaultgemma", {**_GROUPED, **_WINDOW})
_add("youtu", {**_GROUPED, **_LATENT})


def make(name: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """Write a checkpoint of random weights; return where, and the model as `transformers` has it."""
    case = CASES[name]
    torch.manual_seed(sum(map(ord, name)) + case.seed)
    config = AutoConfig.for_model(case.model_type, **case.settings)
    how = "eager" if getattr(config, "attn_logit_softcapping", None) else None  # not every implementation has a cap
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=how).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wider than the default, so that logits differ clearly
            parameter.copy_(torch.randn_like(parameter) * (0.6 / parameter.shape[-1] ** 0.5) + (parameter.dim() == 1))
        for module in model.modules():
            for buffer in module._buffers.keys() - module._non_persistent_buffers_set:
                getattr(module, buffer).normal_(std=0.1)
    path = folder / name
    model.save_pretrained(path)
    return path, model
