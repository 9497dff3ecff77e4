"""The sampling settings that a model's authors recommend, from its generation_config.json.

The worker reads them and never applies them: they are a part of the model card, and a router uses them for the fields
that a client does not set. The file's end-of-text ids are the engine's business.
"""

import json
import math
from pathlib import Path
from typing import Any

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import LockstepError, invalid

_FILE = "generation_config.json"
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}
"""Least and largest value of each field that is a number."""
_ABOVE_ZERO = frozenset({"top_p", "repetition_penalty"})


def load_sampling_defaults(directory: Path) -> inference_pb2.Sampling:
    """The settings of the model in `directory`; fields that its file does not set are not set.

    `do_sample` and all lengths are ignored: whether an answer is greedy, and how long it may be, is up to the client.

    Raises:
        LockstepError: INVALID_REQUEST, the file cannot be read, or a value is out of range.
    """
    values = _read(directory / _FILE)
    defaults = inference_pb2.Sampling()
    for field, (least, largest) in _RANGES.items():
        value = values.get(field)
        if value is None:
            continue
        if not _is_number(value) or not least <= value <= largest or (value == 0 and field in _ABOVE_ZERO):
            bounds = f"{'above' if field in _ABOVE_ZERO else 'from'} {least:g} to {largest:g}"
            raise _refuse(directory, f"has no usable {field}: a number {bounds} is wanted")
        setattr(defaults, field, value)
    if (top_k := values.get("top_k")) is not None:
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not -1 <= top_k < 1 << 31:
            raise _refuse(directory, "has no usable top_k: an integer from -1 is wanted")
        defaults.top_k = max(0, top_k)
    return defaults


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise _refuse(path.parent, "cannot be read as JSON") from None
    if not isinstance(values, dict):
        raise _refuse(path.parent, "is not a JSON object")
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(directory: Path, sentence: str) -> LockstepError:
    return invalid("model", f"{directory}: {_FILE} {sentence}; `generation_config` = `none` leaves the file unused")
