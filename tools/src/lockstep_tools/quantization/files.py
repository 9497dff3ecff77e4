"""Writes a quantized checkpoint in the compressed-tensors format, shard by shard, in safetensors only.

8-bit integers are written as `pack-quantized` (weights alone) or `int-quantized` (with activations, W8A8), e4m3 as
`float-quantized`, fewer bits as `pack-quantized`, with zero points if they have some.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lockstep_tools.quantization.rounding import Rounded

_SHARD_BYTES = 2**29
_COPIED = (
    "tokenizer*",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    "README.md",
    "LICENSE*",
    "modules.json",  # of an embedding model: its modules besides the decoder, which have directories
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/*",
)
_PACKED_ROWS = 8192
"""Rows that are packed at once: an integer takes 8 bytes meanwhile."""
_BITS = {"int4": 4, "int4 with zeros": 4, "int8": 8, "fp8": 8, "ternary": 2}


class Shards:
    """Collects tensors and writes a file whenever enough have come.

    Args:
        folder: an empty directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        self._tensors[name] = tensor.contiguous().clone()
        self._bytes += tensor.nbytes
        if self._bytes >= _SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._tensors:
            try:
                save_file(self._tensors, self._folder / f"shard-{len(self._files)}", metadata={"format": "pt"})
            except SafetensorError as error:  # what the library makes of a full disk
                raise OSError(str(error)) from None
            self._files.append(list(self._tensors))
        self.total_bytes += self._bytes
        self._tensors, self._bytes = {}, 0

    def finish(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            made = self._folder / f"shard-{number}"
            made.chmod(0o644)  # safetensors makes files readable by their owner only; a server may run as another user
            made.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def tensors_of(module: str, rounded: Rounded, *, activations: bool) -> dict[str, torch.Tensor]:
    """The tensors of a quantized matrix, by name."""
    if rounded.kind == "fp8" or activations:
        return {f"{module}.weight": rounded.codes, f"{module}.weight_scale": rounded.scales}
    bits = _BITS[rounded.kind]
    tensors = {
        f"{module}.weight_packed": pack(rounded.codes, bits),
        f"{module}.weight_scale": rounded.scales,
        f"{module}.weight_shape": torch.tensor(rounded.codes.shape, dtype=torch.int64),
    }
    if rounded.zeros is not None:
        tensors[f"{module}.weight_zero_point"] = pack(rounded.zeros.t(), bits).t()  # along the outputs
    return tensors


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers [out, in] → int32 [out, in * bits / 32, rounded up], the first in the lowest bits, each plus
    2^(bits - 1).
    """
    starts = range(0, len(codes), _PACKED_ROWS)
    return torch.cat([_pack_rows(codes[start : start + _PACKED_ROWS], bits) for start in starts])


def _pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    unsigned = codes.to(torch.int64) + 2 ** (bits - 1)
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word)).reshape(len(codes), -1, per_word)
    words = (unsigned << (torch.arange(per_word) * bits)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


Style = tuple[str, int | None, bool]
"""What matrices of a group have in common: kind, group size, activations."""


def quantization_config(modules: Mapping[str, Style], ignored: Iterable[str]) -> dict[str, Any]:
    """The description of the written tensors.

    Args:
        modules: names of the quantized modules → what they are.
        ignored: names of linears that are not quantized.
    """
    by_style: dict[Style, list[str]] = {}
    for module, style in modules.items():
        by_style.setdefault(style, []).append(module)
    groups, formats = {}, set()
    for number, (style, names) in enumerate(by_style.items()):
        form = _format(style)
        formats.add(form)
        kind, group, activations = style
        strategy = "tensor" if kind == "ternary" else "channel" if group is None else "group"
        groups[f"group_{number}"] = {
            "targets": _patterns(names),
            "weights": _arguments(kind, strategy, group, dynamic=False),
            "input_activations": _arguments("int8", "token", None, dynamic=True) if activations else None,
            "output_activations": None,
            "format": form,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(style: Style) -> str:
    kind, _, activations = style
    return "float-quantized" if kind == "fp8" else "int-quantized" if activations else "pack-quantized"


def _arguments(kind: str, strategy: str, group: int | None, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": _BITS[kind],
        "type": "float" if kind == "fp8" else "int",
        "symmetric": kind != "int4 with zeros",
        "strategy": strategy,
        "group_size": group,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


def _patterns(names: Iterable[str]) -> list[str]:
    """Names of modules as regular expressions, one for all layers (and experts) that have the same rest of the name."""
    numbers: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        parts = re.split(r"\.(\d+)\.", name)  # text, number, text, number, text
        key = (*parts[0::2], str(len(parts)))
        layer = parts[1] if len(parts) > 1 else ""
        numbers.setdefault(key, set()).add(layer)
    patterns = []
    for (*texts, _), layers in numbers.items():
        pattern = re.escape(texts[0])
        for place, text in enumerate(texts[1:]):
            choice = "|".join(sorted(layers, key=int)) if place == 0 else r"\d+"
            pattern += rf"\.({choice})\." + re.escape(text)
        patterns.append(f"re:{pattern}$")
    return sorted(patterns)


def copy_rest(source: Path, folder: Path, settings: Mapping[str, Any]) -> None:
    """Write config.json and copy the tokenizer and what belongs to it."""
    for glob in _COPIED:
        for file in source.glob(glob):
            if file.is_file():
                target = folder / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
