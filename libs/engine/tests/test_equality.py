"""Long contexts: over several partitions and blocks of keys, in the plain shape, which runs fused, and in a mixture."""

import functools
import json

import pytest
import torch
from checkpoints import VOCABULARY, make
from in_process import InProcessGroup
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.config import HotWindow
from lockstep_engine.kernel_check import compare
from transformers import AutoModelForCausalLM

PROMPT = [5, 9, 12, 250, 77, 3, 8, 100, 42, 7, 19, 23, 64, 128, 200, 31, 6, 2, 90]
NEW = 128
NAMES = ("llama", "llama-grouped-untied", "llama-odd-heads", "mistral", "qwen3", "mixtral")


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_logits_and_greedy_tokens_equal_transformers(checkpoint, tp):
    path, reference = checkpoint
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (1, 300))
    with torch.inference_mode():
        expected = reference(ids).logits[0]
        generated = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )[0, len(PROMPT) :].tolist()
    group = InProcessGroup(path, tp)

    first = group.logits(ids[0, :200].tolist(), 0)
    second = group.logits(ids[0, 200:290].tolist(), 200)
    rest = [group.logits([int(ids[0, position])], position) for position in range(290, 300)]
    ours = torch.cat([first, second, *rest])

    assert (ours - expected).abs().max() <= 1e-4
    # generate() never emits end-of-text before min_new_tokens; random weights rarely prefer it, but they may.
    assert _without_eos(group, PROMPT, NEW if tp <= 2 else 16) == generated[: NEW if tp <= 2 else 16]


def _without_eos(group: InProcessGroup, prompt: list[int], count: int) -> list[int]:
    out: list[int] = []
    logits = group.logits(prompt, 0)
    for position in range(len(prompt), len(prompt) + count):
        last = logits[-1].clone()
        last[1] = float("-inf")
        out.append(int(last.argmax()))
        logits = group.logits(out[-1:], position)
    return out


def test_the_plain_shape_runs_fused_and_others_do_not(tmp_path):
    assert InProcessGroup(make("llama", tmp_path)[0], 1).fused == 3
    assert InProcessGroup(make("mixtral", tmp_path)[0], 1).fused == 0


def test_a_window_that_the_models_own_code_does_not_have_is_none(tmp_path):
    """Llama's configuration keeps the field, and its attention does not read it."""
    path, _ = make("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    ids = torch.arange(2, 50)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids[None]).logits[0]
    group = InProcessGroup(path, 1)
    assert group.models[0].module.config.sliding_window == 8
    assert (group.logits(ids.tolist(), 0) - expected).abs().max() <= 1e-4


TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.get)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "falcon-alibi"])
@pytest.mark.usefixtures("without_kernels")
def test_what_a_gpus_start_compares_its_kernels_with_computes_in_16_bits(name, dtype, tmp_path):
    """The model's own code over torch's own products, with nothing intercepted, as on a GPU: windows, soft caps, sinks
    and biases, over hot and cold blocks.
    """
    path, _ = make(name, tmp_path)
    group = InProcessGroup(path, 1, dtype=dtype, hot_window=HotWindow(sink=1, size=1))
    (model,), (cache,) = group.models, group.caches

    @torch.inference_mode()
    def by_torch(ids, layout, rows):
        attention = TorchAttention(cache, layout, deterministic=False)
        model.step.begin(attention)
        positions = attention.positions.unsqueeze(0)
        return model.module(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0, rows]

    found = compare(functools.partial(group.forward, 0), by_torch, cache, model.vocab_size, 100)
    assert [each.what for each in found][:2] == ["compressed keys and values", "the logits of a chunk"]
    assert all(each.is_small for each in found)
