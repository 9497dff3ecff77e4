"""The tensors of a checkpoint's safetensors files, by name, read in slices. Files are mapped, not read; `stored` says
where a tensor is, for callers that read it themselves.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lockstep_common.errors import LockstepError
from safetensors import safe_open

from lockstep_engine.model_config import refuse
from lockstep_engine.weight_stream import Stored

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The format's names of dtypes of values that are not codes."""


class Tensors:
    """Args:
    path: the checkpoint's directory.
    files: names of its safetensors files.
    """

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        self._path = path
        self._versions = {path / name: _version(path / name) for name in files}  # before they are mapped
        self._files = [safe_open(path / name, framework="pt") for name in files]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict
        self._paths = dict(zip(self._files, (path / name for name in files), strict=True))
        self._offsets: dict[Path, dict[str, int]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor that is there."""
        return list(self._owner[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor that is there, as the format names it, such as F16, I32 or F8_E4M3."""
        return str(self._owner[name].get_slice(name).get_dtype())

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds values and not codes."""
        return self.dtype(name) in _FLOATS

    def stored(self, name: str) -> Stored:
        """Where a tensor that holds values is."""
        path = self._paths[self._owner[name]]
        if path not in self._offsets:
            try:
                self._offsets[path] = _offsets(path)
            except (OSError, ValueError, KeyError):
                raise self._changed(path) from None  # the library has read this header
        return Stored(path, self._offsets[path][name], tuple(self.shape(name)), _FLOATS[self.dtype(name)])

    def check_unchanged(self) -> None:
        """After what is `stored` was read from the files, which others may replace: a mapped file stays what it was.

        Raises:
            LockstepError: a file is another one now; names it.
        """
        for path, version in self._versions.items():
            if _version(path) != version:
                raise self._changed(path)

    def _changed(self, path: Path) -> LockstepError:
        return self.refusal(f"{path.name} was changed while it was read")

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A slice of a tensor; all of it without an index."""
        if not index:
            tensor: torch.Tensor = self._owner[name].get_tensor(name)
            return tensor
        part: torch.Tensor = self._owner[name].get_slice(name)[index]
        return part

    def numbers(self, name: str, *index: slice) -> torch.Tensor:
        """As `read`, in float32."""
        return self.read(name, *index).float()

    def expect(self, name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str] = ()) -> list[int]:
        """The shape of a tensor that has to be there, in one of some shapes and of one of some dtypes.

        Raises:
            LockstepError: it is missing, or is otherwise; names it.
        """
        if name not in self._owner:
            raise self.refusal(f"the checkpoint has no tensor {name}, which its quantization needs")
        shape, dtype = self.shape(name), self.dtype(name)
        if shapes and shape not in [list(each) for each in shapes]:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise self.refusal(f"tensor {name} has shape {shape}, its quantization implies {wanted}")
        if dtypes and dtype not in dtypes:
            raise self.refusal(f"tensor {name} is of type {dtype}, its quantization implies {' or '.join(dtypes)}")
        return shape

    def matrix(self, name: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """As `expect`, for a tensor of two dimensions of any size."""
        shape = self.expect(name, (), dtypes)
        if len(shape) != 2 or math.prod(shape) == 0:
            raise self.refusal(f"tensor {name} has shape {shape}, its quantization implies a matrix")
        return shape[0], shape[1]

    def refusal(self, sentence: str) -> LockstepError:
        """The error for a checkpoint that is damaged or not supported."""
        return refuse(f"model {self._path}: {sentence}")


def _version(path: Path) -> tuple[int, ...]:
    """What is different when a file was replaced or written to; empty: it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor of a file begins. The header is a JSON object behind its length in eight bytes; offsets count
    from its end (https://huggingface.co/docs/safetensors). The library has checked it.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"}
