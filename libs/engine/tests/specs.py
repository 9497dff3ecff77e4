"""Specifications of ranks whose model is on no disk."""

from pathlib import Path

from lockstep_engine.config import EngineConfig
from lockstep_engine.control import RankSpec
from lockstep_engine.model_config import ModelInfo


def model_info(*, context_length=512, vocab_size=100, hidden_size=64, window=None, windowed=None):
    return ModelInfo(
        path=Path("m"),
        name="m",
        digest="",
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="float32",
        context_length=context_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        eos_ids=(),
        created=0,
        weight_files=(),
        window=window,
        windowed=windowed,
    )


def rank_spec(*, context_length=512, vocab_size=100, hidden_size=64, window=None, windowed=None, **config):
    """Of rank 0; `config`: fields of `EngineConfig`."""
    info = model_info(
        context_length=context_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        window=window,
        windowed=windowed,
    )
    return RankSpec(rank=0, epoch=0, config=EngineConfig(model="m", **config), model=info, threads=1)
