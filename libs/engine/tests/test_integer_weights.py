"""Weights that a checkpoint stores as codes of 8 or 4 bits stay so in memory on the CPU, and every result has the bits
that the widened weights give: a stream goes on exactly on a worker that widens them when it loads.
"""

import math

import numpy as np
import packers
import pytest
import torch
from checkpoints import make
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import Alone
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import ColumnLinear, RowLinear
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights

ROWS = (*range(1, 14), 25, 70)
IDS = [(7 * index) % 331 for index in range(40)]
W8 = packers.compressed_config("int-quantized")
W4 = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
W2 = packers.compressed_config("pack-quantized", bits=2, strategy="group", group_size=32)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

needs_kernels = pytest.mark.skipif(not cpu.build, reason="the kernels were not built")


@pytest.fixture
def build():
    """Choose a build of the kernels for this test."""
    before = cpu.build or "off"
    yield cpu.use
    cpu.use(before)


def rows(out, inside, seed):
    return packers.scaled(out, inside, shape=(out, 1), seed=seed)


def two_bits(out, inside, seed):
    return packers.packed(out, inside, bits=2, seed=seed)


def two_bits_of_gptq(out, inside, seed):
    return packers.gptq(out, inside, bits=2, seed=seed)


def some_zeros(out, inside, seed):
    return packers.packed(out, inside, zeros="packed" if seed % 3 else None, seed=seed)


def twin(tmp_path, name, config, pack):
    """A checkpoint of codes, and one of the same values in float32."""
    return packers.quantized_twin(make(name, tmp_path / "made")[0], tmp_path, config, pack)


def logits(path, tp):
    """Of a prompt in two chunks, then of single tokens."""
    group = InProcessGroup(path, tp)
    parts = [group.logits(IDS[:23], 0), group.logits(IDS[23:35], 23)]
    return torch.cat([*parts, *(group.logits([IDS[at]], at) for at in range(35, 40))])


def loaded(path):
    """The layers that products are made with, as a rank loads them, and the bytes that all parameters took."""
    info, sizes = inspect_model(EngineConfig(model=str(path))), []
    model = build_model(info, Alone(), torch.float32).module
    load_weights(model, info, torch.device("cpu"), lambda _, total: sizes.append(total))
    return [each for each in model.modules() if isinstance(each, ColumnLinear | RowLinear)], sizes[-1]


def build_or_skip(build, name):
    try:
        build(name)
    except ValueError:
        pytest.skip(f"this CPU has no {name}")


@needs_kernels
@pytest.mark.parametrize("name", cpu.BUILDS)
def test_a_packed_product_has_the_bits_of_widened_weights(build, name):
    build_or_skip(build, name)
    generator = torch.Generator().manual_seed(1)
    for out, inside, group in ((331, 40, 40), (64, 96, 32), (160, 17, 8), (3, 5, 5), (35, 1100, 100)):
        codes = torch.randint(-128, 128, (out, inside), generator=generator).to(torch.int8)
        scales = torch.rand(out, -(-inside // group), generator=generator) / 100
        values = codes.float() * scales.repeat_interleave(group, 1)[:, :inside]
        bias, x = torch.randn(out, generator=generator), torch.randn(70, inside, generator=generator)
        offsets = torch.randn(scales.shape, generator=generator)
        exact = codes.double() * scales.repeat_interleave(group, 1)[:, :inside].double()
        added = (exact + offsets.repeat_interleave(group, 1)[:, :inside].double()).float()
        for wide, more in (
            (values, {}),
            (values * 7.874015748031496e-3, {"per_127": True}),
            (added, {"offsets": offsets}),
        ):
            plain = cpu.PackedLinear(wide, bias)
            coded = cpu.PackedLinear(codes, bias, codes=cpu.Codes(scales, group, **more))
            whole = plain(x)
            for count in ROWS:
                assert torch.equal(coded(x[-count:]), whole[-count:])


@needs_kernels
@pytest.mark.parametrize("name", cpu.BUILDS)
def test_every_code_is_widened_exactly(build, name):
    build_or_skip(build, name)
    codes = torch.arange(-128, 128).to(torch.int8)[:, None]
    packed = cpu.PackedLinear(codes, None, codes=cpu.Codes(torch.full((256, 1), 0.1), 1))
    assert torch.equal(packed(torch.ones(1, 1))[0], codes[:, 0].float() * 0.1)


@needs_kernels
@pytest.mark.parametrize("name", cpu.BUILDS)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_packed_product_of_four_bits_has_the_bits_of_widened_weights(build, name, has_offsets):
    build_or_skip(build, name)
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(16, generator=generator)
    shapes = ((331, 40, 40, 1), (64, 96, 32, 1), (160, 16, 8, 2), (3, 8, 8, 1), (35, 1104, 96, 2), (40, 160, 24, 4))
    for out, inside, group, parts in shapes:
        codes = torch.randint(0, 16, (out, inside), generator=generator).to(torch.uint8)
        scales = torch.rand(out, -(-inside // group), generator=generator) / 100
        offsets = torch.randn(scales.shape, generator=generator) if has_offsets else None
        exact = table[codes.long()].double() * scales.repeat_interleave(group, 1)[:, :inside].double()
        if offsets is not None:
            exact += offsets.repeat_interleave(group, 1)[:, :inside].double()
        values = exact.float()
        bias, x = torch.randn(out, generator=generator), torch.randn(70, inside, generator=generator)
        whole = cpu.PackedLinear(values, bias, parts=parts)(x)
        coded = cpu.PackedLinear(codes, bias, codes=cpu.Codes(scales, group, table=table, offsets=offsets), parts=parts)
        for count in ROWS:
            assert torch.equal(coded(x[-count:]), whole[-count:])


@needs_kernels
@pytest.mark.parametrize("name", cpu.BUILDS)
def test_every_code_of_four_bits_is_read_at_every_place(build, name):
    build_or_skip(build, name)
    codes = torch.arange(16).repeat(8, 1).add(torch.arange(8)[:, None]).remainder(16).to(torch.uint8).t().contiguous()
    table = torch.arange(16).float().square() - 7
    packed = cpu.PackedLinear(codes, None, codes=cpu.Codes(torch.ones(16, 1), 8, table=table))
    assert torch.equal(packed(torch.eye(8)), table[codes.long()].t())


@needs_kernels
@pytest.mark.parametrize(
    ("name", "config", "pack", "group", "bits"),
    [
        ("llama", W8, rows, None, 8),  # q k v merged
        ("llama-grouped-untied", W4, packers.packed, 32, 4),
        ("phi3", AWQ, packers.awq, 32, 4),  # fused qkv, packed MLP, zero points
        ("llama", GPTQ, packers.gptq, 32, 4),
        ("llama-grouped-untied", W2, two_bits, 32, 4),
        ("llama", {**GPTQ, "bits": 2}, two_bits_of_gptq, 32, 4),
        ("llama-odd-heads", INT8, packers.int8_rows, None, 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_keeps_codes_and_has_the_bits_of_its_float32_copy(tmp_path, name, config, pack, group, bits):
    coded, plain = twin(tmp_path, name, config, pack)
    layers, _ = loaded(coded)
    assert {(layer.code_form.group, layer.code_form.bits) for layer in layers} == {(group, bits)}
    for tp in (1, 2):
        assert torch.equal(logits(coded, tp), logits(plain, tp))


@needs_kernels
def test_a_group_that_two_ranks_would_share_is_widened(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=24)

    def pack(out, inside, seed):
        return packers.packed(out, inside, group=24, seed=seed)

    coded, plain = twin(tmp_path, "llama", config, pack)
    assert torch.equal(logits(coded, 2), logits(plain, 2))


@needs_kernels
def test_parts_of_a_merged_projection_may_have_zero_points_or_none(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
    coded, plain = twin(tmp_path, "llama", config, some_zeros)
    assert {layer.code_form.bits for layer in loaded(coded)[0]} == {4}
    for tp in (1, 2):
        assert torch.equal(logits(coded, tp), logits(plain, tp))


@needs_kernels
def test_parts_of_a_merged_projection_with_other_groups_share_a_form_of_8_bits(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
    (group,) = config["config_groups"].values()
    config["config_groups"]["finer"] = group | {"weights": group["weights"] | {"group_size": 16}}

    def pack(out, inside, seed):
        return packers.packed(out, inside, group=16 if seed % 2 else 32, zeros="packed", seed=seed)

    coded, plain = twin(tmp_path, "llama", config, pack)
    forms = {(layer.code_form.bits, layer.code_form.group) for layer in loaded(coded)[0]}
    assert (8, 16) in forms
    assert forms <= {(8, 16), (4, 16), (4, 32)}
    for tp in (1, 2):
        assert torch.equal(logits(coded, tp), logits(plain, tp))


@needs_kernels
@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38])
def test_a_damaged_table_is_refused(tmp_path, number):
    def pack(out, inside, seed):
        tensors, values = packers.nf4(out, inside, nested=False, seed=seed)
        tensors["weight.quant_map"][3] = number
        return tensors | {"weight.absmax": tensors["weight.absmax"] * 100}, values

    coded, _ = twin(tmp_path, "llama-eight-heads", NF4, pack)
    with pytest.raises(LockstepError, match="no finite numbers"):
        loaded(coded)


@needs_kernels
def test_groups_that_share_a_word_stay_in_8_bits(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=4)

    def pack(out, inside, seed):
        return packers.packed(out, inside, group=4, zeros="packed", seed=seed)

    coded, plain = twin(tmp_path, "llama", config, pack)
    assert {layer.code_form.bits for layer in loaded(coded)[0]} == {8}
    assert torch.equal(logits(coded, 2), logits(plain, 2))


@needs_kernels
def test_offsets_that_would_be_rounded_stay_in_8_bits(tmp_path):
    def pack(out, inside, seed):
        return packers.awq(out, inside, dtype=np.float32, seed=seed)

    coded, plain = twin(tmp_path, "phi3", AWQ, pack)
    assert {layer.packed.nbytes > layer.packed.out_features * layer.in_features for layer in loaded(coded)[0]} == {True}
    assert torch.equal(logits(coded, 1), logits(plain, 1))


@needs_kernels
def test_nf4_stays_in_four_bits_where_blocks_are_in_rows(tmp_path):
    coded, plain = twin(tmp_path, "llama-eight-heads", NF4, packers.nf4)
    layers = loaded(coded)[0]
    assert {None if layer.code_form is None else layer.code_form.bits for layer in layers} == {4}
    for tp in (1, 2):
        assert torch.equal(logits(coded, tp), logits(plain, tp))


@needs_kernels
def test_zero_points_beyond_the_codes_are_widened(tmp_path):
    config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32, symmetric=False)

    def pack(out, inside, seed):
        tensors, values = packers.packed(out, inside, zeros="plain", seed=seed)
        zeros = tensors["weight_zero_point"]
        scales = tensors["weight_scale"].float()
        values -= ((-128 - zeros.float()) * scales).repeat_interleave(32, 1)[:, :inside]
        return tensors | {"weight_zero_point": torch.full_like(zeros, -128)}, values

    coded, plain = twin(tmp_path, "llama", config, pack)
    assert torch.equal(logits(coded, 1), logits(plain, 1))


@needs_kernels
def test_permuted_groups_are_widened(tmp_path):
    coded, _ = twin(tmp_path, "llama", GPTQ, lambda *args, **given: packers.gptq(*args, permuted=True, **given))
    assert all(layer.code_form is None for layer in loaded(coded)[0])


@needs_kernels
def test_a_model_of_codes_takes_less_than_a_third_of_the_memory(tmp_path):
    coded, plain = twin(tmp_path, "llama", W8, rows)
    (small, small_bytes), (large, large_bytes) = loaded(coded), loaded(plain)
    kept, wide = (sum(layer.packed.nbytes for layer in each) for each in (small, large))
    assert kept < wide / 3
    saved = sum(layer.packed.out_features * (3 * layer.in_features - 4) for layer in small)
    assert large_bytes - small_bytes == saved


@needs_kernels
@pytest.mark.parametrize(("config", "pack"), [(W4, packers.packed), (AWQ, packers.awq)], ids=["symmetric", "zeros"])
def test_a_model_of_four_bits_takes_about_a_sixth_of_the_memory(tmp_path, config, pack):
    """Of float32: a word for 8 codes, and for 32 of them a scale and, where they differ, a zero point."""
    coded, plain = twin(tmp_path, "llama-grouped-untied", config, pack)
    (small, _), (large, _) = loaded(coded), loaded(plain)
    kept, wide = (sum(layer.packed.nbytes for layer in each) for each in (small, large))
    assert kept == pytest.approx(wide * (1 / 8 + (2 if pack is packers.awq else 1) / 32))


@needs_kernels
def test_a_model_of_codes_and_its_float32_copy_have_one_fingerprint(tmp_path):
    coded, plain = (InProcessGroup(path, 1).measure() for path in twin(tmp_path, "llama", W8, rows))
    assert coded.deterministic
    assert coded.fingerprint == plain.fingerprint


def test_without_the_kernels_weights_are_widened(tmp_path, build):
    coded, plain = twin(tmp_path, "llama", W8, rows)
    build("off")
    assert all(layer.code_form is None for layer in loaded(coded)[0])
    assert torch.equal(logits(coded, 1), logits(plain, 1))
