"""A checkpoint's tensors fit its configuration, or are refused by name: none is cut to size. Where the configuration
says that the head is the embedding, what the checkpoint has of them decides.
"""

import json

import pytest
import torch
from checkpoints import make
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine import weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


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


IDS = [(7 * index) % 331 for index in range(30)]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tables_of(group):
    """The embedding and the head of each rank."""
    modules = [rank.module for rank in group.models]
    return [(each.get_input_embeddings(), each.get_output_embeddings()) for each in modules]


def same_twice(tensors):
    return tensors | {HEAD: tensors[TABLE].clone()}


def other_last_row(tensors):
    """The head's last row is a multiple of the embedding's; the others are the same."""
    head = tensors[TABLE].clone()
    head[-1] *= 4
    return tensors | {HEAD: head}


def without(name):
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("compared", [100, 2**24])
@pytest.mark.parametrize(
    ("change", "shared"),
    [
        (dict, (False, False)),
        (other_last_row, (True, False)),
        (same_twice, (True, True)),
        (without(HEAD), (True, True)),
        (without(TABLE), (True, True)),
    ],
    ids=["two", "two that differ in a row", "one twice", "no head", "no embedding"],
)
def test_a_head_that_is_said_to_be_the_embedding(tmp_path, monkeypatch, tp, compared, change, shared):
    """A rank whose rows are the same in both has them once. The last rank has the last row."""
    monkeypatch.setattr(weights, "COMPARED_ELEMENTS", compared)
    path = configured(rewritten(make("llama", tmp_path)[0], change), tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    group = InProcessGroup(path, tp)
    assert [embedding.weight is head.weight for embedding, head in tables_of(group)] == list(shared[2 - tp :])
    assert (group.logits(IDS, 0) - expected).abs().max() <= 1e-4


def test_a_checkpoint_with_neither_embedding_nor_head_is_refused(tmp_path):
    path = rewritten(make("llama", tmp_path)[0], lambda tensors: without(HEAD)(without(TABLE)(tensors)))
    with pytest.raises(LockstepError, match=f"the checkpoint has no tensor {TABLE}"):
        InProcessGroup(configured(path, tie_word_embeddings=True), 1)


def test_a_head_of_another_vocabulary_is_refused(tmp_path):
    path = rewritten(make("llama", tmp_path)[0], lambda tensors: tensors | {HEAD: tensors[HEAD][:300].clone()})
    with pytest.raises(LockstepError, match=rf"{HEAD} has shape \[300, 64\], config.json implies \[331, 64\]"):
        InProcessGroup(configured(path, tie_word_embeddings=True), 1)


def test_the_bias_of_a_head_that_is_the_embedding_is_the_heads_own(tmp_path):
    path = configured(rewritten(make("phi", tmp_path)[0], without(HEAD)), tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    assert (InProcessGroup(path, 2).logits(IDS, 0) - expected).abs().max() <= 1e-4
