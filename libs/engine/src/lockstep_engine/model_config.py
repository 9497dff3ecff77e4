"""Reads a checkpoint's configuration, without torch, so that an unusable directory is refused before anything starts.

The driver does this once; ranks are given the result.
"""

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.architectures import ARCHITECTURES, REFUSED
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, SlidingWindow, WindowedLayers
from lockstep_engine.embedding_config import EmbeddingInfo, inspect_embedding
from lockstep_engine.quantized import Scheme, read_scheme

_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
_LARGEST_SIZE = 2**31 - 1  # positions and token ids have 32 bits
_DIGEST_SAMPLE_BYTES = 2**12
_DIGEST_SAMPLES = 1024
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed"),
    "max_position_embeddings": ("n_positions",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}
"""Names of these fields in older configurations."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Float dtypes of safetensors that a model can be computed in."""
_EXTENDING_ROPE = frozenset({"linear", "dynamic", "yarn"})
"""Kinds of rotary scaling whose factor extends the context. With the others, max_position_embeddings is what the
scaled model serves."""
SETTLED_ROPE = frozenset({"longrope", "dynamic"})
"""Kinds of rotary positions with other frequencies for longer sequences. Here they are those of the longest sequence
that is served, because a request's result must not depend on other requests."""
_OLDER_LONGROPE = frozenset({"su", "yarn"})
"""What Phi-3's configurations called longrope at first; `transformers` still reads these names so."""


_LEAST_CONTEXT = 8
"""Layers with a window give back what lies before it if the context is at least so many windows long. The hot pool has
room for windows of all layers, in the model's dtype, which other sequences cannot have: for shorter contexts that would
take more than it saves, the more so where else all blocks would be compressed."""


@dataclass(frozen=True)
class ModelInfo:
    """What the engine knows about a checkpoint."""

    path: Path
    name: str
    digest: str
    """Hash of configuration, tokenizer, weights, pooling and the compression of KV. Engines may continue each other's
    streams only if their digests are equal."""
    architecture: str
    model_type: str
    """A key of `architectures.ARCHITECTURES`."""
    dtype: str
    """Dtype of the stored weights: what the configuration says, else that of most of their bytes."""
    context_length: int
    """Most tokens of prompt and output that are served: the model's limit with its rotary scaling, or `max_context` if
    that is smaller."""
    vocab_size: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    created: int
    """Modification time of the configuration file, in seconds since 1970."""
    weight_files: tuple[str, ...]
    """Names of the safetensors files in `path`."""
    embedding: EmbeddingInfo | None = None
    """How the model gives embeddings; None: it does not."""
    quantization: Scheme | None = None
    """How the stored weights are quantized; None: they are not."""
    window: SlidingWindow | None = None
    """The window that every layer has, so that sequences need not keep the KV before it. None: a layer sees more, or
    there is nothing to gain: the window holds the whole context, or is not larger than that of blocks that are not
    compressed."""
    windowed: WindowedLayers | None = None
    """The layers with a window, if others have none, so that sequences need not keep these layers' KV before it. None:
    there are none, or too little is gained: the window is more than an eighth of the context."""


def refuse(sentence: str) -> LockstepError:
    """The error for a model that cannot be served. Unlike `errors.invalid` it takes the full sentence."""
    return LockstepError(ErrorCode.INVALID_REQUEST, sentence, field="model")


def inspect_model(config: EngineConfig) -> ModelInfo:
    """Read a model's configuration, and check that its files are complete.

    Raises:
        LockstepError: INVALID_REQUEST with one sentence that says what is missing, truncated or unsupported.
    """
    path = Path(config.model)
    if path.suffix == ".gguf" and path.is_file():
        raise refuse(f"model {path} is a GGUF file: `lockstep convert` makes a directory of it, which can be served")
    if not path.is_dir():
        raise refuse(f"model {path}: no such directory")
    if (path / "adapter_config.json").exists():
        raise refuse(f"model {path}: it holds an adapter (PEFT), which is not supported; merge it into the model first")
    settings = read_json(path / "config.json")
    files, stored = _weight_files(path)
    architectures = settings.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str) or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise refuse(
            f"model {path}: config.json names the architecture {architecture}; only …ForCausalLM generates text"
        )
    model_type = _known_type(path, settings, architecture)
    _check_causal(path, settings, architecture)
    quantization = read_scheme(settings, model_type, lambda sentence: refuse(f"model {path}: {sentence}"))
    for field, others in _OTHER_NAMES.items():
        settings.setdefault(field, next((settings[each] for each in others if each in settings), None))
    if settings["max_position_embeddings"] is None:
        settings["max_position_embeddings"] = ARCHITECTURES[model_type].context_length
    _check_split(path, settings, config.tp)
    vocab_size = _positive(path, settings, "vocab_size")
    limit = _context_limit(path, settings)
    context_length = min(limit, config.max_context or limit)
    eos_ids = tuple(each for each in _eos_ids(path, settings) if 0 <= each < vocab_size)
    end_id = _tokenizer_end(path)
    # The digest has it only where it changes answers, so that other models keep theirs.
    added_end = end_id if end_id is not None and end_id < vocab_size and end_id not in eos_ids else None
    hidden_size = _positive(path, settings, "hidden_size")
    embedding = inspect_embedding(config.embeddings, path, settings, hidden_size)
    windowed = _windowed_layers(settings, config, context_length)
    return ModelInfo(
        path=path,
        name=config.name or path.resolve().name,
        digest=_digest(path, files, config, windowed, embedding, _settled_context(settings, context_length), added_end),
        architecture=architecture,
        model_type=model_type,
        dtype=str(settings.get("dtype") or settings.get("torch_dtype") or _most_common(stored)),
        context_length=context_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        eos_ids=eos_ids if added_end is None else (*eos_ids, added_end),
        created=int((path / "config.json").stat().st_mtime),
        weight_files=files,
        embedding=embedding,
        quantization=quantization,
        window=_window(settings, config, context_length),
        windowed=windowed,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of the checkpoint. Refuses a file that is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refuse(f"model {path.parent}: {path.name} is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise refuse(f"model {path.parent}: {path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise refuse(f"model {path.parent}: {path.name} is not a JSON object")
    return value


def _known_type(path: Path, settings: dict[str, Any], architecture: str) -> str:
    model_type = str(settings.get("model_type"))
    if model_type in REFUSED:
        raise refuse(f"model {path}: {architecture} {REFUSED[model_type]}, which is not supported")
    if model_type not in ARCHITECTURES:
        raise refuse(
            f"model {path}: {architecture} (model_type {model_type}) is not among the supported architectures: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return model_type


def _check_causal(path: Path, settings: dict[str, Any], architecture: str) -> None:
    for field, is_given in (
        ("is_causal", not settings.get("is_causal", True)),
        ("use_bidirectional_attention", settings.get("use_bidirectional_attention")),
    ):
        if is_given:
            value = json.dumps(settings[field])
            raise refuse(
                f"model {path}: {architecture} attends to later tokens, which is not supported "
                f"({field} in config.json is {value})"
            )


def _rope(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of rotary scaling, and its parameters. Those that differ between layers count as none."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = given if isinstance(given, dict) else {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if settings["model_type"] == "phi3" and kind in _OLDER_LONGROPE:
        kind = "longrope"
    return kind, rope


def _context_limit(path: Path, settings: dict[str, Any]) -> int:
    """Positions that the model has been made for, extended by its rotary scaling."""
    limit = _positive(path, settings, "max_position_embeddings")
    kind, rope = _rope(settings)
    if "su" in (rope.get("rope_type"), rope.get("type")) and "original_max_position_embeddings" not in rope:
        raise refuse(
            f"model {path}: config.json calls its rotary scaling su, without original_max_position_embeddings beside "
            "it; change su to longrope, the newer name"
        )
    if kind not in _EXTENDING_ROPE or ARCHITECTURES[settings["model_type"]].is_limit_scaled:
        return limit
    factor = rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _LARGEST_SIZE:
        raise refuse(f"model {path}: config.json has no usable factor for its {kind} rotary scaling (given: {factor})")
    original = rope.get("original_max_position_embeddings") or limit
    if isinstance(original, bool) or not isinstance(original, int | float) or not 1 <= original <= _LARGEST_SIZE:
        raise refuse(f"model {path}: config.json has no usable original_max_position_embeddings (given: {original})")
    extended = int(original * factor)
    if extended > _LARGEST_SIZE:
        raise refuse(
            f"model {path}: config.json has a {kind} rotary scaling to {extended} positions, which are too many"
        )
    return max(limit, extended)


def _window(settings: dict[str, Any], config: EngineConfig, context_length: int) -> SlidingWindow | None:
    """See `ModelInfo.window`. What is not said clearly counts as none: ranks refuse a layer that sees more."""
    tokens, kinds = settings.get("sliding_window"), settings.get("layer_types")
    rule = ARCHITECTURES[settings["model_type"]].windowed
    if rule is None or not isinstance(tokens, int) or not 1 <= tokens < context_length:
        return None
    if rule != "all" and settings.get("use_sliding_window") is not True:
        return None
    if isinstance(kinds, list):
        if set(kinds) != {"sliding_attention"}:
            return None
    elif rule == "later" and settings.get("max_window_layers") != 0:
        return None
    window = SlidingWindow(tokens)
    is_larger = config.hot_window is None or window.blocks_before > config.hot_window.size
    return window if is_larger else None


def _windowed_layers(settings: dict[str, Any], config: EngineConfig, context_length: int) -> WindowedLayers | None:
    """See `ModelInfo.windowed`. What is not said clearly counts as none: ranks refuse a layer that sees more."""
    tokens, total = settings.get("sliding_window"), settings.get("num_hidden_layers")
    if config.kv_compression not in ("none", "lazy") or not isinstance(tokens, int) or not isinstance(total, int):
        return None
    numbers = tuple(number for number, kind in enumerate(_layer_kinds(settings, total)) if kind == "sliding_attention")
    window = SlidingWindow(tokens)
    if (
        not 0 < len(numbers) < total
        or tokens < 1
        or context_length < _LEAST_CONTEXT * window.blocks_before * BLOCK_SIZE
    ):
        return None
    return WindowedLayers(window, numbers, total)


def _layer_kinds(settings: dict[str, Any], total: int) -> list[str]:
    """What each layer is called in `layer_types`; empty: not known."""
    architecture, kinds = ARCHITECTURES[settings["model_type"]], settings.get("layer_types")
    if architecture.turns is None:
        # Qwen's configuration ignores its window unless it is chosen.
        if architecture.windowed != "later" or settings.get("use_sliding_window") is not True:
            return []
        turns, first = 0, settings.get("max_window_layers")
    else:
        turns, first = settings.get("sliding_window_pattern", architecture.turns), None
    if isinstance(kinds, list):
        return kinds if len(kinds) == total else []
    if isinstance(first, int):
        return ["full_attention" if each < first else "sliding_attention" for each in range(total)]
    if not isinstance(turns, int) or turns < 1:
        return []
    return ["sliding_attention" if (each + 1) % turns else "full_attention" for each in range(total)]


def _settled_context(settings: dict[str, Any], context_length: int) -> int | None:
    """The context where it decides over frequencies or their magnitude, and so over results."""
    kind, rope = _rope(settings)
    return context_length if kind in SETTLED_ROPE or "long_mscale" in rope else None


def _most_common(stored: Counter[str]) -> str:
    """The dtype of most bytes."""
    return max(stored, key=lambda name: (stored[name], name), default="float32")


def _weight_files(path: Path) -> tuple[tuple[str, ...], Counter[str]]:
    """The names of the files, and the bytes that they have of each float dtype."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise refuse(f"model {path}: {index.name} has no usable weight_map")
        files = tuple(sorted(set(weight_map.values())))
    else:
        files = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    if not files:
        raise refuse(f"model {path}: no *.safetensors file (pickled .bin and .pt files are not read)")
    stored: Counter[str] = Counter()
    for name in files:
        stored.update(_check_complete(path / name))
    return files, stored


def _check_complete(file: Path) -> Counter[str]:
    """Check a file's length, and count the bytes of each float dtype. The format: 8 bytes of header length, a JSON
    header, as many bytes as the largest offset.
    """
    stored: Counter[str] = Counter()
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise refuse(
                    f"model {file.parent}: {file.name} is not a complete safetensors file (its header is cut short)"
                )
            header = json.loads(stream.read(header_bytes))
        end = 0
        for entry in (each for key, each in header.items() if key != "__metadata__"):
            first, last = map(int, entry["data_offsets"])
            end = max(end, last)
            if entry["dtype"] in _DTYPES:
                stored[_DTYPES[entry["dtype"]]] += last - first
    except FileNotFoundError:
        raise refuse(f"model {file.parent}: {file.name} is named by the index but missing") from None
    except OSError as error:
        raise refuse(f"model {file.parent}: {file.name} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        raise refuse(f"model {file.parent}: {file.name} has a broken safetensors header") from None
    if size != 8 + header_bytes + end:
        raise refuse(f"model {file.parent}: {file.name} is cut short: {size} bytes of {8 + header_bytes + end}")
    return stored


def _check_split(path: Path, settings: dict[str, Any], tp: int) -> None:
    heads = settings.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        raise refuse(f"model {path}: {heads} attention heads cannot be split over tp = {tp} ranks")
    kv_heads = settings.get("num_key_value_heads") or heads
    if isinstance(kv_heads, int) and kv_heads % tp and tp % kv_heads:
        raise refuse(f"model {path}: {kv_heads} key/value heads can be neither split nor repeated over tp = {tp} ranks")
    for field in ("intermediate_size", "moe_intermediate_size"):
        width = settings.get(field)
        if isinstance(width, int) and width % tp:
            raise refuse(f"model {path}: {field} {width} cannot be split over tp = {tp} ranks")


def _positive(path: Path, settings: dict[str, Any], field: str) -> int:
    value = settings.get(field)
    if not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise refuse(f"model {path}: config.json has no usable {field} (given: {value})")
    return value


def _eos_ids(path: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(number for number in ids if isinstance(number, int))


def _tokenizer_end(path: Path) -> int | None:
    """The id of the end-of-text token that the tokenizer's settings name; None: they name none that it has."""
    if not (path / "tokenizer_config.json").exists():
        return None
    settings = read_json(path / "tokenizer_config.json")
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    # The settings of most models have their added tokens; a tokenizer's own file has megabytes.
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        for number, entry in added.items():
            if isinstance(entry, dict) and entry.get("content") == text and number.isdecimal():
                return int(number)
    if not (path / "tokenizer.json").exists():
        return None
    return _id_of(text, read_json(path / "tokenizer.json"))


def _id_of(text: str, tokenizer: dict[str, Any]) -> int | None:
    """The id of a token in a tokenizer's file; None: it has no such token."""
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        found = vocabulary.get(text)
        return found if isinstance(found, int) else None
    # A Unigram's vocabulary is a list of pairs of a token and its score.
    rows = enumerate(vocabulary if isinstance(vocabulary, list) else ())
    return next((number for number, row in rows if isinstance(row, list) and row[:1] == [text]), None)


def _digest(
    path: Path,
    files: tuple[str, ...],
    config: EngineConfig,
    windowed: WindowedLayers | None,
    embedding: EmbeddingInfo | None,
    settled_context: int | None,
    added_end: int | None,
) -> str:
    """SHA-256 over the complete small files, and over the size and a thousand samples of each weight file. Reading all
    weights would take minutes. Weights that differ only between the samples have equal digests; give a fine-tuned model
    its own name.
    """
    compressed = config.compressed_with(windowed)
    digest = hashlib.sha256(f"{compressed} {sorted(config.kv_compressed_layers)}".encode())
    if windowed is not None and compressed is not None:  # copies have the same bits
        digest.update(f"hot layers {windowed.numbers}".encode())
    if embedding is not None:
        digest.update(embedding.pooling.encode())
    if settled_context is not None:
        digest.update(f"context {settled_context}".encode())
    if added_end is not None:
        digest.update(f"end {added_end}".encode())
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (path / name).exists():
            digest.update(name.encode() + b"\0" + (path / name).read_bytes())
    for file in (path / name for name in files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}".encode())
        with file.open("rb") as stream:
            for sample in range(_DIGEST_SAMPLES):
                stream.seek(max(0, size - _DIGEST_SAMPLE_BYTES) * sample // (_DIGEST_SAMPLES - 1))
                digest.update(stream.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()
