"""Rows keep their bits whatever stands beside them, in every build of the kernels and without them."""

import pytest
import torch
from lockstep_engine import rowwise
from lockstep_engine.kernels import cpu
from lockstep_engine.kernels.cpu import Function
from torch.nn import functional

pytestmark = pytest.mark.bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH = {
    Function.SIGMOID: torch.sigmoid,
    Function.SILU: functional.silu,
    Function.TANH: torch.tanh,
    Function.GELU: functional.gelu,
    Function.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Function.COSINE: torch.cos,
    Function.SINE: torch.sin,
}


def builds_here():
    """Those that this machine can run, from the one that it takes."""
    return [] if cpu.build is None else list(cpu.BUILDS[cpu.BUILDS.index(cpu.build) :])


BUILDS = [*builds_here(), "off"]


@pytest.fixture(params=BUILDS)
def build(request):
    before = cpu.build or "off"
    cpu.use(request.param)
    yield request.param
    cpu.use(before)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow), 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_stand_alone(compute, x):
    """`compute` of any rows of x is those rows of its result for all."""
    together = compute(x)
    for start, count in ((0, 1), (len(x) - 1, 1), (3, 2), (1, 3), (2, 4), (5, 8), (7, 9), (1, 17)):
        rows = slice(start, start + count)
        assert torch.equal(compute(x[rows].clone()), together[rows]), (start, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inside", "out"), [(64, 96), (40, 24), (288, 331), (17, 5), (33, 1), (1, 8)])
def test_products(build, threads, inside, out, dtype):
    x, weight, bias = randn(37, inside).to(dtype), randn(out, inside, seed=1).to(dtype), randn(out, seed=2).to(dtype)
    assert_rows_stand_alone(lambda rows: rowwise.linear(rows, weight, bias), x)
    turned = weight.t().contiguous()
    assert_rows_stand_alone(lambda rows: rowwise.product(rows[None], turned[None])[0], x)
    expected = x.double() @ weight.double().t()
    scale = expected.abs().max() * (1 if dtype is torch.float32 else 1e3 if dtype is torch.float16 else 1e4)
    for ours in (rowwise.linear(x, weight), rowwise.product(x[None], turned[None])[0]):
        assert ours.dtype is dtype
        assert (ours - expected).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("shape", [(4, 1, 32, 16), (3, 7, 20, 128), (1, 5, 128, 10)])
def test_products_of_batches(build, threads, shape):
    batch, rows, inside, out = shape
    x, weight = randn(batch, rows, inside), randn(batch, out, inside, seed=1)
    together = rowwise.product(x, weight.transpose(1, 2))
    torch.testing.assert_close(together, torch.bmm(x, weight.transpose(1, 2)), atol=1e-4, rtol=1e-4)
    for each in range(batch):
        one = slice(each, each + 1)
        assert torch.equal(rowwise.product(x[one], weight[one].transpose(1, 2)), together[one])
        assert torch.equal(rowwise.product(x[one, -1:], weight[one].transpose(1, 2)), together[one, -1:])


def test_products_of_nothing(build):
    assert rowwise.product(torch.empty(2, 0, 8), torch.empty(2, 8, 3)).shape == (2, 0, 3)
    assert torch.equal(rowwise.product(torch.empty(1, 2, 0), torch.empty(1, 0, 3)), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [10, 331])
@pytest.mark.parametrize("function", Function)
def test_functions(build, threads, function, width, dtype):
    x = (randn(70, width) * (500 if function >= Function.COSINE else 5)).to(dtype)
    assert_rows_stand_alone(lambda rows: rowwise.apply(function, rows), x)
    expected = TORCH[function](x.double())
    tolerance = 2e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(rowwise.apply(function, x).double(), expected, atol=tolerance, rtol=tolerance)


def test_functions_over_many_elements(build, threads):
    x = randn(203, 1440)
    assert_rows_stand_alone(lambda rows: rowwise.apply(Function.SILU, rows), x)
    assert_rows_stand_alone(lambda rows: rowwise.apply(Function.SILU, rows[:, 100:-7]), x)


def test_functions_of_extremes(build):
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 86.0, -86.0, 88.0, -88.0, 100.0, -100.0, 1e30, -1e30])
    for function in (Function.SIGMOID, Function.SILU, Function.TANH, Function.GELU):
        torch.testing.assert_close(rowwise.apply(function, x), TORCH[function](x), atol=1e-34, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 331, 4096])
def test_sums_and_norms(build, threads, width, dtype):
    x, weight, bias = randn(40, width).to(dtype), randn(width, seed=1).to(dtype), randn(width, seed=2).to(dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 30 * torch.finfo(dtype).eps
    for compute, expected in (
        (rowwise.softmax, torch.softmax(x.double(), -1)),
        (rowwise.sum_rows, x.double().sum(-1)),
        (
            lambda rows: rowwise.rms_norm(rows, weight, 1e-5),
            functional.rms_norm(x.double(), (width,), weight.double(), 1e-5),
        ),
        (
            lambda rows: rowwise.layer_norm(rows, weight, bias, 1e-5),
            functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5),
        ),
    ):
        assert_rows_stand_alone(compute, x)
        torch.testing.assert_close(compute(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(len(BUILDS) < 3, reason="there is one build to compare")
def test_all_builds_give_the_same_bits():
    before, results = cpu.build, {}
    x, weight = randn(7, 331) * 4, randn(97, 331, seed=1)
    for name in builds_here():
        cpu.use(name)
        results[name] = [
            *(rowwise.apply(function, x) for function in Function),
            *(rowwise.linear(x, weight.to(dtype)) for dtype in DTYPES),
            *(rowwise.product(x[None], weight.t().contiguous()[None].to(dtype)) for dtype in DTYPES),
            *(cpu.PackedLinear(weight.to(dtype), None)(x) for dtype in DTYPES),
            rowwise.softmax(x),
            rowwise.sum_rows(x),
            rowwise.rms_norm(x, weight[0], 1e-5),
            rowwise.layer_norm(x, weight[0], weight[1], 1e-5),
        ]
    cpu.use(before)
    first, *others = results.values()
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first, strict=True))


def test_a_build_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="LOCKSTEP_CPU_KERNELS=avx1024: this machine has no such build"):
        cpu.use("avx1024")
