"""llama.cpp under its own interpreter: makes GGUF files of a Llama, and generates with them as it is told on stdin.

It needs `llama-cpp-python`, `gguf` and numpy, and nothing of this repository, so that they stay out of its lock file.
Requests and answers are lines of JSON. Streams are decoded together in one batch a step, greedily, through the C API:
the binding's own `Llama` class runs one stream at a time.
"""

import ctypes
import json
import sys
import time
from typing import Any

import gguf
import llama_cpp
import numpy as np

_BATCH = 512


def write_gguf(arrays: str, config: dict[str, Any], out: str, *, half: bool) -> None:
    """A GGUF file of a Llama whose tensors stand in the .npz file `arrays` under Hugging Face's names."""
    writer = gguf.GGUFWriter(out, "llama")
    heads, kv_heads, layers = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    with np.load(arrays) as tensors:
        for name in tensors:
            value = tensors[name].astype(np.float32)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                value = interleaved(value, heads if "q_proj" in name else kv_heads)
            matrix = value.ndim > 1
            writer.add_tensor(gguf_name(name), value.astype(np.float16) if half and matrix else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp rotates them: pairs side by side, not half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    """Hugging Face's name of a Llama's tensor to GGUF's."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, *rest, kind = name.split(".")
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return f"blk.{layer}.{parts['.'.join(rest)]}.{kind}"


class Peer:
    """A model and a context for some streams.

    Args:
        file: GGUF.
        threads: CPU threads.
        streams: at once.
        context: tokens of a stream.
    """

    def __init__(self, file: str, threads: int, streams: int, context: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = streams * context
        params.n_seq_max = streams
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot run {file}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens after each prompt, all together."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last = [0] * len(prompts)
        for stream, prompt in enumerate(prompts):
            last[stream] = self._decode([(token, at, stream) for at, token in enumerate(prompt)], [len(prompt) - 1])[0]
        out = [[token] for token in last]
        for step in range(tokens - 1):
            entries = [(ids[-1], len(prompts[stream]) + step, stream) for stream, ids in enumerate(out)]
            for ids, token in zip(out, self._decode(entries, list(range(len(entries)))), strict=True):
                ids.append(token)
        return out

    def _decode(self, entries: list[tuple[int, int, int]], wanted: list[int]) -> list[int]:
        """Compute (token, position, stream)s; the most likely next tokens after the `wanted` ones."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, stream) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = index in wanted
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama_decode failed")
        rows = (llama_cpp.llama_get_logits_ith(self._context, index) for index in wanted)
        return [int(np.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in rows]


@llama_cpp.llama_log_callback
def quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Its log is not wanted."""


def main() -> None:
    """Serve requests: {"convert": …}, {"load": …} or {"generate": …}, each with its arguments."""
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    peers: dict[str, Peer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"version": llama_cpp.__version__}
        if "convert" in request:
            write_gguf(**request["convert"])
        elif "load" in request:
            peers[request["name"]] = Peer(**request["load"])
        else:
            began = time.perf_counter()
            ids = peers[request["name"]].generate(**request["generate"])
            answer |= {"seconds": time.perf_counter() - began, "ids": ids}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
