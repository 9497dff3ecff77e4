"""Weights that threads read from the files are those that a mapping gives: of every architecture, for every split, with
chunks of any size. The CPU stands in for the GPU.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from checkpoints import CASES, make
from fast_cases import fast_if, further
from lockstep_common.errors import LockstepError
from lockstep_engine import weight_stream, weights
from lockstep_engine.config import EngineConfig
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weight_stream import Stored, chunks, copy_chunks
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")


def built(path, size, rank):
    """A rank's model without memory, and its checkpoint."""
    info = inspect_model(EngineConfig(model=str(path), tp=size))
    group = SimpleNamespace(size=size, rank=rank)
    model = build_model(info, group, torch.bfloat16).module
    weights._settle_tied(model, weights.Checkpoint(info))
    model.to_empty(device=CPU)
    return list(weights.distinct_parameters(model)), weights.Checkpoint(info)


def parameters_of(path, size, rank, *, streamed, told=lambda _: None, chunk_bytes=1000):
    """A rank's parameters by name, in bfloat16 from a checkpoint of float32; rows that nothing fills are 7."""
    parameters, checkpoint = built(path, size, rank)
    for _, _, parameter in parameters:
        parameter.data.fill_(7)
    if streamed:
        weights.stream_parameters(parameters, checkpoint, CPU, told, chunk_bytes)
    else:
        for module, name, parameter in parameters:
            weights.fill(checkpoint, weights.pieces_of(module, name, parameter, checkpoint), parameter)
    return {name: parameter.data for _, name, parameter in parameters}


@pytest.mark.parametrize(
    ("name", "chunk_bytes"),
    [
        *(fast_if(name in ("llama", "gpt2", "mixtral"), name, 1000) for name in CASES),
        *(further(name, weight_stream.CHUNK_BYTES) for name in CASES),
    ],
)
def test_what_is_streamed_is_what_is_read(tmp_path, name, chunk_bytes):
    path, _ = make(name, tmp_path)
    for size in (each for each in (1, 2) if each in CASES[name].tps):
        for rank in range(size):
            told = []
            streamed = parameters_of(path, size, rank, streamed=True, told=told.append, chunk_bytes=chunk_bytes)
            expected = parameters_of(path, size, rank, streamed=False)
            assert streamed.keys() == expected.keys()
            assert all(torch.equal(streamed[each], expected[each]) for each in expected)
            assert told == sorted(told)
            assert told[-1] == sum(each.nbytes for each in expected.values())


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_are_converted_as_a_copy_does(tmp_path, stored_as):
    save_file({"other": torch.ones(3), "w": torch.randn(50, 8).to(stored_as)}, tmp_path / "w.safetensors")
    tensors = weights.Tensors(tmp_path, ["w.safetensors"])
    target = torch.empty(20, 8, dtype=torch.bfloat16)
    copy_chunks(chunks(tensors.stored("w"), 0, 30, target, 100), CPU)
    assert torch.equal(target, load_file(tmp_path / "w.safetensors")["w"][30:].to(torch.bfloat16))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("most_bytes", [1, 50, 10**6])
def test_a_slice_of_a_stack_of_matrices(tmp_path, dim, most_bytes):
    whole = torch.randn(5, 6, 7)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    stored = weights.Tensors(tmp_path, ["w.safetensors"]).stored("w")
    expected = whole.narrow(dim, 2, 3)
    target = torch.empty_like(expected)
    copy_chunks(chunks(stored, dim, 2, target, most_bytes), CPU)
    assert torch.equal(target, expected)


def test_a_file_that_ends_early_is_named(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    with pytest.raises(LockstepError, match=re.escape(f"{path} ends at byte 10, and its header names more")):
        copy_chunks(chunks(Stored(path, 4, (4,), torch.float32), 0, 0, torch.empty(4), 99), CPU)


def test_a_file_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(LockstepError, match=f"{path} cannot be read: No such file"):
        copy_chunks(chunks(Stored(path, 0, (4,), torch.float32), 0, 0, torch.empty(4), 99), CPU)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path, when):
    path, _ = make("llama", tmp_path)
    parameters, checkpoint = built(path, 1, 0)
    (file,) = path.glob("*.safetensors")
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}

    def replace(_done=0):
        save_file(tensors, other := file.with_suffix(".part"), {"format": "pt"})
        other.replace(file)

    if when == "before":
        replace()
    with pytest.raises(LockstepError, match=f"{file.name} was changed while it was read"):
        weights.stream_parameters(parameters, checkpoint, CPU, replace if when == "meanwhile" else lambda _: None)


def test_why_a_reader_cannot_be_made_is_told(tmp_path, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("no memory for a stream")

    monkeypatch.setattr(weight_stream, "Reader", fail)
    with pytest.raises(torch.OutOfMemoryError, match="for a stream"):
        copy_chunks(chunks(Stored(tmp_path, 0, (4,), torch.float32), 0, 0, torch.empty(4), 99), CPU)


def test_an_error_of_the_caller_ends_the_readers(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
    stored = weights.Tensors(tmp_path, ["w.safetensors"]).stored("w")

    def work():
        yield from chunks(stored, 0, 0, torch.empty(4), 99)
        raise LockstepError("INTERNAL", "no such tensor")

    with pytest.raises(LockstepError, match="no such tensor"):
        copy_chunks(work(), CPU)
