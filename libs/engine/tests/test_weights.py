"""A checkpoint's tensors fit its configuration, or are refused by name: none is cut to size."""

import json

import pytest
import torch
from checkpoints import make
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from safetensors.torch import load_file, save_file


def configured(path, **changes):
    """A checkpoint whose configuration says something else."""
    settings = json.loads((path / "config.json").read_text())
    assert settings.keys() >= changes.keys()
    (path / "config.json").write_text(json.dumps(settings | changes))
    return path


def rewritten(path, change):
    """A checkpoint with the tensors that `change` makes of its own."""
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def stacked(tensors):
    """Mixtral's experts in one tensor for all, as the model has them."""
    experts = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in experts}):
        up = [
            torch.cat([experts[f"{prefix}.experts.{each}.{part}.weight"] for part in ("w1", "w3")]) for each in range(4)
        ]
        down = [experts[f"{prefix}.experts.{each}.w2.weight"] for each in range(4)]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(up)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return tensors


def routed(tensors):
    """With routers that know two of the experts."""
    return {name: each[:2].clone() if name.endswith(".gate.weight") else each for name, each in tensors.items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", [dict, stacked], ids=["one by one", "stacked"])
def test_experts_of_another_width_are_refused(tmp_path, tp, form):
    path = rewritten(make("mixtral", tmp_path)[0], form)
    InProcessGroup(path, tp)
    with pytest.raises(LockstepError, match=r"tensor model.layers.0.\S+.experts.\S+ has shape .* implies .*(96|48)"):
        InProcessGroup(configured(path, intermediate_size=48), tp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("form", "words"),
    [
        (dict, r"a tensor model.layers.0.block_sparse_moe.experts.2.w1.weight, config.json implies 2 experts"),
        (stacked, r"tensor model.layers.0.\S+.gate_up_proj has shape \[4, 192, 64\], .* implies \[2, 192, 64\]"),
    ],
    ids=["one by one", "stacked"],
)
def test_more_experts_than_the_configuration_names_are_refused(tmp_path, tp, form, words):
    path = rewritten(make("mixtral", tmp_path)[0], lambda tensors: routed(form(tensors)))
    with pytest.raises(LockstepError, match=words):
        InProcessGroup(configured(path, num_local_experts=2), tp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_an_expert_that_is_wider_than_the_others_is_refused(tmp_path, tp, part):
    name = f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"

    def widened(tensors):
        both = (tensors[name], tensors[name])
        return tensors | {name: torch.cat(both, 1 if part == "w2" else 0)}

    path = rewritten(make("mixtral", tmp_path)[0], widened)
    shapes = r"\[64, 192\], config.json implies \[64, 96\]" if part == "w2" else r"\[192, 64\], .* \[96, 64\]"
    with pytest.raises(LockstepError, match=f"tensor {name} has shape {shapes}"):
        InProcessGroup(path, tp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.0.self_attn.o_proj.weight"),
        ("llama", "model.layers.2.mlp.down_proj.weight"),
        ("llama", "lm_head.weight"),
        ("phi", "lm_head.bias"),
        ("phi", "model.layers.1.self_attn.dense.bias"),
        ("phi", "model.layers.1.mlp.fc1.bias"),
        ("gpt2", "transformer.h.0.mlp.c_proj.weight"),
    ],
)
def test_a_tensor_that_is_longer_along_the_split_is_refused(tmp_path, tp, model, name):
    def lengthened(tensors):
        dim = tensors[name].dim() - 1 if "proj" in name and model == "llama" else 0
        return tensors | {name: torch.cat((tensors[name], tensors[name]), dim)}

    path = rewritten(make(model, tmp_path)[0], lengthened)
    with pytest.raises(LockstepError, match=rf"tensor {name} has shape \[.*\], config.json implies"):
        InProcessGroup(path, tp)
