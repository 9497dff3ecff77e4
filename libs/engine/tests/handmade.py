"""Model directories written by hand, whole or broken, without weights worth loading."""

import json
import struct

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def safetensors_bytes(payload=64, fill=7, dtype="U8"):
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": dtype, "shape": [payload], "data_offsets": [0, payload]}}
    )
    return struct.pack("<Q", len(header)) + header.encode() + bytes([fill]) * payload


def write_model(folder, *, files=("model.safetensors",), **changes):
    """A directory that `inspect_model` accepts; `changes` of config.json, where None removes a field."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    for file in files:
        (folder / file).write_bytes(safetensors_bytes())
    return folder
