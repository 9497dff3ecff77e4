"""While a model's own code runs, no operation whose rounding is left open comes to torch."""

import pytest
import torch
from checkpoints import CASES, make
from in_process import InProcessGroup
from lockstep_engine import rowwise
from lockstep_engine.interception import intercepted
from lockstep_engine.kernels import cpu
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

# fmt: off
EXACT = {
    "__ior__", "abs", "add", "add_", "alias", "any", "arange", "bitwise_not", "cat", "chunk", "clamp", "clamp_max",
    "clone", "complex", "concat", "contiguous", "copy_", "cumsum", "detach_", "div", "div_", "dropout", "embedding",
    "empty", "empty_like", "eq", "expand", "fill_", "flatten", "floor_divide", "full", "full_like", "gather", "ge",
    "greater", "gt", "imag", "index", "index_add_", "index_copy_", "index_fill_", "index_put_", "index_select",
    "is_nonzero", "item", "le", "lift_fresh", "masked_fill", "masked_fill_", "max", "minimum", "mul", "mul_",
    "narrow", "neg", "new_empty", "new_ones", "new_zeros", "nonzero", "one_hot", "ones", "ones_like", "pad",
    "permute", "pow", "real", "reciprocal", "relu", "remainder", "repeat", "repeat_interleave", "reshape",
    "result_type", "rsqrt", "scatter", "scatter_", "select", "slice", "split", "split_with_sizes", "sqrt", "square",
    "squeeze", "stack", "sub", "sub_", "sum", "t", "to", "topk", "transpose", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as_complex", "view_as_real", "where", "zeros", "zeros_like",
}
# fmt: on
"""Operations that move numbers, compare them, or compute each element as IEEE 754 rounds it: sums of two, products,
quotients, roots. The order in which `index_add_` adds and `topk` looks is that of the row. `cumsum` and `sum` are of
integers, `pow` of integers and float64.
"""


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in ("cumsum", "sum"):
            assert not args[0].is_floating_point()
        if name == "pow":
            assert torch.result_type(*args) in (torch.float64, torch.int64, torch.int32)
        if name in ("add", "sub"):
            assert (kwargs or {}).get("alpha", 1) == 1
        self.seen.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(cpu.build is None, reason="torch computes here, in shapes that are shown to be stable")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tps])
def test_nothing_is_left_to_torch_that_it_may_round_in_two_ways(tmp_path, name):
    group = InProcessGroup(make(name, tmp_path)[0], 1)
    model, listed = group.models[0], Listed()
    inner = model.logits

    def logits(*args):
        with listed:
            return inner(*args)

    model.logits = logits
    group.logits(list(range(2, 42)), 0)
    group.logits([5], 40)
    assert listed.seen
    assert listed.seen <= EXACT


def test_operations_are_replaced_inside_and_on_this_thread_only():
    x, weight = torch.randn(5, 33), torch.randn(7, 33)
    plain = functional.linear(x, weight)
    with torch.inference_mode(), intercepted():
        assert torch.equal(functional.linear(x, weight), rowwise.linear(x, weight))
        assert torch.equal(x @ weight.t(), rowwise.linear(x, weight))
        assert torch.equal(x.mean(-1), rowwise.sum_rows(x) / 33)
        assert torch.equal(functional.softmax(x, 0), rowwise.softmax(x.t()).t())
        assert x.double().mean(0, keepdim=True).shape == (1, 33)
        assert x.sum((0, 1)).shape == ()
        assert x.sum((0, 1), keepdim=True).shape == (1, 1)
        torch.testing.assert_close(x.sum((0, 1)), x.double().sum().float())
        assert torch.equal(torch.ones(3, 4, dtype=torch.int64).sum(0), torch.full((4,), 3))
        torch.testing.assert_close(torch.randn(2, 3, 4, 5) @ torch.ones(5), torch.zeros(2, 3, 4), atol=20, rtol=1)
    assert torch.equal(functional.linear(x, weight), plain)
