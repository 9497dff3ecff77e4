"""Weights that a checkpoint stores as codes of 8 or 4 bits stay so in a GPU's memory, and every result of the exact
mode has the bits that widened weights give. Interpreted where there is no GPU.
"""

import logging

import numpy as np
import packers
import pytest
import torch
from checkpoints import make
from fast_cases import further
from in_process_rank import InProcessRank
from lockstep_engine import SamplingParams
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import Alone
from lockstep_engine.gpu_codes import CodedWeight, coded_weights, codes_by_torch
from lockstep_engine.kernels import gpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.linear import ColumnLinear, RowLinear, VocabHead
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights, widen_codes
from test_integer_weights import AWQ, GPTQ, INT8, NF4, W4, W8, rows, some_zeros, twin
from test_quantized_heads import twin as twin_of_head
from triton_device import DEVICE, GPU

CASES = {
    "int8": ("llama", W8, rows, 8),
    "int4": ("llama-grouped-untied", W4, packers.packed, 4),
    "zero points in some parts": ("llama-grouped-untied", W4, some_zeros, 4),
    "awq": ("phi3", AWQ, packers.awq, 4),  # fused qkv, by the model's own code
    "gptq": ("qwen3", GPTQ, packers.gptq, 4),
    "bitsandbytes int8": ("qwen2", INT8, packers.int8_rows, 8),  # with biases
    "nf4": ("llama-eight-heads", NF4, packers.nf4, 4),
}
"""A model, its configuration, how a matrix is packed, and the bits of a code in memory."""
TEXT = [(7 * index) % 331 for index in range(24)]


class Part(Alone):
    """The first or another of some ranks, whose sums nobody adds up."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def loaded(path, *, keeps=True, dtype=torch.float32, group=None, **more):
    """A rank's part of a model as a GPU has it, and the bytes that all parameters took."""
    group, sizes = group or Alone(), []
    info = inspect_model(EngineConfig(model=str(path), tp=group.size))
    model = build_model(info, group, dtype)
    load_weights(model.module, info, DEVICE, lambda _, total: sizes.append(total), codes_on_gpu=keeps, **more)
    return model, sizes[-1]


def layers(model):
    return [each for each in model.module.modules() if isinstance(each, ColumnLinear | RowLinear)]


def values(layer):
    """A layer's weight [out, in], float32."""
    if not isinstance(layer.packed, CodedWeight):
        return layer.weight.float()
    return torch.cat([layer.packed.values(part) for part in layer.packed.parts()])


class Served:
    """A model of one rank that computes by the GPU's kernels in the exact mode."""

    def __init__(self, path, *, keeps):
        self.model, _ = loaded(path, keeps=keeps)
        self.model.exact = True
        self.model.fuse_on_gpu(64)
        geometry = {"layers": self.model.layers, "kv_heads": self.model.kv_heads, "head_dim": self.model.head_dim}
        self.cache = KvCache(**geometry, blocks=4, dtype=torch.float32, device=DEVICE)

    @torch.inference_mode()
    def logits(self, first, last):
        """Of the text's tokens first to last, behind those that were computed before."""
        layout = StepLayout(
            np.array([first], np.int32), np.array([last - first], np.int32), np.array([[1, 2]], np.int32)
        )
        attention = TritonAttention(self.cache, layout, exact=True)
        ids = torch.tensor(TEXT[first:last], device=DEVICE)
        return self.model.logits(ids, attention, torch.arange(last - first, device=DEVICE)).clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zero points in some parts", *(further(name) for name in CASES if "zero" not in name)]
)
@pytest.mark.usefixtures("ordered_products", "without_kernels")
def test_a_model_keeps_codes_and_has_the_bits_of_its_widened_copy(tmp_path, name):
    coded, plain = (Served(path, keeps=True) for path in twin(tmp_path, *CASES[name][:3]))
    assert {layer.code_form.bits for layer in layers(coded.model)} == {CASES[name][3]}
    assert not coded_weights(plain.model.module)
    whole = plain.logits(0, len(TEXT))
    assert torch.equal(coded.logits(0, len(TEXT)), whole)
    parts = [coded.logits(*part) for part in ((0, 18), (18, 19), (19, 20), (20, 24))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("without_kernels")
def test_each_rank_keeps_its_part_of_the_codes(tmp_path, name, dtype):
    coded, plain = twin(tmp_path, *CASES[name][:3])
    for group in (Alone(), Part(0, 2), Part(1, 2)):
        (kept, small), (wide, large) = (loaded(path, group=group, dtype=dtype) for path in (coded, plain))
        for ours, theirs in zip(layers(kept), layers(wide), strict=True):
            if group.size == 1:
                assert ours.code_form.bits == CASES[name][3]
            assert torch.equal(values(ours).to(dtype), theirs.weight)
        assert small < large


@pytest.mark.parametrize(("name", "of_an_input"), [("int8", 1), ("int4", 0.5)])
@pytest.mark.usefixtures("without_kernels")
def test_the_bytes_of_a_start_are_those_that_stay(tmp_path, name, of_an_input):
    coded, plain = twin(tmp_path, *CASES[name][:3])
    (kept, small), (wide, large) = (loaded(path, dtype=torch.bfloat16) for path in (coded, plain))
    numbers = sum(layer.weight.numel() for layer in layers(wide))
    scales = sum(layer.code_form.groups(layer.in_features) * len(layer.weight) for layer in layers(kept))
    assert sum(each.nbytes for each in coded_weights(kept.module)) == numbers * of_an_input + 4 * scales
    zeros = 4 * scales if name == "int4" else 0  # until it is known that all are equal
    assert large - small == numbers * (2 - of_an_input) - 4 * scales - zeros


@pytest.mark.usefixtures("without_kernels")
def test_groups_that_the_kernel_does_not_take_are_widened(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=24)

    def pack(out, inside, seed):
        return packers.packed(out, inside, group=24, seed=seed)

    coded, plain = (loaded(path)[0] for path in twin(tmp_path, "llama", config, pack))
    assert not coded_weights(coded.module)
    for ours, theirs in zip(layers(coded), layers(plain), strict=True):
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("form", ["int8", "int4 with zero points"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("without_kernels")
def test_a_head_keeps_codes_beside_the_embedding(tmp_path, form, rank):
    coded, plain = twin_of_head(make("llama-grouped-untied", tmp_path / "made")[0], tmp_path, form)
    heads = []
    for path in (coded, plain):
        model, _ = loaded(path, group=Part(rank, 2))
        heads += [each for each in model.module.modules() if isinstance(each, VocabHead)]
    assert isinstance(heads[0].packed, CodedWeight)
    kept = 166 if rank == 0 else 165  # of 331 tokens
    assert torch.equal(values(heads[0])[:kept], heads[1].weight[:kept])


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_after_all_weights_are_widened(tmp_path):
    coded, plain = (loaded(path)[0] for path in twin(tmp_path, *CASES["awq"][:3]))
    widen_codes(coded.module, torch.float32)
    assert not coded_weights(coded.module)
    for ours, theirs in zip(layers(coded), layers(plain), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        x = torch.ones(2, ours.in_features, device=DEVICE)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["bitsandbytes int8", "nf4"])
@pytest.mark.usefixtures("without_kernels")
def test_torch_computes_the_same_where_kernels_are_compared_with_it(tmp_path, name):
    coded = loaded(twin(tmp_path, *CASES[name][:3])[0])[0]
    for layer in layers(coded)[:2]:
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        ours = layer(x)
        with codes_by_torch(coded.module):
            assert layer.packed.by_torch
            torch.testing.assert_close(layer(x), ours)
        assert not layer.packed.by_torch


def test_what_stays_codes_is_known_before_weights_are_read(tmp_path):
    path, _ = twin(tmp_path, *CASES["int8"][:3])
    info = inspect_model(EngineConfig(model=str(path)))
    model, events = build_model(info, Alone(), torch.bfloat16), []

    def note():
        events.append({layer.code_form.bits for layer in layers(model)})

    load_weights(model.module, info, DEVICE, lambda *_: events.append("read"), codes_on_gpu=True, on_formed=note)
    assert events[0] == {8}
    assert set(events[1:]) == {"read"}


@pytest.mark.exhaustive  # a minute; `test_triton_builds` has a rank with codes that builds nothing more
@pytest.mark.slow
def test_a_rank_serves_codes_and_builds_no_kernel_while_it_does(tmp_path, monkeypatch, caplog):
    """Its start has compared the kernels with torch."""
    if not GPU:
        monkeypatch.setattr(gpu, "usable", lambda *_: True)
    coded, plain = twin(tmp_path, "llama", W4, packers.packed)
    request = TEXT[:14], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    settings = {"device": DEVICE.type, "deterministic": False, "threads": 1, "max_context": 32}
    settings |= {"max_seqs": 1, "max_batch_tokens": 16, "kv_compression": "none", "kv_memory_bytes": 2**18}
    outputs = []
    for path in (coded, plain):
        with caplog.at_level(logging.INFO, logger="lockstep.engine"), InProcessRank(path, **settings) as served:
            outputs.append(served.run(request))
            assert served.rank.builds.builds == 0
    assert outputs[0] == outputs[1]
    (said,) = (each.getMessage() for each in caplog.records if "stay codes" in each.getMessage())
    assert said.startswith("12 quantized weights stay codes on the GPU: ")
