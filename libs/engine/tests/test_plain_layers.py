"""Plain layers in one call of the CPU kernels: the same bits as the kernels one by one, for any team of threads, any
number of rows, and where ranks add up their parts of a sum.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_cpu import CompiledAttention
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.distributed import Alone
from lockstep_engine.fused_layer import FusedLayers, PlainEnds
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.linear import ColumnLinear, FusedRmsNorm, RowLinear
from lockstep_engine.plain_layer import PlainLayer
from lockstep_engine.scoring import Scoring
from torch import nn

pytestmark = [pytest.mark.bits, pytest.mark.skipif(cpu.build is None, reason="the kernels were not built")]

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 48, 4, 2, 16, 80


@dataclass
class TwoRanks:
    """The collectives of a rank whose other rank has the same part of each sum."""

    size: int = 2

    def all_reduce(self, x):
        return x.add_(x)


def linear(kind, shape, group, dtype, parts):
    out, inside = shape
    if kind is ColumnLinear:
        made = ColumnLinear(["w"], [(0, out)], inside, bias=True, dtype=dtype)
    else:
        made = RowLinear("w", (0, inside), out, group, bias=True, dtype=dtype, parts=parts)
    made.weight.data = torch.randn(shape).to(dtype) / 8
    made.bias.data = torch.randn(out).to(dtype)
    made.pack()
    return made


def norm(width):
    return FusedRmsNorm(nn.Parameter(torch.randn(width), requires_grad=False), 1e-5)


def layers(count, group, dtype, parts, *, head_norms):
    return [
        PlainLayer(
            number=number,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=0.3,
            window=(None, 20)[number % 2],
            qkv=linear(ColumnLinear, ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), group, dtype, 1),
            out=linear(RowLinear, (HIDDEN, HEADS * DIM), group, dtype, parts),
            gate_up=linear(ColumnLinear, (2 * INNER, HIDDEN), group, dtype, 1),
            down=linear(RowLinear, (HIDDEN, INNER), group, dtype, parts),
            norms=(norm(HIDDEN), norm(HIDDEN)),
            head_norms=(norm(DIM), norm(DIM)) if head_norms else None,
        )
        for number in range(count)
    ]


def step_of(positions, tokens, cache):
    """Attention of sequences that compute so many tokens each, from these positions on, over blocks of their own."""
    width = 4
    tables = np.arange(len(positions) * width, dtype=np.int32).reshape(-1, width)
    return CompiledAttention(cache, StepLayout(np.array(positions, np.int32), np.array(tokens, np.int32), tables))


def one_by_one(parts, x, cosine, sine, paged):
    """The layers as products, norms and attention that are called one after the other."""
    for layer in parts:
        first, second = layer.norms
        qkv = layer.qkv.forward(cpu.add_rms_norm(x, None, first.weight, first.eps)).view(len(x), -1, DIM)
        heads = list(qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
        for place in range(2):
            if layer.head_norms is not None:
                head_norm = layer.head_norms[place]
                heads[place] = cpu.add_rms_norm(heads[place].contiguous(), None, head_norm.weight, head_norm.eps)
            a, b = heads[place].split(DIM // 2, dim=-1)
            half = (slice(None), None, slice(DIM // 2))
            heads[place] = torch.cat([a * cosine[half] - b * sine[half], b * cosine[half] + a * sine[half]], dim=-1)
        queries, keys, values = (each.transpose(0, 1).contiguous() for each in heads)
        attended = paged.attend(layer.number, queries, keys, values, Scoring(layer.scale, layer.window))
        normed = cpu.add_rms_norm(x, layer.out.forward(attended.flatten(1)), second.weight, second.eps)
        gate, up = layer.gate_up.forward(normed).split(INNER, dim=1)
        x.add_(layer.down.forward(cpu.apply(cpu.Function.SILU, gate.contiguous()) * up))
    return x


@pytest.fixture
def threads():
    """Sets the number of threads; it is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "parts"), [(Alone(), 1), (Alone(), 4), (TwoRanks(), 2)])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1], [1, 17, 1], [33], [60] * 6])  # 360 rows share tiles
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bits_are_those_of_single_calls(threads, dtype, group, parts, lengths, count):
    torch.manual_seed(sum(lengths) + parts)
    threads(count)
    plain = layers(3, group, dtype, parts, head_norms=parts == 1)
    size = {"layers": 3, "kv_heads": KV_HEADS, "head_dim": DIM, "blocks": 4 * len(lengths), "dtype": torch.float32}
    caches = [KvCache(**size, device=torch.device("cpu")) for _ in range(2)]
    angles = torch.randn(2, 4 * BLOCK_SIZE, DIM // 2).repeat(1, 1, 2)
    fused = FusedLayers(plain)
    starts = [0] * len(lengths)
    for tokens in (lengths, [1] * len(lengths)):  # the second step reads what the first one stored
        steps = [step_of(starts, tokens, cache) for cache in caches]
        cosine, sine = angles.index_select(1, steps[0].positions)
        x = torch.randn(sum(tokens), HIDDEN)
        expected = one_by_one(plain, x.clone(), cosine, sine, steps[0])
        delta = fused.step(x, *angles, steps[1].positions, steps[1])
        assert torch.equal(x + delta, expected)
        assert torch.equal(caches[0].keys, caches[1].keys)
        assert torch.equal(caches[0].values, caches[1].values)
        starts = [start + each for start, each in zip(starts, tokens, strict=True)]


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1], [60] * 6])
def test_it_does_not_matter_which_thread_does_what(threads, lengths):
    torch.manual_seed(5)
    threads(2 * (os.cpu_count() or 1))  # they wait for cores, so that each step is shared out in another way
    fused = FusedLayers(layers(3, Alone(), torch.float32, 4, head_norms=True))
    size = {"layers": 3, "kv_heads": KV_HEADS, "head_dim": DIM, "blocks": 4 * len(lengths), "dtype": torch.float32}
    attention = step_of([0] * len(lengths), lengths, KvCache(**size, device=torch.device("cpu")))
    angles = torch.randn(2, 4 * BLOCK_SIZE, DIM // 2).repeat(1, 1, 2)
    x = torch.randn(sum(lengths), HIDDEN)

    def step():
        given = x.clone()
        return given + fused.step(given, *angles, attention.positions, attention)

    expected = step()
    assert all(torch.equal(step(), expected) for _ in range(100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1], [1, 17, 1]])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_whole_model_has_the_bits_of_its_parts(threads, dtype, lengths, count):
    torch.manual_seed(sum(lengths))
    threads(count)
    plain, rows, vocabulary = layers(2, Alone(), dtype, 4, head_norms=True), sum(lengths), 75
    size = {"layers": 2, "kv_heads": KV_HEADS, "head_dim": DIM, "blocks": 4 * len(lengths), "dtype": torch.float32}
    caches = [KvCache(**size, device=torch.device("cpu")) for _ in range(2)]
    steps = [step_of([0] * len(lengths), lengths, cache) for cache in caches]
    angles = torch.randn(2, 4 * BLOCK_SIZE, DIM // 2).repeat(1, 1, 2)
    embedding, last = torch.randn(vocabulary, HIDDEN).to(dtype), norm(HIDDEN)
    head = cpu.PackedLinear(torch.randn(vocabulary, HIDDEN).to(dtype), torch.randn(vocabulary))
    ids = torch.randint(vocabulary, (rows,))
    fused, outs = FusedLayers(plain), []
    for wanted in ([rows - 1], [0, rows // 2, rows - 1, 0, rows - 1], [*range(rows), 0], [], [rows - 1]):
        x = embedding[ids].float()
        delta = FusedLayers(plain).step(x, *angles, steps[0].positions, steps[0])
        chosen = torch.tensor(wanted, dtype=torch.int64)
        expected = head(cpu.add_rms_norm(x[chosen], delta[chosen], last.weight, last.eps))
        ends = PlainEnds(embedding, last, head, *angles)
        outs.append(fused.run_model(ends, ids, steps[1], chosen))
        assert torch.equal(outs[-1], expected)
        assert torch.equal(fused.step(embedding[ids].float(), *angles, steps[1].positions, steps[1]), delta)
        assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(outs[0], outs[-1])  # the first is still what it was


def test_buffers_of_small_steps_are_bounded():
    plain, head = layers(1, Alone(), torch.float32, 1, head_norms=False), cpu.PackedLinear(torch.randn(9, HIDDEN), None)
    angles = torch.randn(2, 4 * BLOCK_SIZE, DIM // 2).repeat(1, 1, 2)
    ends, fused = PlainEnds(torch.randn(9, HIDDEN), norm(HIDDEN), head, *angles), FusedLayers(plain)
    size = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "blocks": 80, "dtype": torch.float32}
    for rows in (*range(1, 20), 40):
        step = step_of([0] * 20, [rows, *[1] * 19], KvCache(**size, device=torch.device("cpu")))
        for wanted in range(1, 4):
            fused.run_model(ends, torch.zeros(rows + 19, dtype=torch.int64), step, torch.arange(wanted))
            step_of_one = step_of([0], [1], KvCache(**size, device=torch.device("cpu")))
            fused.run_model(ends, torch.zeros(1, dtype=torch.int64), step_of_one, torch.zeros(rows, dtype=torch.int64))
    assert 0 < len(fused._small) <= 16
    assert all(max(key[:2]) <= 16 for key in fused._small)
