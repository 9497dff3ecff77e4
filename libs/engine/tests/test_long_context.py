"""32,768 tokens of context: the same tokens as `transformers`; all blocks before the hot window are compressed."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from lockstep_engine import Engine, SamplingParams
from transformers import AutoModelForCausalLM, LlamaConfig

CONTEXT, NEW, BLOCK = 32768, 8, 16
REFERENCE = Path(__file__).parents[3] / "models/reference"


@pytest.mark.slow
def test_32k_tokens(tmp_path):
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(2)
    reference = AutoModelForCausalLM.from_config(config)
    reference.save_pretrained(tmp_path)
    shutil.copy(REFERENCE / "tokenizer.json", tmp_path)
    prompt = random.Random(3).choices(range(2, 4096), k=CONTEXT - NEW)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    with Engine(str(tmp_path), kv_compression="none") as engine:
        (ids,) = engine.generate_ids([prompt], params)
    assert list(ids) == expected[0, len(prompt) :].tolist()
    with Engine(str(tmp_path)) as engine:
        (ids,) = engine.generate_ids([prompt], params)
        status = engine.core.status()
    assert len(ids) == NEW
    hot = (64 // BLOCK + 1) + 1  # the window, the block that is being filled, the sink
    assert CONTEXT // BLOCK - hot <= status.compressed_blocks <= CONTEXT // BLOCK
    assert status.free_blocks == status.total_blocks
