"""llama.cpp under its own interpreter: generates with GGUF files for requests on stdin.

It needs `llama-cpp-python` and numpy, and nothing of this repository, so that they stay out of its lock file.
Requests and answers are lines of JSON. Streams are decoded together in one batch a step, greedily, through the C API:
the binding's own `Llama` class runs one stream at a time.
"""

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 512


class Peer:
    """A model and a context for some streams.

    Args:
        file: GGUF.
        threads: CPU threads.
        streams: number of streams at once.
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
    """Drops llama.cpp's log."""


def main() -> None:
    """Serve requests: {"load": …} or {"generate": …}, each with its arguments."""
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    peers: dict[str, Peer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"version": llama_cpp.__version__}
        if "load" in request:
            peers[request["name"]] = Peer(**request["load"])
        else:
            began = time.perf_counter()
            ids = peers[request["name"]].generate(**request["generate"])
            answer |= {"seconds": time.perf_counter() - began, "ids": ids}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
