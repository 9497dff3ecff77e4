"""Layers split over ranks: the parts put together are the unsplit layer."""

import weakref

import pytest
import torch
from lockstep_engine.interception import intercepted
from lockstep_engine.linear import (
    ColumnLinear,
    FusedRmsNorm,
    MergedPart,
    RowLinear,
    SplitRmsNorm,
    VocabEmbedding,
    VocabHead,
)
from torch.nn import functional

F32 = torch.float32


class FakeGroup:
    """One rank of a group whose other ranks are computed later: it keeps what it is to sum and answers with `total`."""

    spent_ns = 0

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.given = self.total = None

    def all_reduce(self, x):
        self.given = x.clone()
        return x if self.total is None else self.total.clone()

    def all_gather(self, x):
        self.given = x.clone()
        return self.total


def load(layer, tensors, *, packed=True):
    """Fill a layer's parameters from whole tensors, as `weights` does."""
    for name, pieces in layer.pieces.items():
        target = getattr(layer, name)
        for piece in pieces:
            source = tensors[piece.source].narrow(piece.dim, piece.start, piece.length)
            target.data.narrow(piece.dim, piece.offset, piece.length).copy_(source)
    if packed and hasattr(layer, "pack"):
        layer.pack()
    return layer


def run_group(size, build, x_of):
    """Each rank's result of a layer that sums over ranks. `build(group)` makes it, `x_of(rank)` is its input."""
    groups = [FakeGroup(rank, size) for rank in range(size)]
    layers = [build(group) for group in groups]
    for layer, group in zip(layers, groups, strict=True):
        layer(x_of(group.rank))
    total = sum(group.given for group in groups)
    for group in groups:
        group.total = total
    return [layer(x_of(group.rank)) for layer, group in zip(layers, groups, strict=True)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_columns_side_by_side_are_the_unsplit_linear(size, bias, packed):
    weight, offsets, x = torch.randn(24, 40), torch.randn(24), torch.randn(2, 7, 40)
    tensors = {"p.weight": weight, "p.bias": offsets}
    parts = []
    for rank in range(size):
        shard = (rank * 24 // size, 24 // size)
        layer = load(ColumnLinear(["p"], [shard], 40, bias=bias, dtype=F32), tensors, packed=packed)
        assert (layer.packed is not None) == packed
        parts.append(layer(x))
    expected = functional.linear(x, weight, offsets if bias else None)
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_merged_columns_are_their_linears(size, bias):
    """Query, key and value of 4 and 2 heads of 8; at size 4 two ranks keep the same key/value head."""
    features = {"q": 32, "k": 16, "v": 16}
    tensors = {f"{name}.weight": torch.randn(rows, 20) for name, rows in features.items()}
    tensors |= {f"{name}.bias": torch.randn(rows) for name, rows in features.items()}
    x = torch.randn(5, 20)
    for rank in range(size):
        kept = max(8, 16 // size)
        shards = [
            (rank * 32 // size, 32 // size),
            (rank * 16 // size // 8 * 8, kept),
            (rank * 16 // size // 8 * 8, kept),
        ]
        layer = load(ColumnLinear(list(features), shards, 20, bias=bias, dtype=F32), tensors)
        parts = [part(x) for part in MergedPart.split(layer)]
        for name, part, (start, length) in zip(features, parts, shards, strict=True):
            whole = functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if bias else None)
            torch.testing.assert_close(part, whole[:, start : start + length])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_summed_are_the_unsplit_linear_with_its_bias_once(size, bias):
    weight, offsets, x = torch.randn(24, 40), torch.randn(24), torch.randn(7, 40)
    tensors = {"p.weight": weight, "p.bias": offsets}
    width = 40 // size

    def build(group):
        return load(RowLinear("p", (group.rank * width, width), 24, group, bias=bias, dtype=F32), tensors)

    if size == 1:
        results = [build(FakeGroup(0, 1))(x)]
    else:
        results = run_group(size, build, lambda rank: x[:, rank * width : (rank + 1) * width])
    for result in results:
        torch.testing.assert_close(result, functional.linear(x, weight, offsets if bias else None))


def test_columns_then_rows_need_one_sum():
    """A gated MLP as Megatron-LM splits it."""
    gate, up, down, x = torch.randn(48, 16), torch.randn(48, 16), torch.randn(16, 48), torch.randn(9, 16)
    tensors = {"gate.weight": gate, "up.weight": up, "down.weight": down}
    expected = functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)
    for size in (2, 4):
        width = 48 // size
        total = torch.zeros(9, 16)
        for rank in range(size):
            shard = (rank * width, width)
            parts = MergedPart.split(
                load(ColumnLinear(["gate", "up"], [shard, shard], 16, bias=False, dtype=F32), tensors)
            )
            group = FakeGroup(rank, size)
            row = load(RowLinear("down", shard, 16, group, bias=False, dtype=F32), tensors)
            total += row(functional.silu(parts[0](x)) * parts[1](x))
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [8, 10, 13])
@pytest.mark.parametrize("scale", [None, 6**0.5])
def test_vocabulary_split_is_the_whole_embedding_and_head(size, vocabulary, scale):
    table, offsets = torch.randn(vocabulary, 6), torch.randn(vocabulary)
    ids = torch.arange(vocabulary).repeat(2, 1)
    tensors = {"e.weight": table, "e.bias": offsets}

    def build(group):
        return load(VocabEmbedding("e", vocabulary, 6, group, F32, scale), tensors)

    results = [build(FakeGroup(0, 1))(ids)] if size == 1 else run_group(size, build, lambda _: ids)
    for result in results:
        assert torch.equal(result, table[ids] * torch.tensor(scale or 1.0))

    hidden = torch.randn(5, 6)
    for bias in (False, True):
        heads = [
            load(VocabHead("e", vocabulary, 6, FakeGroup(rank, size), F32, bias=bias), tensors) for rank in range(size)
        ]
        logits = torch.cat([head(hidden) for head in heads], dim=-1)
        expected = functional.linear(hidden, table, offsets if bias else None)
        torch.testing.assert_close(logits[:, :vocabulary], expected)
        assert len({head.weight.shape for head in heads}) == 1


class TestMergedParts:
    @pytest.fixture
    def merged(self):
        tensors = {f"{name}.weight": torch.randn(4, 6) for name in "abc"}
        layer = load(ColumnLinear(list("abc"), [(0, 4)] * 3, 6, bias=False, dtype=F32), tensors)
        layer.given = list(tensors.values())
        return layer

    def expected(self, merged, x):
        return [functional.linear(x, weight) for weight in merged.given]

    def test_the_product_is_computed_once(self, merged):
        calls = []
        merged.register_forward_hook(lambda *_: calls.append(1))
        parts, x = MergedPart.split(merged), torch.randn(3, 6)
        for _ in range(4):
            for part in parts:
                part(x)
        assert len(calls) == 4

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 1, 2, 2)])
    def test_any_order_of_calls_gives_the_right_part(self, merged, order):
        parts = MergedPart.split(merged)
        for seed in range(3):
            x = torch.full((3, 6), float(seed + 1))
            for index in order:
                torch.testing.assert_close(parts[index](x), self.expected(merged, x)[index])

    def test_parts_with_different_inputs_do_not_mix(self, merged):
        parts, inputs = MergedPart.split(merged), torch.randn(3, 5, 6).unbind()
        for index, x in enumerate(inputs):
            torch.testing.assert_close(parts[index](x), self.expected(merged, x)[index])

    def test_an_input_changed_in_place_is_seen_by_the_next_layer(self, merged):
        parts, x = MergedPart.split(merged), torch.randn(3, 6)
        for part in parts:
            part(x)
        x.add_(1)
        torch.testing.assert_close(parts[0](x), self.expected(merged, x)[0])
        torch.testing.assert_close(parts[1](x), self.expected(merged, x)[1])

    def test_nothing_is_kept_after_the_last_part(self, merged):
        parts, x = MergedPart.split(merged), torch.randn(3, 6)
        kept = [weakref.ref(x), *(weakref.ref(part(x)) for part in parts)]
        del x
        assert [each() for each in kept] == [None] * len(kept)

    def test_only_the_first_part_owns_the_parameters(self, merged):
        first, *others = MergedPart.split(merged)
        assert [name for name, _ in first.named_parameters()] == ["merged.weight"]
        assert all(list(other.parameters()) == [] for other in others)
        assert all(other.merged_linear is merged for other in others)
        assert (first.in_features, first.out_features) == (6, 4)


@pytest.mark.bits
@pytest.mark.parametrize(("inside", "out"), [(64, 96), (40, 24), (288, 331), (96, 64)])
def test_a_row_of_a_packed_product_has_the_same_bits_whatever_its_neighbours_and_threads(inside, out):
    weight, x = {"p.weight": torch.randn(out, inside)}, torch.randn(33, inside)
    before = torch.get_num_threads()
    try:
        with intercepted():  # as in a step: without the kernels the product is the interception's
            whole = load(ColumnLinear(["p"], [(0, out)], inside, bias=False, dtype=F32), weight)(x)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                layer = load(ColumnLinear(["p"], [(0, out)], inside, bias=False, dtype=F32), weight)
                for start, count in ((0, 33), (0, 1), (32, 1), (5, 2), (3, 7), (16, 16)):
                    assert torch.equal(layer(x[start : start + count].clone()), whole[start : start + count])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole, functional.linear(x, weight["p.weight"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 40), (2, 4, 2, 16), (7, 3)])
def test_norm_is_torchs(shape):
    norm = FusedRmsNorm(torch.nn.Parameter(torch.randn(shape[-1])), 1e-5)
    x = torch.randn(shape)
    expected = functional.rms_norm(x, shape[-1:], norm.weight, 1e-5)
    before = x.clone()
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(x, before)
    torch.testing.assert_close(norm(x.transpose(0, -2)), expected.transpose(0, -2), atol=1e-6, rtol=1e-5)
    narrow = FusedRmsNorm(torch.nn.Parameter(norm.weight.bfloat16()), 1e-5)(x.bfloat16())
    torch.testing.assert_close(narrow.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 1), (4, 2)])
def test_a_norm_over_all_heads_is_the_same_split_over_ranks(size, copies):
    """With `copies`, as many ranks have the same part."""
    weight, x = torch.randn(32), torch.randn(5, 32)
    width = 32 * copies // size
    start = [rank // copies * width for rank in range(size)]

    def build(group):
        norm = SplitRmsNorm("n", (start[group.rank], width), 32, copies, 1e-5, group, F32)
        return load(norm, {"n.weight": weight})

    results = run_group(size, build, lambda rank: x[:, start[rank] : start[rank] + width])
    expected = functional.rms_norm(x, (32,), weight, 1e-5)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, expected[:, start[rank] : start[rank] + width])
