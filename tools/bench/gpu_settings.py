"""The settings of the GPU's benchmark: shapes of models, batches and contexts.

The benchmark's modules import this one first: without a GPU it has Triton interpret the kernels, which Triton decides
when it is loaded.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lockstep_engine.config import HotWindow  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402

DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
LAZY = HotWindow(sink=1, size=4)

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-3-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    },
}
"""`config.json`s of these models, but for what concerns neither shapes nor speed; without `model_type`: a Llama."""
SHAPES["tiny-moe"] = SHAPES["tiny"] | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@dataclass(frozen=True)
class Settings:
    """What is measured: shapes, batches and contexts."""

    models: tuple[str, ...] = ("llama-3-8b", "llama-2-7b")
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    shards: tuple[tuple[str, int], ...] = tuple(
        (model, tp) for model in ("llama-2-7b", "llama-3-8b", "llama-3-70b") for tp in (1, 2, 4, 8)
        if (model, tp) != ("llama-3-70b", 1)
    )  # fmt: skip
    chunk: int = 2048
    repeats: int = 20
    warm_ups: int = 2
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 4 * 2**30
    kv_bytes: int = 40 * 2**30
    """Bytes of the pool at most."""
    rows: int = 8192
    """Number of rows for the kernels that work row by row."""
    rule: HotWindow = LAZY
    """The hot window of the runs with fp8."""
    compiled_peer: bool = True
    engine_model: str = "llama-3-1b"
    engine_tps: tuple[int, ...] = (1,)
    new_tokens: int = 128
    arriving: int = 2000
    """Tokens of a prompt that arrives while streams run."""
    arrivals_per_s: tuple[float, ...] = (0, 2, 8)
    modes: tuple[bool, ...] = (False,)
    """Whether models compute in the exact mode. Ranks on a GPU do not, unless `deterministic` says so."""


TINY = Settings(
    models=("tiny",),
    batches=(1,),
    contexts=(50,),
    shards=(("tiny", 2),),
    chunk=4,
    repeats=1,
    warm_ups=0,
    rule=HotWindow(sink=1, size=1),
    dtype=torch.float32,
    copy_bytes=2**20,
    kv_bytes=2**20,
    rows=2,
    compiled_peer=False,
    engine_model="",
    engine_tps=(1,) if torch.cuda.device_count() == 1 else (1, 2),
    new_tokens=4,
    arriving=40,
    arrivals_per_s=(0, 50),
)


def model_config(name: str, context: int) -> PretrainedConfig:
    """The configuration of a shape."""
    usual = {"model_type": "llama", "tie_word_embeddings": False, "head_dim": None}
    return AutoConfig.for_model(**usual | SHAPES[name], max_position_embeddings=context, eos_token_id=None)
