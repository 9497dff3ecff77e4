"""AWQ: folding scales changes nothing before weights are rounded; rounding with them costs less; what is written is
read back.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine import EngineConfig
from lockstep_engine.model_config import inspect_model
from lockstep_engine.quantized.tensors import Tensors
from lockstep_tools.quantization import awq, folds, rounding
from lockstep_tools.quantization.layers import InputProducts, LayeredModel
from lockstep_tools.quantization.production import Recipe, produce
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[2] / "libs/engine/tests"))
from checkpoints import VOCABULARY, make

WINDOWS = torch.randint(2, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(3))


def model_of(path):
    return LayeredModel(inspect_model(EngineConfig(model=str(path))))


def directory(path):
    path.mkdir()
    return path


def walk(model, visit):
    """Call `visit(number, compute)` for each layer, with its weights."""

    def visited(number, _layer, compute):
        visit(number, compute)
        return compute()

    with torch.inference_mode():
        model.states(WINDOWS, visited)


def states(output):
    return output[0] if isinstance(output, tuple) else output


PRODUCERS = {
    "llama": {"input_layernorm", "v_proj", "post_attention_layernorm", "up_proj"},
    "llama-grouped-untied": {"input_layernorm", "post_attention_layernorm", "up_proj"},  # fewer values than queries
    "qwen2": {"input_layernorm", "post_attention_layernorm", "up_proj"},
    "phi3": {"input_layernorm", "post_attention_layernorm", "gate_up_proj"},
    "cohere": {"input_layernorm", "up_proj"},  # one norm for attention and MLP
    "nemotron": {"input_layernorm+1", "post_attention_layernorm+1"},  # no product after up_proj
    "gemma": {"input_layernorm+1", "post_attention_layernorm+1", "up_proj"},
    "gemma2": {"input_layernorm+1", "pre_feedforward_layernorm+1", "up_proj"},
    "olmo2": {"up_proj"},  # norms after attention and MLP
    "mixtral": {"input_layernorm", "post_attention_layernorm", "gate_up_proj"},
    "qwen2_moe": {"input_layernorm", "post_attention_layernorm", "gate_up_proj", "up_proj"},
    "deepseek_v3": {"input_layernorm", "q_a_layernorm", "kv_a_layernorm", "post_attention_layernorm", "up_proj"},
    "gpt2": set(),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_scales_go_where_the_layer_stays_the_same(tmp_path, name):
    """Also after the vectors that take them were rounded to bfloat16, as they are stored."""
    model = model_of(make(name, tmp_path)[0])
    generator = torch.Generator().manual_seed(1)

    def visit(number, compute):
        found = folds.find(model, number, compute)
        names = {fold.producer.parameter.removesuffix(".weight").split(".")[-1] for fold in found if not fold.offset}
        names |= {f"{fold.producer.parameter.split('.')[-2]}+1" for fold in found if fold.offset}
        assert names == PRODUCERS[name] or number > 0
        expected = states(compute())
        for fold in found:
            before = [consumer.value.clone() for consumer in fold.consumers]
            wanted = torch.rand(len(fold.outputs), generator=generator) * 4 + 0.2
            scales = fold.storable(wanted, torch.bfloat16)
            fold.apply(scales)
            for vector in fold.vectors[:1]:
                vector.value.copy_(vector.value.bfloat16())
            for consumer, values in zip(fold.consumers, before, strict=True):
                torch.testing.assert_close(consumer.value, values * scales)
        changed = states(compute())
        torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().mean()))

    walk(model, visit)


def test_trying_folds_leaves_every_weight_as_it_was(tmp_path):
    model = model_of(make("gemma2", tmp_path)[0])

    def visit(number, compute):
        def weights():
            return [unit.value.clone() for unit in (*model.units(number), *model.plain(number).values())]

        before = weights()
        assert len(before) > 10
        assert folds.find(model, number, compute)
        assert all(torch.equal(*each) for each in zip(before, weights(), strict=True))

    walk(model, visit)


def test_values_that_a_model_clips_take_no_scales(tmp_path):
    """Fewer of them would be clipped."""
    path, _ = make("llama", tmp_path)
    model = model_of(path)
    model.model.config.clip_qkv = 1e9
    found = []
    walk(model, lambda number, compute: found.extend(folds.find(model, number, compute)))
    assert found
    assert not any(fold.producer.parameter.endswith("v_proj.weight") for fold in found)


def inputs_with_outliers(count, width):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, width, generator=generator)
    inputs[:, ::16] *= 20
    return inputs, torch.randn(32, width, generator=generator)


def error(inputs, weight, rounded, scales=1.0):
    return float((inputs @ (rounded.values() / scales - weight).t()).norm())


def test_scales_protect_inputs_with_large_activations():
    inputs, weight = inputs_with_outliers(400, 128)
    products = inputs.t() @ inputs
    matrix = awq.Matrix(weight, products, 32)
    scales = awq.find_scales([matrix], inputs.abs().sum(0), torch.float16)
    assert float(scales[::16].min()) > 2 * float(scales[1::16].max())
    plain = error(inputs, weight, rounding.to_int4(weight, 32, torch.float16))
    ours = awq.to_int4(weight * scales, products / (scales[:, None] * scales), 32, torch.float16)
    assert error(inputs, weight, ours, scales) < 0.7 * plain
    powers = awq.find_scales([matrix], inputs.abs().sum(0), torch.float16, powers_of_two=True)
    assert torch.equal(powers.log2(), powers.log2().round())
    assert len(set(powers.tolist())) > 1


def test_equal_activations_need_no_scales():
    inputs = torch.eye(64)
    scales = awq.find_scales([awq.Matrix(torch.randn(8, 64), inputs, 32)], torch.ones(64), torch.float16)
    assert torch.equal(scales, torch.ones(64))
    silent = awq.find_scales([awq.Matrix(torch.randn(8, 64), 0 * inputs, 32)], torch.zeros(64), torch.float16)
    assert torch.equal(silent, torch.ones(64))


def test_ranges_are_clipped_where_outputs_gain_by_it():
    inputs, weight = inputs_with_outliers(400, 128)
    products = inputs.t() @ inputs
    whole = rounding.to_int4_in_ranges(weight, 32, *rounding.int4_ranges(weight, 32), torch.float16)
    clipped = awq.to_int4(weight, products, 32, torch.float16)
    assert error(inputs, weight, clipped) < 0.95 * error(inputs, weight, whole)


def test_weights_of_one_sign_use_all_codes():
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 0.0
    for values, zero in ((weight, -8), (-weight, 7)):
        rounded = awq.to_int4(values, None, 32, torch.float16)
        assert set(rounded.zeros.flatten().tolist()) == {zero}
        assert len(set(rounded.codes.flatten().tolist())) == 16
        assert float((rounded.values() - values).abs().max()) < 0.1
    nothing = awq.to_int4(torch.zeros(8, 64), None, 32, torch.float16)
    assert not nothing.values().any()


def stored(path, dtype):
    """Store a checkpoint in 16 bits, with some channels that norms make large, as those of trained models are."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[::8] *= 8
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"dtype": str(dtype).removeprefix("torch.")}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_written_checkpoint_is_near_the_float_one(tmp_path, name, dtype):
    """Norms that took scales are stored in their type, with the matrices' scales that fit them."""
    path, _ = make(name, tmp_path)
    stored(path, dtype)
    model = model_of(path)
    made = produce(model, directory(tmp_path / "made"), Recipe("awq", 32), WINDOWS)
    assert made.scaled > len(made.styles) / 2
    before, after = load_file(path / "model.safetensors"), load_file(made.folder / "model.safetensors")
    assert {after[each].dtype for each in after if "norm" in each} == {dtype}
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(before[norm], after[norm])
    settings = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert group["format"] == "pack-quantized"
    assert (group["weights"]["symmetric"], group["weights"]["num_bits"]) == (False, 4)
    zeros = after["model.layers.0.self_attn.q_proj.weight_zero_point"]
    assert (zeros.dtype, list(zeros.shape)) == (torch.int32, [64 // 8, 2])
    with torch.inference_mode():
        plain = produce(model, directory(tmp_path / "rtn4"), Recipe("rtn4", 32)).folder
        exact, ours, nearest = (model_of(each).states(WINDOWS) for each in (path, made.folder, plain))
    assert (ours - exact).norm() < (nearest - exact).norm()


def test_a_scaled_layer_gives_what_it_gave_and_its_inputs_are_known(tmp_path):
    path, _ = make("qwen3_moe", tmp_path)
    stored(path, torch.float16)
    model = model_of(path)
    tensors = Tensors(path, ["model.safetensors"])

    def visited(number, layer, compute):
        with InputProducts(layer) as products:
            expected = states(compute())
        units = model.units(number)
        wanted = {unit.stored for unit in units}
        changed, count = awq.scale_layer(
            folds.find(model, number, compute), products, wanted, tensors, 32, torch.float16
        )
        assert count == len(units) - 1  # o_proj has no place for scales
        assert not {unit.stored for unit in changed} & wanted
        with InputProducts(layer) as scaled:
            found = states(compute())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().mean()))
        for unit in units:
            now = scaled.sums[unit.inputs]
            torch.testing.assert_close(products.sums[unit.inputs], now, rtol=1e-3, atol=1e-3 * float(now.abs().mean()))
        return found

    with torch.inference_mode():
        model.states(WINDOWS, visited)


def test_matrices_that_stay_in_float_are_scaled_without_rounding(tmp_path):
    path, _ = make("qwen3_moe", tmp_path)
    stored(path, torch.bfloat16)
    recipe = Recipe("awq", 32, skip=("*.q_proj", "*.layers.1.*"), head="int8")
    made = produce(model_of(path), directory(tmp_path / "made"), recipe, WINDOWS)
    before, after = load_file(path / "model.safetensors"), load_file(made.folder / "model.safetensors")
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight"):
        factors = after[name].float() / before[name].float()
        assert len(set(factors[0].tolist())) > 1
        assert torch.equal(factors, factors[:1].expand_as(factors))
        assert torch.equal(factors.log2(), factors.log2().round())
    assert "lm_head.weight_packed" in after
    other = [name for name in before if ".layers.1." in name]
    assert other
    assert all(torch.equal(before[name], after[name]) for name in other)


def test_an_architecture_without_a_place_for_scales_is_refused_by_name(tmp_path):
    path, _ = make("gpt2", tmp_path)
    with pytest.raises(LockstepError, match=r"scheme awq: .* of GPT2LMHeadModel .*; use gptq") as refused:
        produce(model_of(path), directory(tmp_path / "made"), Recipe("awq", 32), WINDOWS)
    assert refused.value.field == "scheme"
