"""The model at hand: the bytes of its KV cache, and how fast it computes prompts here."""

import json
import time
from pathlib import Path
from random import Random
from typing import Any

from lockstep_engine.offline import Engine
from lockstep_engine.request import SamplingParams

from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.state_bench.figures import Model

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROMPT_TOKENS = 1024
_ROUNDS = 3


def kv_bytes_per_token(directory: str, dtype: str) -> int:
    """Bytes of keys and values of one token, over all ranks, in the model's precision.

    Raises:
        CommandError: the configuration does not say it.
    """
    path = Path(directory) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        heads = config["num_attention_heads"]
        head_bytes = (config.get("head_dim") or config["hidden_size"] // heads) * _BYTES[dtype]
        return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_bytes)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CommandError(f"{path} does not say how large the KV cache is ({error!r})", UNUSABLE) from None


def measure(directory: str, *, tp: int, device: str, dtype: str, threads: int | None) -> Model:
    """Compute some prompts, one at a time."""
    rng = Random(0)
    with Engine(directory, tp=tp, device=device, dtype=dtype, threads=threads, prefix_cache=False) as engine:
        info = engine.core.model
        length = min(_PROMPT_TOKENS, info.context_length - 1)
        took_s = []
        for _ in range(_ROUNDS + 1):
            prompt = [rng.randrange(info.vocab_size) for _ in range(length)]
            began_at = time.perf_counter()
            engine.generate_ids([prompt], SamplingParams(max_tokens=1))
            took_s.append(time.perf_counter() - began_at)
        used = info.dtype if dtype == "auto" else dtype
    return Model(f"{info.name}, here", kv_bytes_per_token(directory, used), length / min(took_s[1:]))
