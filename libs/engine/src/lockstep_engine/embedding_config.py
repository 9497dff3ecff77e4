"""Whether a checkpoint gives embeddings, and how they are made of its hidden states. Without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_common.errors import LockstepError, invalid

_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
"""Fields of 1_Pooling/config.json, and the pooling that each one selects."""
_SERVED_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})


@dataclass(frozen=True)
class EmbeddingInfo:
    """How the embedding of a text is made. It always has length 1."""

    pooling: str
    """last: the hidden state of the last token; mean: the mean of all tokens' hidden states."""
    size: int
    """Numbers of an embedding."""
    dimensions: tuple[int, ...] = ()
    """Smaller sizes that the model was trained for: so many of the first numbers are an embedding, too (Matryoshka)."""
    any_dimension: bool = False
    """Whether every smaller size is one."""


def inspect_embedding(wanted: str, path: Path, settings: dict[str, Any], size: int) -> EmbeddingInfo | None:
    """How a checkpoint gives embeddings; None: it does not.

    Args:
        wanted: last or mean; none; or auto, which is what the checkpoint says in the files of sentence-transformers.
        path: directory of the checkpoint.
        settings: its config.json.
        size: of its hidden states.

    Raises:
        LockstepError: INVALID_REQUEST, its files are broken, or they ask for what the engine does not have.
    """
    pooling = _declared_pooling(path) if wanted == "auto" else wanted
    if pooling is None or pooling == "none":
        return None
    declared = settings.get("matryoshka_dimensions")
    sizes = declared if isinstance(declared, list) else []
    smaller = sorted({each for each in sizes if isinstance(each, int) and 0 < each < size})
    is_any = settings.get("is_matryoshka") is True and not smaller
    return EmbeddingInfo(pooling, size, tuple(smaller), is_any)


def _declared_pooling(path: Path) -> str | None:
    values = _read(path / "1_Pooling" / "config.json")
    if not isinstance(values, dict):
        if values is None:
            return None
        raise _refuse(path, "1_Pooling/config.json is not a JSON object")
    modules = _read(path / "modules.json")
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind not in _SERVED_MODULES:
            raise _refuse(path, f"modules.json has a module {kind} after the pooling")
    named = values.get("pooling_mode")
    if isinstance(named, str):
        chosen = ["last" if named == "lasttoken" else named]
    else:
        selected = [str(key) for key, value in values.items() if key.startswith("pooling_mode") and value]
        chosen = [_MODES.get(key, key) for key in selected]
    if len(chosen) != 1 or chosen[0] not in _MODES.values():
        raise _refuse(path, f"1_Pooling/config.json asks for {' and '.join(chosen) or 'no pooling'}")
    return chosen[0]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        raise _refuse(file.parent, f"{file.name} cannot be read as JSON") from None


def _refuse(path: Path, sentence: str) -> LockstepError:
    return invalid(
        "model", f"{path}: {sentence}, which is not supported; `embeddings` selects last, mean or none instead"
    )
