"""Checkpoints as GGUF files, llama.cpp's format (github.com/ggml-org/ggml, docs/gguf.md): read into a directory in the
Hugging Face layout, and written from one.

`transformers` reads every quantization, and `gguf_codes` keeps the blocks of the usual ones; the `gguf` package writes.
The complete tokenizer is stored in the field that the format has for it, so that a file written here reads back
unchanged; other files give what is in them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from lockstep_engine import EngineConfig
from lockstep_engine.model_config import ModelInfo, inspect_model, read_json, refuse
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from lockstep_tools.model import gguf_codes
from lockstep_tools.model.gguf_rope import carry_scaling

Progress = Callable[[int, int], None]
"""Called with the number of tensors done and their total."""

WEIGHTS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
"""How matrices can be stored; vectors are always float32."""

_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}

_WRITABLE = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""`model_type` to llama.cpp's name for the architecture."""

_BLOCK = re.compile(r"\bblk\.(\d{1,9})\.")
"""In the name of a tensor: the number of its block."""

_END_IDS = "lockstep.eos_token_ids"
"""The field with all ids that end an answer: the format has one for each of three kinds only."""

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_SPLITS = {_WORD + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORD + r"\p{N}" + _REST: "qwen2"}
"""The pattern by which a byte-level tokenizer splits texts into words, to llama.cpp's name for it."""


@dataclass(frozen=True)
class Conversion:
    """What became of a GGUF file."""

    info: ModelInfo
    """The checkpoint that the directory holds now."""
    kept: Counter[str]
    """How many quantized weights of each type were kept as they are."""
    widened: Counter[str]
    """How many were not; empty where that was asked for."""


def read(path: Path, folder: Path, dtype: str, *, widen: bool = False) -> Conversion:
    """Write the content of a GGUF file as config.json, safetensors and tokenizer.

    Args:
        path: the file.
        folder: the directory to write to; it exists.
        dtype: torch's name of the type of the weights that are not kept as blocks.
        widen: keep none.

    Raises:
        LockstepError: it is not a GGUF file, its fields and tensors are of no model, its rotary scaling cannot be
            kept, or its model cannot be served.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise refuse(f"{path} cannot be read as a GGUF file: {error}") from None
    fields = reader.fields
    _check_depth(path, reader)
    with _refusals(path):
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        if gguf.Keys.Tokenizer.HF_JSON in fields:
            (folder / "tokenizer.json").write_text(fields[gguf.Keys.Tokenizer.HF_JSON].contents(), encoding="utf-8")
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_special(fields)}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        else:
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    if found["missing_keys"]:  # transformers has initialized these randomly
        raise refuse(f"{path} lacks weights of a {type(model).__name__}, such as {min(found['missing_keys'])}")
    carry_scaling(path, reader, model.config)
    if len(ends := _end_ids(fields)) > 1:  # transformers reads one
        model.generation_config.eos_token_id = ends
    blocks = gguf_codes.Blocks() if widen else gguf_codes.find(path, reader, model)
    if blocks.tensors:
        gguf_codes.save(blocks, model, folder)
    else:
        model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(
            0o644
        )  # safetensors makes files readable by their owner only, and a server often runs as another user
    return Conversion(inspect_model(EngineConfig(model=str(folder))), blocks.kinds, blocks.widened)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn what `transformers` raises for a file that it cannot read into our error."""
    try:
        yield
    except LookupError:
        raise refuse(f"{path}: its tokenizer lacks fields, or one is of a token that is not there") from None
    except RuntimeError:
        raise refuse(f"{path}: its weights are not those of the model that its fields describe") from None
    except ValueError as error:  # transformers does not know the architecture
        raise refuse(f"{path}: {str(error).partition(chr(10))[0]}") from None
    except (TypeError, ArithmeticError, StrictDataclassError):  # such as gpt-oss with a rotary scaling
        raise refuse(f"{path}: transformers {transformers.__version__} cannot read its fields") from None


def _check_depth(path: Path, reader: gguf.GGUFReader) -> None:
    """Refuse another number of blocks than that of the tensors. `transformers` leaves out those that are too many, and
    makes as many as the field says before it looks for weights.
    """
    fields = reader.fields
    architecture = fields.get(gguf.Keys.General.ARCHITECTURE)
    if architecture is None:
        raise refuse(f"{path} lacks the field {gguf.Keys.General.ARCHITECTURE}")
    name = gguf.Keys.LLM.BLOCK_COUNT.format(arch=architecture.contents())
    blocks = [int(found[1]) for each in reader.tensors if (found := _BLOCK.search(each.name))]
    if name in fields and (count := fields[name].contents()) != (there := 1 + max(blocks, default=-1)):
        raise refuse(f"{path}: its field {name} is {count!r}, and its tensors are of {there} blocks")


def write(folder: Path, path: Path, weights: str, progress: Progress) -> None:
    """Write a checkpoint as one GGUF file.

    Args:
        folder: in the Hugging Face layout.
        path: the new file.
        weights: a key of `WEIGHTS`.
        progress: called after each tensor.

    Raises:
        LockstepError: a feature of the model or its tokenizer cannot be written.
    """
    info = inspect_model(EngineConfig(model=str(folder)))
    config = read_json(folder / "config.json")
    if info.model_type not in _WRITABLE:
        raise refuse(f"model {folder}: {info.model_type} is not among what is written: {', '.join(_WRITABLE)}")
    if info.quantization is not None:
        method = info.quantization.method
        raise refuse(f"model {folder}: it is quantized ({method}); GGUF files are written from float checkpoints")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"  # the older name is "type"
    for what, is_there in (
        (f"rope_type {rope_type}", rope_type != "default"),
        ("a sliding window", config.get("sliding_window") and config.get("use_sliding_window", True)),
        ("biases of attention's output", config.get("attention_bias") and info.model_type != "qwen2"),
        ("biases in its MLP", config.get("mlp_bias")),
    ):
        if is_there:
            raise refuse(f"model {folder}: {what} is not written")
    arch = _WRITABLE[info.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], use_temp_file=True)
    writer.add_file_type(_FILE_TYPES[weights])
    _add_model(writer, info, config, float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    _add_tokenizer(writer, folder, info)
    _add_weights(writer, info, config, weights, progress)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_model(writer: gguf.GGUFWriter, info: ModelInfo, config: Mapping[str, Any], rope_theta: float) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or info.hidden_size // heads
    writer.add_name(info.name)
    writer.add_context_length(info.context_length)
    writer.add_embedding_length(info.hidden_size)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(info.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, info: ModelInfo) -> None:
    tokenizer = read_json(folder / "tokenizer.json")
    model, splits = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(splits):
        raise refuse(f"model {folder}: only byte-level BPE tokenizers are written")
    names = {id_: token for token, id_ in model["vocab"].items()}
    added = {each["id"]: each for each in tokenizer.get("added_tokens", [])}
    tokens, kinds = [], []
    for id_ in range(info.vocab_size):
        special = added.get(id_)
        tokens.append(special["content"] if special else names.get(id_, f"[unused{id_}]"))
        if special:
            kinds.append(gguf.TokenType.CONTROL if special["special"] else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL if id_ in names else gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name_of_split(folder, splits))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    writer.add_string(gguf.Keys.Tokenizer.HF_JSON, json.dumps(tokenizer, ensure_ascii=False))
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    ids = {token: id_ for id_, token in enumerate(tokens)}
    for key, add in (("bos_token", writer.add_bos_token_id), ("pad_token", writer.add_pad_token_id)):
        content = _text_of(settings.get(key))
        if content in ids:
            add(ids[content])
    _add_end_ids(writer, info, tokens, _text_of(settings.get("eos_token")))
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    if template := _chat_template(folder, settings):
        writer.add_chat_template(template)


def _add_end_ids(writer: gguf.GGUFWriter, info: ModelInfo, tokens: Sequence[str], eos_token: str | None) -> None:
    """Write the ids that end an answer: one as EOS, others as EOT and EOM, all in a field of our own."""
    if not info.eos_ids:
        return
    first = next((each for each in info.eos_ids if tokens[each] == eos_token), info.eos_ids[0])
    writer.add_eos_token_id(first)
    others = [each for each in info.eos_ids if each != first]
    if others:
        writer.add_array(_END_IDS, list(info.eos_ids))
    of_message = next((each for each in others if "eom" in tokens[each]), None)
    if of_message is not None:
        writer.add_eom_token_id(of_message)
    of_turn = next((each for each in others if each != of_message), None)
    if of_turn is not None:
        writer.add_eot_token_id(of_turn)


def _end_ids(fields: Mapping[str, Any]) -> list[int]:
    if _END_IDS in fields:
        return [int(each) for each in fields[_END_IDS].contents()]
    keys = (gguf.Keys.Tokenizer.EOS_ID, gguf.Keys.Tokenizer.EOT_ID, gguf.Keys.Tokenizer.EOM_ID)
    return list(dict.fromkeys(int(fields[key].contents()) for key in keys if key in fields))


def _text_of(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which has it as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """The template, or several named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template") or ""
    if isinstance(given, str):
        return given
    return [each for each in given if isinstance(each, dict) and isinstance(each.get("template"), str)]


def name_of_split(folder: Path, splits: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way in which a pre-tokenizer splits texts into words.

    Raises:
        LockstepError: there is none.
    """
    parts = splits.get("pretokenizers", [splits])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"]
    if not patterns and any(part.get("use_regex") for part in parts):
        return "gpt-2"
    if len(patterns) == 1 and patterns[0] in WORD_SPLITS:
        return WORD_SPLITS[patterns[0]]
    raise refuse(f"model {folder}: llama.cpp has no known name for how its tokenizer cuts texts into words")


def _add_weights(
    writer: gguf.GGUFWriter, info: ModelInfo, config: Mapping[str, Any], weights: str, progress: Progress
) -> None:
    arch, heads = _WRITABLE[info.model_type], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    files = [safe_open(info.path / name, framework="pt") for name in info.weight_files]
    stored = [(file, name) for file in files for name in file.keys()]  # noqa: SIM118 - it is no dict
    for done, (file, name) in enumerate(stored):
        progress(done, len(stored))
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        value = file.get_tensor(name).float().numpy()
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise refuse(f"model {info.path}: tensor {name} has no name in GGUF")
        if arch is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = _interleaved(value, heads if "q_proj" in name else kv_heads)
        kind = WEIGHTS[weights] if value.ndim > 1 else gguf.GGMLQuantizationType.F32
        if value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:  # rows are no whole blocks: as llama.cpp does
            kind = gguf.GGMLQuantizationType.F16
        writer.add_tensor(renamed, gguf.quantize(value, kind), raw_dtype=kind)
    progress(len(stored), len(stored))


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection as llama.cpp rotates them: pairs side by side, not half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _special(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of tokenizer_config.json that a file's fields determine."""
    tokens = fields[gguf.Keys.Tokenizer.LIST]
    settings: dict[str, Any] = {}
    for name, key in (
        ("bos_token", gguf.Keys.Tokenizer.BOS_ID),
        ("eos_token", gguf.Keys.Tokenizer.EOS_ID),
        ("pad_token", gguf.Keys.Tokenizer.PAD_ID),
    ):
        if key in fields:
            settings[name] = tokens.contents(int(fields[key].contents()))
    if gguf.Keys.Tokenizer.ADD_BOS in fields:
        settings["add_bos_token"] = fields[gguf.Keys.Tokenizer.ADD_BOS].contents()
    templates = {"default": fields.get(gguf.Keys.Tokenizer.CHAT_TEMPLATE)}
    if gguf.Keys.Tokenizer.CHAT_TEMPLATES in fields:
        names = sorted(fields[gguf.Keys.Tokenizer.CHAT_TEMPLATES].contents())
        templates |= {name: fields.get(gguf.Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)) for name in names}
    given = [{"name": name, "template": field.contents()} for name, field in templates.items() if field is not None]
    if [each["name"] for each in given] == ["default"]:
        settings["chat_template"] = given[0]["template"]
    elif given:
        settings["chat_template"] = given
    return settings
