"""Weights that a checkpoint stores in 16 bits stay so in memory on the CPU, and every result has the bits that widened
weights give: a stream goes on exactly on a worker that keeps them in float32.
"""

import shutil

import pytest
import torch
from checkpoints import make
from in_process import InProcessGroup
from lockstep_engine.config import EngineConfig, HotWindow
from lockstep_engine.distributed import Alone
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights
from safetensors.torch import load_file, save_file

NARROW = (torch.bfloat16, torch.float16)
ROWS = (*range(1, 14), 25, 70)
IDS = [(7 * index) % 331 for index in range(40)]
LAYERS = (ColumnLinear, RowLinear, VocabEmbedding, VocabHead)

needs_kernels = pytest.mark.skipif(not cpu.build, reason="the kernels were not built")


@pytest.fixture
def build():
    """Choose a build of the kernels for this test."""
    before = cpu.build or "off"
    yield cpu.use
    cpu.use(before)


def rewritten(source, target, change):
    """A copy of a checkpoint with `change(name, tensor)` in place of its tensors."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    changed = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def pair(name, folder, dtype):
    """The same values twice: stored in `dtype`, and in float32."""
    source = make(name, folder)[0]
    narrow = rewritten(source, folder / "narrow", lambda _, x: x.to(dtype))
    return narrow, rewritten(source, folder / "wide", lambda _, x: x.to(dtype).float())


def logits(path, **options):
    """Of a prompt in two chunks, then of single tokens."""
    group = InProcessGroup(path, **options)
    parts = [group.logits(IDS[:23], 0), group.logits(IDS[23:35], 23)]
    return torch.cat([*parts, *(group.logits([IDS[at]], at) for at in range(35, 40))])


def loaded(path):
    """The model as a rank loads it, and the bytes that its parameters took."""
    info, sizes = inspect_model(EngineConfig(model=str(path))), []
    model = build_model(info, Alone(), torch.float32).module
    load_weights(model, info, torch.device("cpu"), lambda _, total: sizes.append(total))
    return model, sizes[-1]


def kept_in(model):
    return {each.weight.dtype for each in model.modules() if isinstance(each, LAYERS)}


@needs_kernels
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", cpu.BUILDS)
def test_a_packed_product_has_the_bits_of_widened_weights(build, name, dtype):
    try:
        build(name)
    except ValueError:
        pytest.skip(f"this CPU has no {name}")
    generator = torch.Generator().manual_seed(1)
    for out, inside in ((331, 40), (64, 96), (160, 17), (3, 5)):
        weight = torch.randn(out, inside, generator=generator).to(dtype)
        bias, x = torch.randn(out, generator=generator), torch.randn(70, inside, generator=generator)
        narrow, wide = cpu.PackedLinear(weight, bias), cpu.PackedLinear(weight.float(), bias)
        whole = wide(x)
        for rows in ROWS:
            assert torch.equal(wide(x[:rows]), whole[:rows])
            assert torch.equal(narrow(x[-rows:]), whole[-rows:])


@needs_kernels
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", cpu.BUILDS)
def test_every_number_of_16_bits_is_widened_exactly(build, name, dtype):
    try:
        build(name)
    except ValueError:
        pytest.skip(f"this CPU has no {name}")
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = codes[~codes.isnan()]
    assert len(numbers) > 63000
    assert torch.equal(cpu.PackedLinear(numbers[:, None], None)(torch.ones(1, 1))[0], numbers.float())


@needs_kernels
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "deepseek_v3", "falcon-new", "bloom"])
def test_a_model_of_16_bits_has_the_bits_of_its_float32_copy(tmp_path, name, dtype):
    narrow, wide = pair(name, tmp_path, dtype)
    assert torch.equal(logits(narrow, tp=1), logits(wide, tp=1))


@needs_kernels
@pytest.mark.parametrize("name", ["llama-grouped-untied", "olmo2"])
def test_a_model_of_16_bits_has_the_bits_of_its_float32_copy_on_two_ranks_and_with_compression(tmp_path, name):
    narrow, wide = pair(name, tmp_path, torch.float16)
    for options in ({"tp": 2}, {"tp": 1, "hot_window": HotWindow(1, 1)}):
        assert torch.equal(logits(narrow, **options), logits(wide, **options))


@needs_kernels
def test_a_model_of_16_bits_and_its_float32_copy_have_one_fingerprint(tmp_path):
    narrow, wide = (InProcessGroup(path, 1).measure() for path in pair("llama", tmp_path, torch.bfloat16))
    assert narrow.deterministic
    assert narrow.fingerprint == wide.fingerprint


@needs_kernels
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_model_of_16_bits_takes_half_the_memory(tmp_path, dtype):
    narrow, wide = pair("llama", tmp_path, dtype)
    (small, small_bytes), (large, large_bytes) = loaded(narrow), loaded(wide)
    assert kept_in(small) == {dtype}
    assert kept_in(large) == {torch.float32}
    assert small_bytes < 0.51 * large_bytes  # norms are widened


@needs_kernels
def test_a_merged_weight_of_different_dtypes_is_widened(tmp_path):
    source = make("llama", tmp_path)[0]

    def mixed(name, x):
        return x.bfloat16() if "v_proj" in name else x.half() if "k_proj" in name else x

    both = rewritten(source, tmp_path / "mixed", mixed)
    wide = rewritten(source, tmp_path / "wide", lambda name, x: mixed(name, x).float())
    assert kept_in(loaded(both)[0]) == {torch.float32}
    assert torch.equal(logits(both, tp=1), logits(wide, tp=1))


def test_without_the_kernels_weights_are_widened(tmp_path, build):
    narrow, wide = pair("llama", tmp_path, torch.float16)
    build("off")
    assert kept_in(loaded(narrow)[0]) == {torch.float32}
    assert torch.equal(logits(narrow, tp=1), logits(wide, tp=1))
