"""With virtual shards, 1, 2 and 4 ranks compute the same bits, so that they continue each other's streams."""

from pathlib import Path

import pytest
import torch
from checkpoints import VOCABULARY, make
from fast_cases import fast_if
from in_process import InProcessGroup
from lockstep_engine import Engine, EngineConfig, Request, SamplingParams
from lockstep_engine.config import HotWindow
from lockstep_engine.distributed import Alone
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import RowLinear
from lockstep_engine.virtual_shards import add_in_tree, held_shards

MODEL = Path(__file__).parents[3] / "models/reference"
KERNELS = pytest.mark.skipif(cpu.build is None, reason="torch's products depend on a matrix's width")


def group(path, tp, **options):
    return InProcessGroup(path, tp, shards=4, **options)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, fast_if(False, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        fast_if(name in ("llama", "mixtral", "bloom"), name)
        for name in ("llama", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "bloom", "olmo2", "falcon-new")
    ],
)
def test_fingerprints_do_not_depend_on_the_number_of_ranks(tmp_path, name, dtype):
    path = make(name, tmp_path)[0]
    found = [group(path, tp, dtype=dtype, hot_window=HotWindow(1, 2)).measure() for tp in (1, 2, 4)]
    assert all(each.deterministic for each in found)
    assert len({each.fingerprint for each in found}) == 1


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_a_stream_moves_from_two_ranks_to_four_bit_for_bit(tmp_path, name, dtype):
    path = make(name, tmp_path)[0]
    ids = torch.randint(2, VOCABULARY, (20,), generator=torch.Generator().manual_seed(1)).tolist()

    def decode(engine, text, count):
        rows = [engine.logits(text, 0)[-1]]
        for _ in range(count - 1):
            text = [*text, int(rows[-1].argmax())]
            rows.append(engine.logits(text[-1:], len(text) - 1)[0])
        return [*text, int(rows[-1].argmax())], rows

    whole, expected = decode(group(path, 2, dtype=dtype), ids, 12)
    half, before = decode(group(path, 2, dtype=dtype), ids, 6)
    moved, after = decode(group(path, 4, dtype=dtype), half, 6)
    assert moved == whole
    assert all(torch.equal(*each) for each in zip([*before, *after], expected, strict=True))


@KERNELS
@pytest.mark.slow
def test_rank_processes_of_one_and_two_continue_each_others_streams():
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=3)
    fingerprints, wholes = [], []
    for tp in (1, 2):
        with Engine(MODEL, tp=tp, tp_shards=4, threads=1) as engine:
            assert engine.core.status().deterministic
            fingerprints.append(engine.core.status().fingerprint)
            wholes.append(engine.generate_ids(["It was a dark night"], params)[0])
            prompt = tuple(engine.encode("It was a dark night"))
            outputs = engine.run([Request("moved", prompt, params, emitted_ids=tuple(wholes[0][:9]))])[0]
            assert [id_ for output in outputs for id_ in output.ids] == wholes[0][9:]
    assert fingerprints[0] == fingerprints[1]
    assert wholes[0] == wholes[1]


def test_shards_that_ranks_hold():
    assert [held_shards(64, ranks) for ranks in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [held_shards(6, ranks) for ranks in (1, 2, 3)] == [2, 1, 1]
    assert held_shards(64, 1, shards=1) == 1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_neighbours_are_added_first(count):
    parts = list(torch.randn(count, 3, 7, generator=torch.Generator().manual_seed(2)) * 1e3)
    kept = [part.clone() for part in parts]
    expected = parts
    while len(expected) > 1:
        sums = [left + right for left, right in zip(expected[::2], expected[1::2], strict=False)]
        expected = [*sums, *expected[2 * len(sums) :]]
    assert torch.equal(add_in_tree(parts), expected[0])
    assert all(torch.equal(*each) for each in zip(parts, kept, strict=True))


@KERNELS
@pytest.mark.parametrize("rows", [1, 2, 13, 40])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_product_of_parts_is_the_tree_of_their_products(rows, kind):
    """Panels that are not full, and groups of scales across which a part ends."""
    torch.manual_seed(3)
    out, inside, size = 150, 1200, 64
    x, bias = torch.randn(rows, inside), torch.randn(out)
    coded = kind is torch.int8
    weight = torch.randint(-127, 128, (out, inside), dtype=kind) if coded else torch.randn(out, inside).to(kind)
    scales = torch.rand(out, -(-inside // size)) if coded else None
    values = weight.float() if scales is None else weight * scales.repeat_interleave(size, 1)[:, :inside]
    codes = None if scales is None else cpu.Codes(scales, size)
    whole = cpu.PackedLinear(weight, bias, codes=codes, parts=4)
    parts = zip(x.chunk(4, 1), values.chunk(4, 1), strict=True)
    assert torch.equal(whole(x), add_in_tree([cpu.PackedLinear(w, None)(each) for each, w in parts]) + bias)


def test_without_kernels_a_row_linear_adds_its_parts_in_the_tree(without_kernels):
    torch.manual_seed(4)
    layer = RowLinear("p", (0, 64), 8, Alone(), bias=True, dtype=torch.float32, parts=4)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    x, weights = torch.randn(5, 64), [each.contiguous() for each in layer.weight.data.clone().chunk(4, 1)]
    layer.pack()
    products = [torch.nn.functional.linear(*each) for each in zip(x.chunk(4, 1), weights, strict=True)]
    assert torch.equal(layer(x), add_in_tree(products) + layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_row_linear_without_kernels_is_one_product_of_torch(without_kernels, monkeypatch, dtype):
    """A bias that is added to a rounded product would be rounded twice."""
    torch.manual_seed(5)
    layer = RowLinear("p", (0, 1024), 96, Alone(), bias=True, dtype=dtype)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    layer.pack()
    calls, product = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: calls.append(given) or product(*given))
    x = torch.randn(5, 1024).to(dtype)
    assert torch.equal(layer(x), product(x, layer.weight, layer.bias))
    assert [given[2] is layer.bias for given in calls] == [True]


@pytest.mark.parametrize("count", [0, 2, 8])
def test_other_numbers_of_shards_are_refused(count):
    with pytest.raises(Exception, match="tp_shards must be 1 or 4"):
        EngineConfig(model="m", tp_shards=count)
