"""Products, sums and experts of the exact mode: what they compute, and that a row's bits depend on that row alone."""

import itertools

import pytest
import torch
import twins
from lockstep_engine import gpu_experts, gpu_rowwise
from lockstep_engine.gpu_experts import GroupedExperts
from lockstep_engine.kernels import triton_attention, triton_linear, triton_rows
from lockstep_engine.kernels.tiles import LIMITS, PRODUCT_ROWS
from lockstep_engine.kernels.triton_linear import Groups, tile_for
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from triton_device import DEVICE

TYPES = [torch.float32, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-4, 5, shape, generator=generator)
    return wide.to(dtype).to(DEVICE)


def close(ours, expected):
    torch.testing.assert_close(
        ours,
        expected,
        atol=0.05 if ours.dtype is torch.float16 else 2e-3,
        rtol=4e-3 if ours.dtype is torch.float16 else 1e-5,
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 64, 64), (70, 100, 37), (5, 33, 130)])
def test_a_product_is_rounded_once_with_its_bias(rows, ins, outs, dtype):
    x, weight, bias = random(1, rows, ins, dtype=dtype), random(outs, ins, dtype=dtype, seed=1), random(outs, seed=2)
    ours = triton_linear.product(x, weight.t().unsqueeze(0), bias)
    close(ours, twins.product(x, weight.t().unsqueeze(0), bias))
    assert torch.equal(gpu_rowwise.linear(x[0], weight, bias), ours[0])


def test_batches_have_weights_of_their_own_in_any_layout():
    x, weight = random(3, 40, 50), random(3, 70, 50, seed=1).transpose(1, 2)
    ours = triton_linear.product(x, weight)
    close(ours, twins.product(x, weight))
    assert torch.equal(triton_linear.product(x, weight.contiguous()), ours)
    assert torch.equal(triton_linear.product(x[1:2], weight[1:2]), ours[1:2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("ordered_products")
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    x, weight = random(1, 131, 96, dtype=dtype), random(1, 96, 40, dtype=dtype, seed=1)
    every = triton_linear.product(x, weight)
    order = torch.randperm(131, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(triton_linear.product(x[:, order], weight), every[:, order])
    for first, count in ((0, 1), (130, 1), (17, 33), (60, 64), (3, 100)):
        assert torch.equal(triton_linear.product(x[:, first : first + count], weight), every[:, first : first + count])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ins", [3 * 512, 3 * 512 + 40])
@pytest.mark.usefixtures("ordered_products")
def test_segments_of_a_sum_give_a_row_the_same_bits_in_one_program_and_in_many(ins, dtype):
    """Also where neither the last segment nor the last tile of outputs is full."""
    outs = 72
    assert triton_linear.segment_of(outs, ins) == 512
    x, weight, bias = random(1, 300, ins, dtype=dtype), random(outs, ins, dtype=dtype, seed=1), random(outs, seed=2)
    every = triton_linear.product(x, weight.t().unsqueeze(0), bias)
    for first, count in ((0, 1), (2, 16), (60, 17), (100, 70)):
        part = triton_linear.product(x[:, first : first + count], weight.t().unsqueeze(0), bias)
        assert torch.equal(part, every[:, first : first + count])
    wide = twins.product(x, weight.t().unsqueeze(0), bias)
    # Terms of one sign and another cancel, so the error is of the size of the terms, not of the sum.
    torch.testing.assert_close(every, wide, atol=0.5 if dtype is torch.float16 else 5e-2, rtol=4e-3)


def test_many_rows_have_the_tile_that_a_gpu_has_shared_memory_for(monkeypatch):
    for arch in LIMITS:
        monkeypatch.setattr(triton_attention, "limits", lambda _, arch=arch: LIMITS[arch])
        for rows, one_segment in itertools.product((1, 17, 65, 257, 5000), (False, True)):
            tile = triton_linear.tile_for(torch.float16, rows, torch.device("cpu"), one_segment=one_segment)
            assert tile.shared_bytes <= (99 if arch in (86, 89) or rows <= 64 else 144) * 1024


def test_segments_follow_from_the_shape_of_a_layer():
    assert triton_linear.segment_of(28672, 4096) == 4096  # its outputs alone fill a GPU
    assert triton_linear.segment_of(4096, 4096) == 1024
    assert triton_linear.segment_of(4096, 14336) == 3584
    assert triton_linear.segment_of(1024, 4096) == 512
    assert triton_linear.segment_of(64, 100) == 100


@pytest.mark.usefixtures("ordered_products")
def test_segments_of_experts_give_the_same_bits_in_one_program_and_in_many():
    ins, pairs = 1100, 300
    weight = random(2, 40, ins, seed=1)
    rows = random(pairs, ins)
    chosen = (torch.arange(pairs, device=DEVICE) % 2).unsqueeze(1)
    every = triton_linear.grouped(rows, weight, None, Groups.of(chosen, 2, rows.dtype), per_pair=True)
    close(every[:40], twins.grouped(rows, weight, None, chosen)[:40])
    for count in (1, 40):
        groups = Groups.of(chosen[:count], 2, rows.dtype)
        part = triton_linear.grouped(rows[:count], weight, None, groups, per_pair=True)
        assert torch.equal(part, every[:count])


@pytest.mark.parametrize("width", [1, 7, 512, 5000])
def test_sums_and_softmax_are_by_rows(width):
    x = random(9, width)
    sums, softmax = triton_rows.sum_rows(x), triton_rows.softmax(x)
    torch.testing.assert_close(sums, x.double().sum(-1).float(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(softmax, torch.softmax(x.double(), -1).float(), atol=1e-6, rtol=1e-5)
    for row in (0, 8):
        assert torch.equal(triton_rows.sum_rows(x[row]), sums[row])
        assert torch.equal(triton_rows.softmax(x[row : row + 1])[0], softmax[row])


def test_norms_are_those_of_torch():
    x, weight, bias = random(5, 48), random(48, seed=1), random(48, seed=2)
    expected = torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-5)
    torch.testing.assert_close(gpu_rowwise.layer_norm(x, weight, bias, 1e-5), expected, atol=1e-4, rtol=1e-5)
    expected = torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    torch.testing.assert_close(gpu_rowwise.rms_norm(x, weight, 1e-5), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_grouped_products_are_those_of_each_expert(dtype):
    """Some experts have no rows, one has more than a tile, and one row of three chooses no expert."""
    chosen = torch.tensor([[0, 3], [3, 5], [5, 6]] * 30, device=DEVICE)
    weight, bias = random(6, 40, 50, dtype=dtype, seed=1), random(6, 40, seed=2)
    groups = Groups.of(chosen, 6, dtype)
    served = (chosen.flatten() < 6).to(DEVICE)
    rows = random(len(served), 50, dtype=dtype)
    ours = triton_linear.grouped(rows, weight, bias, groups, per_pair=True)
    close(ours[served], twins.grouped(rows, weight, bias, chosen)[served])
    shared = random(90, 50, dtype=dtype)
    ours = triton_linear.grouped(shared, weight, None, groups, per_pair=False)
    close(ours[served], twins.grouped(shared.repeat_interleave(2, 0), weight, None, chosen)[served])


class TestExperts:
    CONFIG = MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=5, num_experts_per_tok=3, experts_implementation="eager"
    )

    def made(self, dtype=torch.float32):
        experts = MixtralExperts(self.CONFIG).to(DEVICE)
        for seed, parameter in enumerate(experts.parameters()):
            parameter.data = (random(*parameter.shape, seed=seed) / 8).to(dtype)
        return experts

    def step(self, tokens):
        scores = random(tokens, 5, seed=9).softmax(-1)
        weights, chosen = scores.topk(3, dim=-1)
        return random(tokens, 48, seed=8), chosen, weights

    @torch.no_grad
    def test_are_those_of_the_model(self):
        experts = self.made()
        assert GroupedExperts.fits(experts)
        step = self.step(37)
        torch.testing.assert_close(GroupedExperts(experts)(*step), experts(*step), atol=1e-3, rtol=1e-4)

    @torch.no_grad
    @pytest.mark.usefixtures("ordered_products")
    def test_a_token_has_the_same_bits_in_any_batch_and_any_order_of_its_choices(self):
        experts, step = GroupedExperts(self.made()), self.step(70)
        every = experts(*step)
        for first, count in ((0, 1), (69, 1), (5, 40)):
            assert torch.equal(experts(*(each[first : first + count] for each in step)), every[first : first + count])
        x, chosen, weights = step
        assert torch.equal(experts(x, chosen.flip(1), weights.flip(1)), every)

    @torch.no_grad
    def test_a_number_beyond_the_experts_adds_nothing(self):
        experts, (x, chosen, weights) = self.made(), self.step(9)
        without = weights.clone()
        without[2:5, 1] = 0
        expected = experts(x, chosen, without)  # some versions of the model's code stop the GPU at such a number
        chosen[2:5, 1] = 5
        torch.testing.assert_close(GroupedExperts(experts)(x, chosen, weights), expected, atol=1e-3, rtol=1e-4)

    def test_other_shapes_stay_the_models_own(self):
        assert not GroupedExperts.fits(nn.Linear(3, 3))
        experts = self.made()
        experts.is_transposed = True
        assert not GroupedExperts.fits(experts)


@pytest.mark.parametrize("experts", [1, 2, 8, 128])
def test_every_form_of_grouped_products_is_launched_at_the_start(experts):
    def form(pairs):
        return tile_for(torch.bfloat16, pairs // experts, DEVICE), pairs <= PRODUCT_ROWS[-1]

    assert {form(pairs) for pairs in gpu_experts.forms(experts, 2048)} == {form(each) for each in range(1, 2048 * 16)}


@torch.no_grad
def test_all_forms_can_be_launched():
    model = nn.Sequential(TestExperts().made(), nn.Linear(3, 3))
    gpu_experts.launch_all(model, 40)  # none are grouped
    assert gpu_experts.group_experts(model) == 1
    gpu_experts.launch_all(model, 40)


def test_what_does_not_fit_is_refused():
    x, weight = random(1, 3, 8), random(1, 8, 4)
    with pytest.raises(ValueError, match="does not fit weight"):
        triton_linear.product(x, weight.transpose(1, 2))
    with pytest.raises(ValueError, match="not supported"):
        triton_linear.product(x.double(), weight)
    with pytest.raises(ValueError, match="bias"):
        triton_linear.product(x, weight, random(5))
    groups = Groups.of(torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), 1, torch.float32)
    with pytest.raises(ValueError, match="grouped"):
        triton_linear.grouped(random(3, 7), random(1, 4, 8), None, groups, per_pair=True)
