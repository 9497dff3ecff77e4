"""The rotary scaling of a GGUF file, as `rope_parameters`. `transformers` does not read it.

llama.cpp has it in fields (linear, YaRN) or in a tensor of divisors of the frequencies (Llama 3.1 and later). What has
no counterpart is refused by its name, because the model would give other text without it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from lockstep_engine.model_config import refuse
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_NAMES = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Fields that change frequencies, to their names in `rope_parameters`."""
_NEUTRAL = {
    "attn_factor": (0.0, 1.0),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (-1.0, 1.0),
    "yarn_log_multiplier": (0.0,),
    "finetuned": (False, True),
}
"""Other fields, and their values that change nothing."""
_DIVISORS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_LLAMA3 = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)
"""The scaling of Llama 3.1 and of Llama 3.2. A file has its divisors, not its parameters."""


def carry_scaling(path: Path, reader: gguf.GGUFReader, config: PreTrainedConfig) -> None:
    """Give a configuration that `transformers` has read from a file the file's rotary scaling.

    Raises:
        LockstepError: the scaling cannot be carried over; names it.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name in (_DIVISORS, *_LONGROPE)}
    for name in _LONGROPE:
        if name in tensors:
            raise refuse(f"{path}: its rotary scaling cannot be carried over (LongRoPE, in the tensor {name})")
    scaling = _scaling_of_fields(path, reader.fields)
    if _DIVISORS in tensors:
        divisors = gguf.dequantize(tensors[_DIVISORS].data, tensors[_DIVISORS].tensor_type).ravel()
        if (divisors != 1).any():
            if scaling is not None:
                raise refuse(f"{path}: its rotary scaling cannot be carried over (fields and the tensor {_DIVISORS})")
            scaling = _scaling_of_divisors(path, divisors, config)
    if scaling is None:
        return
    try:
        rope = config.rope_parameters
        rope.get("full_attention", rope).update(scaling)  # llama.cpp does not scale Gemma 3's layers with a window
        config.standardize_rope_params()
        config.validate_rope()
    except (AttributeError, KeyError, ValueError):
        kind = scaling["rope_type"]
        raise refuse(f"{path}: its rotary scaling ({kind}) cannot be carried over to {config.model_type}") from None


def _scaling_of_fields(path: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The linear or YaRN scaling that fields describe; None: there is none."""
    rope = f"{fields[gguf.Keys.General.ARCHITECTURE].contents()}.rope."
    given = {
        name.removeprefix(f"{rope}scaling."): field.contents()
        for name, field in fields.items()
        if name.startswith(f"{rope}scaling.")
    }
    older = fields.get(f"{rope}scale_linear")
    factor = given.setdefault("factor", older.contents() if older is not None else 0.0)
    kind = given.pop("type", "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        raise refuse(f"{path}: its rotary scaling cannot be carried over ({rope}scaling.type is {kind})")
    for name, value in given.items():
        if name not in _NAMES and value not in _NEUTRAL.get(name, ()):
            raise refuse(f"{path}: its rotary scaling cannot be carried over ({rope}scaling.{name} is {value})")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    wanted = {name: value for name, value in given.items() if kind == "yarn" or not name.startswith("yarn_")}
    return {"rope_type": kind, **{_NAMES[name]: value for name, value in wanted.items() if name in _NAMES}}


def _scaling_of_divisors(path: Path, divisors: NDArray[np.float32], config: PreTrainedConfig) -> dict[str, Any]:
    """The Llama 3 scaling that has these divisors of the frequencies."""
    if "rope_theta" in config.rope_parameters:
        plain = _frequencies(config, {"rope_type": "linear", "factor": 1.0})
        for scaling in _LLAMA3:
            expected = plain / _frequencies(config, scaling)
            if expected.shape == divisors.shape and np.allclose(expected, divisors, rtol=1e-3):
                return dict(scaling)
    raise refuse(
        f"{path}: its rotary scaling cannot be carried over (the tensor {_DIVISORS} is neither Llama 3.1's nor 3.2's)"
    )


def _frequencies(config: PreTrainedConfig, scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {**config.rope_parameters, **scaling}
    frequencies: NDArray[np.float32] = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](scaled)[0].numpy()
    return frequencies
