"""Tiny random checkpoints of many architectures, written to disk as their users would have them."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

SHAPE = {
    "vocab_size": 331,  # not a multiple of any tp
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}  # fewer than ranks at tp = 4: repeated

CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-grouped-untied": LlamaConfig(**GROUPED, tie_word_embeddings=False, head_dim=32),
    "llama-odd-heads": LlamaConfig(**{**SHAPE, "hidden_size": 40, "head_dim": 10}),  # no compiled kernel takes 10
    "mistral": MistralConfig(**GROUPED, sliding_window=37, head_dim=16),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=32),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_HEADS = {"head_dim": 16}
_WINDOW = {"head_dim": 16, "sliding_window": 37}
MORE: dict[str, dict[str, object]] = {  # model type -> what differs from GROUPED
    "arcee": {},
    "cohere": {},
    "cohere2": {},
    "ernie4_5": {},
    "exaone4": {},
    "gemma": _HEADS,
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "glm": _HEADS,
    "glm4": _HEADS,
    "granite": {},
    "helium": _HEADS,
    "olmo": {},
    "olmo2": {},
    "olmoe": _EXPERTS,
    "phi": {},
    "phi3": {},
    "qwen2_moe": {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "seed_oss": _HEADS,
    "smollm3": {},
    "starcoder2": {},
}


def make(name: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """Write a checkpoint of random weights; return where, and the model as `transformers` has it."""
    torch.manual_seed(sum(map(ord, name)))
    config = (
        CONFIGS[name] if name in CONFIGS else AutoConfig.for_model(name, **{**GROUPED, "pad_token_id": 0, **MORE[name]})
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wider than the default, so that logits differ clearly
            parameter.copy_(torch.randn_like(parameter) * (0.6 / parameter.shape[-1] ** 0.5) + (parameter.dim() == 1))
    path = folder / name
    model.save_pretrained(path)
    return path, model
