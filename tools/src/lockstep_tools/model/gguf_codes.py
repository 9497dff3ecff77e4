"""The quantized weights of a GGUF file, written as the blocks that the engine reads (`lockstep_engine.quantized.gguf`).

`transformers` builds the model, with values. A weight is written as blocks only if the engine reads them as these very
values, so that no rule about an architecture is repeated here. Rows may be in another order in the file; blocks lie
within rows.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine.model_config import read_json, refuse
from lockstep_engine.quantized.gguf import TYPES, BlockType, stored_name
from lockstep_engine.quantized.schemes import GGUF_METHOD
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

_COMPARED = 2**24
"""Values that are compared at once."""
FILE_BYTES = 2**32
"""Most bytes of blocks in a file, as far as one tensor does not have more."""
_FLOATS = ("F32", "F16", "BF16", "F64")
_INDEX = "model.safetensors.index.json"


@dataclass
class Blocks:
    """The weights of a model that are written as blocks."""

    tensors: dict[str, gguf.ReaderTensor] = field(default_factory=dict)
    """By the name that the model has for the weight."""
    orders: dict[str, torch.Tensor] = field(default_factory=dict)
    """[out]: the row of the file that each row of the weight is, where it is another one."""
    widened: Counter[str] = field(default_factory=Counter)
    """Tensors of the file that are quantized and are not among these, by their types."""

    @property
    def kinds(self) -> Counter[str]:
        """How many weights there are of each type."""
        return Counter(_kind(tensor) for tensor in self.tensors.values())


def find(path: Path, reader: gguf.GGUFReader, model: PreTrainedModel) -> Blocks:
    """Look for the weights whose blocks have the model's values.

    Args:
        path: the file, for messages.
        reader: of it.
        model: that `transformers` has read from it.

    Raises:
        LockstepError: a tensor has values that are no finite numbers; names it.
    """
    given = {tensor.name: tensor for tensor in reader.tensors}
    found = Blocks(widened=Counter(_kind(each) for each in reader.tensors if each.tensor_type.name not in _FLOATS))
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return found
    config = model.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    counts = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    heads = {count for count in counts if isinstance(count, int) and count > 0}
    for name, value in model.state_dict().items():
        tensor = given.get(names.get_name(name, try_suffixes=(".weight",)) or "")
        if tensor is None or not (value.dim() == tensor.data.ndim == 2) or _kind(tensor) not in TYPES:
            continue
        blocks = torch.from_numpy(np.array(tensor.data))
        for order in (None, *(_turned(len(value), count) for count in heads if len(value) % (2 * count) == 0)):
            rows = blocks if order is None else blocks[order]
            if len(rows) == len(value) and _has_values(f"{path}: tensor {tensor.name}", rows, tensor, value):
                found.tensors[name] = tensor
                found.widened[_kind(tensor)] -= 1
                if order is not None:
                    found.orders[name] = order
                break
    found.widened = +found.widened
    return found


def save(found: Blocks, model: PreTrainedModel, folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write a model's configuration and weights, those that were found as blocks, into a directory that exists.

    Args:
        found: at least one weight of the model.
        model: in which they were found.
        folder: the directory.
        file_bytes: most bytes of blocks in a file, as far as one tensor does not have more.
    """
    state = model.state_dict()
    kept = {state[name].data_ptr() for name in found.tensors}
    model.save_pretrained(
        folder, state_dict={name: each for name, each in state.items() if each.data_ptr() not in kept}
    )
    parts = list(_files(found, file_bytes))
    for number, part in enumerate(parts, 1):
        tensors = {}
        for name in part:
            blocks = torch.from_numpy(np.array(found.tensors[name].data))
            order = found.orders.get(name)
            tensors[stored_name(name, _kind(found.tensors[name]))] = blocks if order is None else blocks[order]
        save_file(tensors, folder / f"blocks-{number:05}-of-{len(parts):05}.safetensors", metadata={"format": "pt"})
    _write_index(folder)
    settings = read_json(folder / "config.json")
    settings["quantization_config"] = {"quant_method": GGUF_METHOD, "types": sorted(found.kinds)}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def describe(kinds: Mapping[str, int]) -> str:
    """Types and how many weights there are of each."""
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))


def _kind(tensor: gguf.ReaderTensor) -> str:
    return str(tensor.tensor_type.name).lower()


def _turned(rows: int, heads: int) -> torch.Tensor:
    """The rows of a file's queries or keys in the model's order: llama.cpp rotates pairs that are side by side."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _has_values(what: str, blocks: torch.Tensor, tensor: gguf.ReaderTensor, value: torch.Tensor) -> bool:
    type_: BlockType = TYPES[_kind(tensor)]
    step = max(1, _COMPARED // value.shape[1])
    for first in range(0, len(value), step):
        wide = type_.coded(blocks[first : first + step]).values()
        if not bool(wide.isfinite().all()):
            raise _damaged(what)
        if not torch.equal(wide.to(value.dtype), value[first : first + step]):
            return False
    return True


def _damaged(what: str) -> LockstepError:
    return refuse(f"{what} has values that are no finite numbers: damaged scales")


def _files(found: Blocks, file_bytes: int) -> Iterator[list[str]]:
    """The names of the weights of each file."""
    part: list[str] = []
    nbytes = 0
    for name, tensor in found.tensors.items():
        if part and nbytes + tensor.n_bytes > file_bytes:
            yield part
            part, nbytes = [], 0
        part.append(name)
        nbytes += int(tensor.n_bytes)
    if part:
        yield part


def _write_index(folder: Path) -> None:
    """List the tensors of all safetensors files, as the Hugging Face layout has it for more files than one."""
    files = sorted(folder.glob("*.safetensors"))
    places: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            places |= dict.fromkeys(stored.keys(), file.name)
    content = {"metadata": {"total_size": sum(map(_tensor_bytes, files))}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tensor_bytes(file: Path) -> int:
    """Those behind the header, whose length is in the first eight bytes."""
    with file.open("rb") as content:
        return file.stat().st_size - 8 - int.from_bytes(content.read(8), "little")
