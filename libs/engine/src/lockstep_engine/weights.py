"""Loads a checkpoint into a model that `models` has narrowed to this rank. Every slice is read once, directly into its
parameter; a head that is said to be the embedding is compared with it before.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from lockstep_common.errors import LockstepError
from lockstep_common.freed_memory import return_freed_memory
from torch import nn

from lockstep_engine.architectures import ARCHITECTURES
from lockstep_engine.gpu_codes import CodedWeight
from lockstep_engine.interception import intercepted
from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.tiles import LEAST_GROUP
from lockstep_engine.linear import ColumnLinear, Piece, RowLinear, VocabEmbedding, VocabHead, keep_codes
from lockstep_engine.model_config import ModelInfo, refuse
from lockstep_engine.quantized.coded import IN_WORD, CodedMatrix, CodeForm, KeptCodes, StoredWeight, pack, shared_form
from lockstep_engine.quantized.opening import has_weight, open_weight
from lockstep_engine.quantized.tensors import Tensors
from lockstep_engine.weight_stream import CHUNK_BYTES, Chunk, chunks, copy_chunks

_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of dtypes that the CPU kernels widen."""
_LARGEST_CODE = 127.0
"""No integer is larger."""
COMPARED_ELEMENTS = 2**24
"""Elements of each of two tensors that are compared at once."""
Product = ColumnLinear | RowLinear | VocabHead
"""Layers that may keep codes."""


class Checkpoint:
    """The tensors of a checkpoint as values, by the names that the model has for them, whether they are stored plain or
    quantized.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._path = info.path
        self._tensors = Tensors(info.path, info.weight_files)
        self._layout = info.quantization.layout if info.quantization else None
        self._spellings = ARCHITECTURES[info.model_type].spellings

    def find(self, name: str) -> str | None:
        """The tensor's name in this checkpoint, which may lack the model's prefix or spell module names differently.
        None: the checkpoint does not have the tensor.
        """
        spellings = [name, *(name.replace(ours, theirs) for ours, theirs in self._spellings)]
        for spelling in (*spellings, *(each.partition(".")[2] for each in spellings)):
            if self._has(spelling):
                return spelling
        return None

    def narrow_dtype(self, pieces: Iterable[Piece]) -> torch.dtype | None:
        """The dtype of 16 bits in which all of these slices are stored; None if there is no such dtype."""
        names = [self.find(piece.source) for piece in pieces]
        stored = {None if name is None or self._quantized(name) else self._tensors.dtype(name) for name in names}
        return _NARROW.get(stored.pop() or "") if len(stored) == 1 else None

    def code_form(self, pieces: Iterable[Piece]) -> CodeForm | None:
        """The form in which the codes of all of these slices can stay in memory, that of 8 bits which holds them where
        they differ; None if there is no such form.
        """
        forms: set[CodeForm | None] = set()
        for piece in pieces:
            name = self.find(piece.source)
            weight = None if name is None else self._quantized(name)
            form = weight.code_form if isinstance(weight, CodedMatrix) else None
            begins_group = form is None or form.group is None or piece.dim == 0 or piece.start % form.group == 0
            forms.add(form if begins_group else None)
        known = [form for form in forms if form is not None]
        if len(known) < len(forms):
            return None
        return known[0] if len(known) == 1 else shared_form(known)

    def codes(self, piece: Piece, shape: list[int], form: CodeForm) -> KeptCodes:
        """As `slice`, of a tensor that has a `code_form`: what stays in memory in this form, its own or a wider one."""
        name, weight, dim, _ = self._located(piece, shape)
        assert isinstance(weight, CodedMatrix)
        part = slice(piece.start, piece.start + piece.length)
        every = [slice(0, size) for size in weight.shape]
        coded = weight.coded(part, every[1]) if dim == 0 else weight.coded(every[0], part)
        kept = coded.kept(form)
        numbers = torch.tensor(form.table or (_LARGEST_CODE,))
        largest = kept.scales.abs() * numbers.abs().max()
        if kept.offsets is not None:
            largest = largest + kept.offsets.abs()
        if not bool(largest.isfinite().all()):  # a NaN is the largest
            raise self._damaged(name)
        return kept

    def slice(self, piece: Piece, shape: list[int]) -> torch.Tensor:
        """The part of a tensor that `piece` describes. Refuses a checkpoint whose tensor has another shape."""
        name, weight, dim, transposed = self._located(piece, shape)
        end = piece.start + piece.length
        if weight is not None:
            values = weight.read(dim, piece.start, end)
            if not bool(values.isfinite().all()):
                raise self._damaged(name)
            return values
        index = [slice(None)] * len(self._tensors.shape(name))
        index[dim] = slice(piece.start, end)
        part = self._tensors.read(name, *index)
        return part.t() if transposed else part

    def chunks(self, piece: Piece, target: torch.Tensor, most_bytes: int) -> Iterator[Chunk]:
        """As `slice`, of a checkpoint that is not quantized: what goes into a parameter `target`, in chunks
        of so many bytes.
        """
        name, _, dim, transposed = self._located(piece, list(target.shape))
        part = target.narrow(piece.dim, piece.offset, piece.length)
        stored = self._tensors.stored(name)
        yield from chunks(stored, dim, piece.start, part.t() if transposed else part, most_bytes)

    def equal(self, one: Piece, other: Piece, shape: list[int]) -> bool:
        """Whether two slices, as for `slice`, have the same values in the same dtype. Both are read, up to the first
        part that differs.
        """
        step = max(1, COMPARED_ELEMENTS * shape[one.dim] // math.prod(shape))
        for first in range(0, one.length, step):
            length = min(step, one.length - first)
            parts = [self.slice(replace(each, start=each.start + first, length=length), shape) for each in (one, other)]
            if parts[0].dtype != parts[1].dtype or not torch.equal(*parts):
                return False
        return True

    def _located(self, piece: Piece, shape: list[int]) -> tuple[str, StoredWeight | None, int, bool]:
        """The name of a piece's tensor, its weight if it is quantized, and the dimension of the slice; whether the
        tensor is stored transposed.
        """
        name = self.find(piece.source)
        if name is None:
            raise refuse(f"model {self._path}: the checkpoint has no tensor {piece.source}")
        weight = self._quantized(name)
        if weight is None and not self._tensors.is_float(name):
            raise refuse(
                f"model {self._path}: tensor {name} is of type {self._tensors.dtype(name)}, and config.json has no "
                "quantization_config that explains it"
            )
        stored = list(weight.shape) if weight is not None else self._tensors.shape(name)
        dim, transposed = piece.dim, piece.transposed and weight is None
        if transposed:
            dim, shape = 1 - dim, shape[::-1]
        end = piece.start + piece.length
        implied = [*shape[:dim], piece.full_size or max([end, *stored[dim : dim + 1]]), *shape[dim + 1 :]]
        if stored != implied:
            raise refuse(f"model {self._path}: tensor {name} has shape {stored}, config.json implies {implied}")
        return name, weight, dim, transposed

    def check_unchanged(self) -> None:
        """See `Tensors.check_unchanged`."""
        self._tensors.check_unchanged()

    def expect_count(self, pieces: list[Piece]) -> None:
        """Refuse a checkpoint that has one expert more than these pieces are of."""
        if (last := pieces[-1].index) is not None:
            prefix, _, *part = pieces[0].source.rsplit(".", 3)
            if (name := self.find(".".join([prefix, str(last + 1), *part]))) is not None:
                raise refuse(f"model {self._path}: there is a tensor {name}, config.json implies {last + 1} experts")

    def _damaged(self, name: str) -> LockstepError:
        return refuse(f"model {self._path}: tensor {name} has values that are no finite numbers: damaged scales")

    def _quantized(self, name: str) -> StoredWeight | None:
        return None if self._layout is None else open_weight(self._tensors, name, self._layout)

    def _has(self, name: str) -> bool:
        return name in self._tensors if self._layout is None else has_weight(self._tensors, name, self._layout)


def load_weights(
    model: nn.Module,
    info: ModelInfo,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    codes_on_gpu: bool = False,
    on_formed: Callable[[], None] = lambda: None,
) -> None:
    """Allocate every parameter of `model`, which is on the meta device, on `device`, and read its values.

    Where the CPU kernels run, weights that a checkpoint stores in 16 bits or as codes of 8 or 4 bits stay so in a model
    of float32: the kernels widen them exactly, so that every result has the bits that widened weights would give. Only
    where the checkpoint's scheme multiplies integers they do so, too, and results have bits of their own.

    Args:
        model: narrowed to this rank.
        info: the checkpoint.
        device: of the parameters.
        on_progress: called with the bytes loaded so far and in total.
        codes_on_gpu: a GPU's kernels will compute: codes of 8 or 4 bits stay so for them, in a model of any type.
        on_formed: called when it is known which weights stay codes, before memory is allocated.

    Raises:
        LockstepError: a tensor is missing or has the wrong shape.
    """
    checkpoint = Checkpoint(info)
    buffers = _unsaved_buffers(model)
    _settle_tied(model, checkpoint)
    if codes_on_gpu or (device.type == "cpu" and cpu.build is not None):
        _keep_narrow(model, checkpoint, on_gpu=codes_on_gpu)
    on_formed()
    model.to_empty(device=device)
    with intercepted() if device.type == "cpu" else nullcontext():  # equal tables on every CPU
        for module in buffers:
            model._init_weights(module)  # type: ignore[operator]
    parameters = list(distinct_parameters(model))
    total = sum(map(_kept_bytes, parameters))
    if device.type == "cuda" and info.quantization is None:
        stream_parameters(parameters, checkpoint, device, lambda done: on_progress(done, total))
        return
    _read_parameters(model, parameters, checkpoint, lambda done: on_progress(done, total))


def _read_parameters(
    model: nn.Module,
    parameters: list[tuple[nn.Module, str, torch.Tensor]],
    checkpoint: Checkpoint,
    on_progress: Callable[[int], None],
) -> None:
    """Read parameters one after the other, and lay out each layer that is complete."""
    done = 0
    for module, own in itertools.groupby(parameters, lambda each: each[0]):
        for entry in own:
            _, name, parameter = entry
            is_coded = isinstance(module, Product) and module.code_form is not None
            kept = (module.weight, module.scales, module.zeros, module.offsets) if is_coded else ()
            if not any(parameter is each for each in kept):
                fill(checkpoint, pieces_of(module, name, parameter, checkpoint), parameter)
            elif parameter is module.weight:
                fill_codes(checkpoint, module)
            done += _kept_bytes(entry)
            on_progress(done)
        if isinstance(module, ColumnLinear | RowLinear):
            _pack(module)  # now: codes of four bits take twice their memory until they are packed
    for layer in model.modules():
        if isinstance(layer, VocabHead):  # it may be an embedding that is read after it
            _pack(layer)


def stream_parameters(
    parameters: list[tuple[nn.Module, str, torch.Tensor]],
    checkpoint: Checkpoint,
    device: torch.device,
    on_progress: Callable[[int], None],
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Read parameters on a device by `weight_stream`, of a checkpoint that is not quantized.

    Args:
        parameters: see `distinct_parameters`.
        checkpoint: has all of them.
        device: of the parameters.
        on_progress: called with the bytes loaded so far.
        chunk_bytes: read at once.
    """

    def work() -> Iterator[Chunk]:
        for module, name, parameter in parameters:
            pieces = pieces_of(module, name, parameter, checkpoint)
            if not pieces:
                parameter.data.zero_()
            for piece in pieces:
                yield from checkpoint.chunks(piece, _target(piece, parameter), chunk_bytes)

    done = 0

    def note(chunk: Chunk) -> None:
        nonlocal done
        done += chunk.target.nbytes
        on_progress(done)

    copy_chunks(work(), device, note)
    checkpoint.check_unchanged()
    if done < (total := sum(parameter.nbytes for _, _, parameter in parameters)):  # zeros are in no chunk
        on_progress(total)


def _target(piece: Piece, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that a piece's shape is of."""
    return parameter.data if piece.index is None else parameter.data[piece.index]


def _pack(layer: Product) -> None:
    layer.pack()
    return_freed_memory()


def _kept_bytes(entry: tuple[nn.Module, str, torch.Tensor]) -> int:
    """Bytes that a parameter takes when it is packed."""
    module, _, parameter = entry
    if isinstance(module, Product) and module.code_form is not None and parameter is module.weight:
        # A GPU's codes are packed from the beginning.
        return parameter.nbytes if module.codes_on_gpu else parameter.nbytes * module.code_form.bits // 8
    return parameter.nbytes


def _settle_tied(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Where the configuration says that the head is the embedding, load for both the one that the checkpoint has, and
    each its own if it has two that differ, as `transformers` does. Many checkpoints have the same values twice: to know
    that takes one more read of this rank's rows, and saves their memory.
    """
    modules = list(model.modules())
    head = next((each for each in modules if isinstance(each, VocabHead) and each.tied), None)
    embedding = next((each for each in modules if isinstance(each, VocabEmbedding)), None)
    if head is None or embedding is None:
        return
    (table,), (own,) = embedding.pieces["weight"], head.pieces["weight"]
    if checkpoint.find(own.source) is None:
        head.pieces["weight"] = [table]
    elif checkpoint.find(table.source) is None:
        embedding.pieces["weight"] = [own]
    elif not checkpoint.equal(table, own, list(head.weight.shape)):
        head.untie()


def _keep_narrow(model: nn.Module, checkpoint: Checkpoint, *, on_gpu: bool) -> None:
    """Give float32 weights that only our own layers read the 16 bits or the codes of the checkpoint, before they are
    allocated; on a GPU the codes alone, to weights of any type. Embeddings and experts that are quantized are widened.
    A head that is such an embedding has the codes beside it, since a product reads all of them and a look-up one row.
    """
    for module in model.modules():
        if isinstance(module, Product | VocabEmbedding):
            weight = module.weight
            pieces = [piece for piece in module.pieces["weight"] if piece.length > 0]
            if weight.dtype is not torch.float32 and not on_gpu:
                continue
            if not on_gpu and (narrow := checkpoint.narrow_dtype(pieces)) is not None:
                weight.data = weight.data.to(narrow)
            elif not isinstance(module, VocabEmbedding) and (form := checkpoint.code_form(pieces)) is not None:
                parts = module.parts if isinstance(module, RowLinear) else 1
                inputs = module.in_features // parts
                if on_gpu and (form.group or LEAST_GROUP) % LEAST_GROUP:
                    continue
                if form.integers and (on_gpu or not cpu.takes_integers(inputs)):
                    form = replace(form, integers=False)
                if (form := form.fitting(inputs, IN_WORD)) is not None:
                    if isinstance(module, VocabHead) and module.tied:
                        module.untie()
                    keep_codes(module, form, on_gpu=on_gpu)


def fill_codes(checkpoint: Checkpoint, layer: Product) -> None:
    """Read the codes, scales, zero points and offsets of a layer that keeps them. A head's rows beyond the vocabulary,
    whose logits are never read, become like its first: equal zero points then stay equal, and are part of the table.
    """
    assert layer.code_form is not None
    assert layer.scales is not None
    for piece in layer.pieces["weight"]:
        if piece.length > 0:
            kept = checkpoint.codes(piece, [len(layer.weight), layer.in_features], layer.code_form)
            in_word = layer.in_features // layer.weight.shape[1]
            codes = kept.codes if in_word == 1 else pack(kept.codes.to(layer.weight.device))
            unit = in_word if piece.dim == 1 else 1
            layer.weight.data.narrow(piece.dim, piece.offset // unit, piece.length // unit).copy_(codes)
            rows = (piece.offset, piece.length) if piece.dim == 0 else (0, len(layer.weight))
            layer.scales.data.narrow(0, *rows).copy_(kept.scales)
            for target, values in ((layer.zeros, kept.zeros), (layer.offsets, kept.offsets)):
                if target is not None and values is not None:
                    target.data.narrow(0, *rows).copy_(values)
    if isinstance(layer, VocabHead):
        existing = sum(piece.length for piece in layer.pieces["weight"])
        for parameter in (layer.weight, layer.scales, layer.zeros, layer.offsets):
            if parameter is not None:
                parameter.data[existing:] = parameter.data[:1]


def widen_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """Give layers that keep codes for a GPU's kernels their values instead, because no kernel can run after all.

    Args:
        model: with its weights loaded.
        dtype: of the values.
    """
    for layer in model.modules():
        if isinstance(layer, Product) and isinstance(layer.packed, CodedWeight):
            coded = layer.packed
            weight = torch.empty(len(layer.weight), layer.in_features, dtype=dtype, device=layer.weight.device)
            for rows in coded.parts():
                weight[rows] = coded.values(rows)
            layer.weight.data, layer.packed, layer.code_form = weight, None, None


def fill(checkpoint: Checkpoint, pieces: list[Piece], parameter: torch.Tensor) -> None:
    """Read the pieces of a parameter into it; one that has none is zero on this rank."""
    if not pieces:
        parameter.data.zero_()
    for piece in pieces:
        target = _target(piece, parameter)
        values = checkpoint.slice(piece, list(target.shape))
        target.narrow(piece.dim, piece.offset, piece.length).copy_(values)


def distinct_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(module, name in the model, parameter or stored buffer). Tied ones are yielded once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        stored = [
            each for each in module.named_buffers(recurse=False) if each[0] not in module._non_persistent_buffers_set
        ]
        for name, parameter in (*module.named_parameters(recurse=False), *stored):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, f"{prefix}.{name}", parameter


def pieces_of(module: nn.Module, name: str, parameter: torch.Tensor, checkpoint: Checkpoint) -> list[Piece]:
    """The slices of checkpoint tensors that a parameter of `module` holds on this rank; `name` is its name in the
    model.
    """
    ours = getattr(module, "pieces", None)
    if ours is not None:
        pieces: list[Piece] = ours[name.rpartition(".")[2]]
        return [piece for piece in pieces if piece.length > 0]
    if parameter.dim() == 3:  # experts, stacked
        plain = re.sub(r"\.experts\.parts\.\d+\.", ".experts.", name)  # inside SummedExperts
        size, rank = getattr(module, "narrowed", (1, 0))
        for found in _expert_pieces(plain, parameter, size, rank):
            if checkpoint.find(found[0].source) is not None:
                checkpoint.expect_count(found)
                return found
    return [Piece(name, 0, 0, parameter.shape[0], 0, full_size=parameter.shape[0])]


def _unsaved_buffers(model: nn.Module) -> list[nn.Module]:
    """Modules with buffers that a checkpoint does not have and that are computed, such as rotary frequencies."""
    return [module for module in model.modules() if module._non_persistent_buffers_set]


def _expert_pieces(name: str, parameter: torch.Tensor, size: int, rank: int) -> Iterator[list[Piece]]:
    """The ways in which checkpoints store a stacked parameter of experts: one tensor for each expert, or one for all.

    Yields:
        For each way the pieces to read if the checkpoint has the tensor of the first one.
    """
    prefix, _, kind = name.rpartition(".")
    count, rows, columns = parameter.shape
    inner, wide, full = rows // 2, rows // 2 * size, columns * size
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        pieces: list[Piece] = []
        for expert in range(count):
            base = f"{prefix}.{expert}"
            if kind == "gate_up_proj":
                pieces.append(Piece(f"{base}.{gate}.weight", 0, rank * inner, inner, 0, expert, wide))
                pieces.append(Piece(f"{base}.{up}.weight", 0, rank * inner, inner, inner, expert, wide))
            elif kind == "down_proj":
                pieces.append(Piece(f"{base}.{down}.weight", 1, rank * columns, columns, 0, expert, full))
        if pieces:
            yield pieces
    if size == 1:
        yield [Piece(name, 0, 0, count, 0, full_size=count)]
    elif kind == "gate_up_proj":
        starts = (rank * inner, wide + rank * inner)
        yield [Piece(name, 1, start, inner, half * inner, full_size=2 * wide) for half, start in enumerate(starts)]
    elif kind == "down_proj":
        yield [Piece(name, 2, rank * columns, columns, 0, full_size=full)]
