"""Checkpoints that quantize weights and activations to 8 bits (W8A8) are multiplied in integers by the CPU kernels. A
sum of integers is exact: results have the same bits in every build, batch, chunk and number of threads, and are another
class of numerics than those of widened weights.
"""

import copy
import itertools
import json

import numpy as np
import packers
import pytest
import torch
from checkpoints import VOCABULARY, make
from fast_cases import fast_if
from in_process import InProcessGroup
from lockstep_engine import Engine, EngineConfig, Request, SamplingParams
from lockstep_engine.distributed import Alone
from lockstep_engine.kernels import cpu
from lockstep_engine.linear import ColumnLinear, RowLinear, multiplies_integers
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import BuiltModel, build_model
from lockstep_engine.weights import load_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

IDS = torch.randint(2, VOCABULARY, (40,), generator=torch.Generator().manual_seed(5)).tolist()
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
W8A16 = packers.compressed_config("int-quantized")
W8A8 = copy.deepcopy(W8A16)
W8A8["config_groups"]["group_0"]["input_activations"] = TOKENS
MODELS = ("llama", "llama-grouped-untied", "phi3")  # q k v merged; fewer keys than queries; not of the plain shape

needs_kernels = pytest.mark.skipif(not cpu.build, reason="the kernels were not built")


@pytest.fixture(params=cpu.BUILDS)
def build(request):
    """Each build that this CPU has."""
    before = cpu.build or "off"
    try:
        cpu.use(request.param)
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    cpu.use(before)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def exact_product(x, codes, scales, bias, parts=1):
    """What the kernels compute, in 64-bit integers: [rows, in], [out, in], [out], [out] → [rows, out], float32."""
    sums = []
    with np.errstate(all="ignore"):
        for some, of_part in zip(np.split(x, parts, 1), np.split(codes, parts, 1), strict=True):
            peak = np.abs(some).max(1, keepdims=True)
            inverse = np.where(peak < np.float32(2**-100), np.float32(0), np.float32(127) / peak)
            scale = np.where(peak < np.float32(2**-100), np.float32(0), peak / np.float32(127))
            integers = np.rint(some * inverse).astype(np.int64)
            assert np.abs(integers).max() <= 127
            exact = integers @ of_part.astype(np.int64).T
            sums.append(exact.astype(np.float32) * (scale * scales))
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return torch.from_numpy(sums[0] + bias)


def numbers(out, inside, seed=0):
    """Codes, scales and biases."""
    random = np.random.default_rng(seed)
    codes = random.integers(-128, 128, (out, inside)).astype(np.int8)
    return codes, random.random(out, np.float32) / 100, random.standard_normal(out, np.float32)


def packed(codes, scales, bias, parts=1):
    how = cpu.Codes(torch.from_numpy(scales)[:, None], codes.shape[1], integers=True)
    return cpu.PackedLinear(torch.from_numpy(codes), torch.from_numpy(bias), codes=how, parts=parts)


def rows(out, inside, seed):
    return packers.scaled(out, inside, shape=(out, 1), seed=seed)


def checkpoint(tmp_path, name, config=W8A8, pack=rows):
    """A checkpoint of codes, and one of the same values in float32."""
    return packers.quantized_twin(make(name, tmp_path / "made")[0], tmp_path, config, pack)


def layers_of(path):
    """The layers that products are made with, as a rank loads them."""
    info = inspect_model(EngineConfig(model=str(path)))
    model = build_model(info, Alone(), torch.float32).module
    load_weights(model, info, torch.device("cpu"))
    return model, [each for each in model.modules() if isinstance(each, ColumnLinear | RowLinear)]


def is_integer(path):
    """Whether the layers of the model multiply integers: all or none of them."""
    model, layers = layers_of(path)
    (found,) = {layer.code_form is not None and layer.code_form.integers for layer in layers}
    assert multiplies_integers(model) == found
    return found


@needs_kernels
@pytest.mark.parametrize(
    ("out", "inside", "parts"),
    [(331, 40, 1), (64, 96, 1), (160, 32, 2), (3, 4, 1), (35, 1104, 4), (300, 512, 4), (40, 36, 1), (129, 148, 1)],
)
def test_a_product_is_that_of_exact_integers(build, out, inside, parts):
    codes, scales, bias = numbers(out, inside)
    product = packed(codes, scales, bias, parts)
    x = np.random.default_rng(1).standard_normal((64, inside), np.float32)
    expected = exact_product(x, codes, scales, bias, parts)
    for count in range(1, 65):
        assert torch.equal(product(torch.from_numpy(x[-count:])), expected[-count:])


@needs_kernels
def test_every_pair_of_integers_is_multiplied_exactly(build):
    codes = np.arange(-128, 128).astype(np.int8)[:, None].repeat(4, 1)
    product = packed(codes, np.ones(256, np.float32), np.zeros(256, np.float32))
    for place in range(4):
        x = torch.zeros(255, 4)
        x[:, place] = torch.arange(-127, 128)
        x[:, (place + 1) % 4] = 127  # the scale is 1
        expected = (x[:, place, None] + 127) * torch.arange(-128, 128)
        assert torch.equal(product(x), expected)


@needs_kernels
def test_halves_are_rounded_to_even_integers(build):
    product = packed(np.eye(8, dtype=np.int8), np.ones(8, np.float32), np.zeros(8, np.float32))
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49999997]])
    assert product(x).tolist() == [[127, 0, 2, 2, 0, -2, -126, 0]]


@needs_kernels
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_longest_sums_fit(build, sign):
    inside = 2**17
    assert cpu.takes_integers(inside)
    codes = np.full((2, inside), -128, np.int8)
    product = packed(codes, np.ones(2, np.float32), np.zeros(2, np.float32))
    x = torch.full((3, inside), 127.0) * sign
    assert torch.equal(product(x), torch.full((3, 2), -127.0 * 128 * inside * sign))


def test_inputs_that_the_kernels_do_not_take():
    assert [cpu.takes_integers(inputs) for inputs in (4, 4096, 2**17, 2**17 + 4, 6)] == [True, True, True, False, False]


@needs_kernels
def test_small_numbers_are_0_and_no_numbers_stay_in_their_row(build):
    codes, scales, bias = numbers(70, 40)
    product = packed(codes, scales, bias)
    x = np.random.default_rng(2).standard_normal((9, 40), np.float32)
    x[1], x[2], x[3] = 0, x[2] * np.float32(1e-39), x[3] * np.float32(1e-25)
    expected = exact_product(x, codes, scales, bias)
    assert torch.equal(expected[1], torch.from_numpy(bias))
    assert torch.equal(expected[2], expected[1])
    assert torch.equal(product(torch.from_numpy(x)), expected)
    x[4, 39], x[5, 0], x[6, 7] = np.nan, np.inf, -np.inf
    damaged = product(torch.from_numpy(x))
    assert damaged[4:7].isfinite().sum() == 0
    kept = [0, 1, 2, 3, 7, 8]
    assert torch.equal(damaged[kept], expected[kept])


@needs_kernels
def test_threads_do_not_matter(threads):
    codes, scales, bias = numbers(331, 512)
    x = np.random.default_rng(3).standard_normal((30, 512), np.float32)
    for count in (1, 2, 3):
        threads(count)
        product = packed(codes, scales, bias, 4)
        for some in (1, 2, 13, 30):
            assert torch.equal(product(torch.from_numpy(x[:some])), exact_product(x[:some], codes, scales, bias, 4))


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_do_not_matter(tmp_path, name, tp):
    group = InProcessGroup(checkpoint(tmp_path, name)[0], tp)
    whole = group.logits(IDS, 0)
    for cuts in ((0, 23, 35, 40), (0, 1, 16, 17, 40), range(41)):
        parts = [group.logits(IDS[begin:end], begin) for begin, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


@needs_kernels
@pytest.mark.bits
@pytest.mark.parametrize("tp", [1, 2])
def test_neighbours_and_threads_do_not_matter(tmp_path, threads, tp):
    path, found = checkpoint(tmp_path, "llama")[0], set()
    for count in (1, 2):
        threads(count)
        numerics = InProcessGroup(path, tp).measure()
        assert numerics.deterministic
        found.add(numerics.fingerprint)
    assert len(found) == 1


@needs_kernels
def test_a_model_has_the_same_bits_in_every_build(tmp_path, build):
    path = checkpoint(tmp_path, "llama")[0]
    own = InProcessGroup(path, 1).logits(IDS, 0)
    cpu.use("plain")
    assert torch.equal(InProcessGroup(path, 1).logits(IDS, 0), own)


@needs_kernels
@pytest.mark.parametrize("name", [fast_if(name == "llama", name) for name in MODELS])
def test_one_two_and_four_ranks_have_the_same_bits_with_virtual_shards(tmp_path, name):
    """A part of a row that ranks share is quantized for itself, whichever rank has it."""
    path = checkpoint(tmp_path, name)[0]
    groups = [InProcessGroup(path, tp, shards=4) for tp in (1, 2, 4)]
    first, *others = [group.logits(IDS, 0) for group in groups]
    assert all(torch.equal(each, first) for each in others)
    assert len({group.measure().fingerprint for group in groups}) == 1


@needs_kernels
def test_fused_layers_compute_what_modules_do(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, "llama")[0]
    fused = InProcessGroup(path, 1)
    monkeypatch.setattr(BuiltModel, "fuse", lambda *_: None)
    modules = InProcessGroup(path, 1)
    assert (fused.fused > 0, modules.fused) == (True, 0)
    assert torch.equal(fused.logits(IDS, 0), modules.logits(IDS, 0))
    assert torch.equal(fused.logits(IDS[:1], 40), modules.logits(IDS[:1], 40))


@needs_kernels
@pytest.mark.parametrize("shards", [1, 4])
def test_fingerprints_tell_integers_from_widened_weights(tmp_path, shards):
    coded, plain = checkpoint(tmp_path, "llama")
    integers, widened = InProcessGroup(coded, 1, shards=shards), InProcessGroup(plain, 1, shards=shards)
    assert not torch.equal(integers.logits(IDS, 0), widened.logits(IDS, 0))
    assert integers.measure().fingerprint != widened.measure().fingerprint


def test_without_the_kernels_activations_stay_in_float(tmp_path, without_kernels):
    coded, plain = checkpoint(tmp_path, "llama")
    assert not is_integer(coded)
    assert torch.equal(InProcessGroup(coded, 1).logits(IDS, 0), InProcessGroup(plain, 1).logits(IDS, 0))


@needs_kernels
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"symmetric": None, "type": None}, True),  # the defaults of the format
        ({"dynamic": False}, False),
        ({"dynamic": "local"}, False),
        ({"symmetric": False}, False),
        ({"strategy": "tensor"}, False),
        ({"num_bits": 4}, False),
        ({"type": "float"}, False),
    ],
    ids=str,
)
def test_only_activations_of_this_form_are_quantized(tmp_path, change, expected):
    config = copy.deepcopy(W8A8)
    config["config_groups"]["group_0"]["input_activations"] = TOKENS | change
    coded, _ = checkpoint(tmp_path, "llama", config)
    remark = "activations in 8 bits" if expected else "activations computed in float"
    assert any(each.startswith(remark) for each in inspect_model(EngineConfig(model=str(coded))).quantization.remarks)
    assert is_integer(coded) == expected


@needs_kernels
def test_activations_of_one_of_two_groups_stay_in_float(tmp_path):
    config = copy.deepcopy(W8A8)
    config["config_groups"]["group_1"] = W8A16["config_groups"]["group_0"]
    assert not is_integer(checkpoint(tmp_path, "llama", config)[0])


@needs_kernels
def test_activations_stay_in_float_where_a_group_of_inputs_has_a_scale(tmp_path):
    config = packers.compressed_config("int-quantized", strategy="group", group_size=32)
    config["config_groups"]["group_0"]["input_activations"] = TOKENS
    coded, plain = checkpoint(tmp_path, "llama", config, lambda *of, **seed: packers.scaled(*of, block=(1, 32), **seed))
    assert not is_integer(coded)
    assert torch.equal(InProcessGroup(coded, 1).logits(IDS, 0), InProcessGroup(plain, 1).logits(IDS, 0))


@needs_kernels
def test_a_scale_of_the_tensor_is_that_of_each_row(tmp_path):
    config = json.loads(json.dumps(W8A8).replace('"channel"', '"tensor"'))
    coded, _ = checkpoint(tmp_path, "llama", config, lambda *of, **seed: packers.scaled(*of, shape=(1,), **seed))
    assert is_integer(coded)


@needs_kernels
def test_a_model_of_integers_takes_a_byte_for_each_weight(tmp_path):
    _, layers = layers_of(checkpoint(tmp_path, "llama")[0])
    for layer in layers:
        panels = -(-layer.packed.out_features // 32)
        assert layer.packed.nbytes == panels * 32 * (layer.in_features + 4)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_stream_resumed_beside_others_equals_the_unbroken_one(tmp_path, tp):
    coded, _ = checkpoint(tmp_path, "llama")
    words = {str(token): token for token in range(VOCABULARY)}
    Tokenizer(WordLevel(words, "0")).save(str(coded / "tokenizer.json"))
    params = SamplingParams(max_tokens=32, temperature=0.9, seed=3, ignore_eos=True)
    with Engine(coded, tp=tp, threads=1, kv_memory_bytes=2**20) as engine:
        assert engine.core.status().deterministic
        whole = engine.generate_ids([IDS], params)[0]
        others = [Request(f"r{k}", tuple(IDS), params, emitted_ids=tuple(whole[:k])) for k in range(1, 32)]
        for k, outputs in enumerate(engine.run(others), 1):
            assert [id_ for output in outputs for id_ in output.ids] == whole[k:]
