"""Products on weights that stay codes of 8 or 4 bits on a GPU: they are those of the widened weights, to the bit where
terms are summed in one order, and a row's bits depend on that row alone.
"""

import dataclasses

import pytest
import torch
import twins
from fast_cases import further
from lockstep_engine.kernels import triton_coded, triton_linear
from lockstep_engine.kernels.codes import Codes
from lockstep_engine.quantized.coded import pack
from packers import NF4
from test_exact_products import TYPES, close, random
from triton_device import DEVICE

KINDS = ["int8", "int8 by 127", "int8 offsets", "symmetric", "zeros", "table", "offsets"]


def codes(kind, outs, ins, group, seed=0):
    """Random codes of a kind, with scales that make values of about 1."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-ins // group)
    scales = (torch.rand(groups, outs, generator=generator) + 0.5) / (64 if kind.startswith("int8") else 8)
    if kind.endswith("offsets"):  # products with codes are exact
        scales = scales.half().float()
    if kind.startswith("int8"):
        bytes_ = torch.randint(-128, 128, (outs, ins), generator=generator).to(torch.int8)
        made = Codes(bytes_, scales, group, per_127=kind.endswith("127"))
    else:
        words = pack(torch.randint(0, 16, (outs, ins), generator=generator).to(torch.uint8))
        made = Codes(words, scales, group)
        if kind == "symmetric":
            made = dataclasses.replace(made, shift=8.0)
        elif kind == "zeros":
            zeros = torch.randint(-8, 24, (groups, outs), generator=generator).float()
            made = dataclasses.replace(made, zeros=zeros)
        elif kind == "table":
            made = dataclasses.replace(made, table=torch.tensor(NF4))
    if kind.endswith("offsets"):
        made = dataclasses.replace(made, offsets=torch.randn(groups, outs, generator=generator))
    tensors = ("codes", "scales", "zeros", "table", "offsets")
    moved = {name: getattr(made, name).to(DEVICE) for name in tensors if getattr(made, name) is not None}
    return dataclasses.replace(made, **moved)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "ins", "outs", "group"),
    [
        (5, 72, 130, 72),  # a row has one scale
        (70, 96, 37, 32),  # a step of the sum has a group
        further(1, 1040, 65, 16),
        further(20, 640, 33, 128),  # a group has several steps
        further(3, 200, 40, 64),  # the last group is not full
        further(140, 48, 20, 48),
    ],
)
def test_a_product_is_that_of_the_widened_weight(kind, rows, ins, outs, group, dtype):
    x, weight, bias = random(rows, ins, dtype=dtype), codes(kind, outs, ins, group), random(outs, seed=2)
    assert (weight.outs, weight.ins) == (outs, ins)
    close(triton_coded.product(x, weight, bias), twins.coded(x, weight, bias))
    close(triton_coded.product(x, weight), twins.coded(x, weight))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ins", "group"), [(96, 96), further(96, 32), (3 * 512 + 64, 64)])
@pytest.mark.usefixtures("ordered_products")
def test_it_has_the_bits_of_the_exact_modes_product(kind, ins, group, dtype):
    """With one segment, and with several: there a worker that widens its weights continues a stream of this one."""
    outs = 40
    weight, bias = codes(kind, outs, ins, group, seed=1), random(outs, seed=2)
    wide = twins.widened(weight).to(dtype)
    assert wide.isfinite().all()
    for rows in (1, 20, 131):
        x = random(rows, ins, dtype=dtype, seed=rows)
        expected = triton_linear.product(x.unsqueeze(0), wide.t().unsqueeze(0), bias)[0]
        assert torch.equal(triton_coded.product(x, weight, bias), expected)


@pytest.mark.parametrize("kind", ["int8", "zeros", further("table")])
@pytest.mark.usefixtures("ordered_products")
def test_a_row_has_the_same_bits_in_any_batch(kind):
    """In one program with all segments, and in a program for each."""
    ins, outs = 3 * 512 + 64, 40
    assert triton_linear.segment_of(outs, ins) == 512
    x, weight = random(150, ins, dtype=torch.float16), codes(kind, outs, ins, 64)
    every = triton_coded.product(x, weight)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(triton_coded.product(x[order], weight), every[order])
    for first, count in ((0, 1), (149, 1), (17, 16), (60, 17), (3, 100)):
        assert torch.equal(triton_coded.product(x[first : first + count], weight), every[first : first + count])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_becomes_the_value_that_loading_gives(kind, dtype):
    count = 256 if kind.startswith("int8") else 16
    weight = codes(kind, count, 16, 16)
    if weight.packed:
        every = torch.arange(16, dtype=torch.uint8).repeat_interleave(16).view(16, 16)
        weight = dataclasses.replace(weight, codes=pack(every).to(DEVICE))
    else:
        every = torch.arange(-128, 128).to(torch.int8)[:, None].repeat(1, 16)
        weight = dataclasses.replace(weight, codes=every.to(DEVICE))
    one = torch.eye(16, dtype=dtype, device=DEVICE)
    assert torch.equal(triton_coded.product(one, weight), twins.widened(weight).to(dtype).t())


def test_words_have_the_first_input_in_the_lowest_bits():
    word = pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8))
    assert word.tolist() == [[0x87654321 - 2**32]]


def test_what_a_rank_has_of_the_inputs_or_outputs_is_a_slice_of_the_whole():
    weight, x = codes("zeros", 32, 256, 64), random(3, 256)
    half = dataclasses.replace(
        weight, codes=weight.codes[:16], scales=weight.scales[:, :16].contiguous(),
        zeros=weight.zeros[:, :16].contiguous(),
    )  # fmt: skip
    assert torch.equal(triton_coded.product(x, half), triton_coded.product(x, weight)[:, :16])
    parts = []
    for rank in range(2):
        groups, words = slice(2 * rank, 2 * rank + 2), slice(16 * rank, 16 * rank + 16)
        own = dataclasses.replace(
            weight, codes=weight.codes[:, words].contiguous(), scales=weight.scales[groups], zeros=weight.zeros[groups]
        )
        parts.append(triton_coded.product(x[:, 128 * rank : 128 * rank + 128], own))
    close(parts[0] + parts[1], twins.coded(x, weight))


def test_no_rows_are_no_work():
    assert triton_coded.product(random(0, 64), codes("int8", 8, 64, 64)).shape == (0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 24}, "multiple of 16"),
        ({"group": 32}, "scales"),
        ({"codes": torch.zeros(8, 8)}, "int8"),
        ({"scales": torch.ones(1, 8, dtype=torch.float16)}, "float32"),
        ({"shift": 8.0, "table": torch.zeros(16)}, "with zero points"),
        ({"shift": 8.0, "offsets": torch.zeros(1, 8)}, "offsets come with"),
        ({"offsets": torch.zeros(2, 8)}, "offsets are not"),
        ({"codes": torch.zeros(8, 64, dtype=torch.int8), "shift": 8.0}, "8 bits"),
    ],
)
def test_what_are_no_codes_is_refused(changes, message):
    given = {"codes": torch.zeros(8, 8, dtype=torch.int32), "scales": torch.ones(1, 8), "group": 64}
    Codes(**given)
    with pytest.raises(ValueError, match=message):
        Codes(**(given | changes))


def test_x_of_another_width_or_type_is_refused():
    weight = codes("int8", 8, 64, 64)
    for x, bias in ((random(1, 32), None), (random(1, 64).double(), None), (random(1, 64), random(7))):
        with pytest.raises(ValueError, match="product"):
            triton_coded.product(x, weight, bias)
