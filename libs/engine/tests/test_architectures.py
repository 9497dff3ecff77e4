"""Every architecture gives what the unmodified `transformers` model gives, on one rank and on several.

docs/architectures.md is made from what is tested here: `python libs/engine/tests/architecture_table.py` writes it.
"""

import inspect
import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from architecture_table import PAGE, page
from checkpoints import CASES, VOCABULARY, make
from handmade import safetensors_bytes
from in_process import InProcessGroup
from lockstep_common.errors import LockstepError
from lockstep_engine import Engine, SamplingParams
from lockstep_engine.architectures import ARCHITECTURES
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.config import EngineConfig, SlidingWindow
from lockstep_engine.distributed import Alone
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.plan import RowSampling
from lockstep_engine.sampling import Sampler
from lockstep_engine.weights import load_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PROMPT, NEW = 24, 32
SAMPLING = RowSampling(
    sampling_row=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias={},
    logprobs=-1,
    prompt_ids=[],
    emitted_ids=[],
    forbidden_ids=[],
    min_tokens=0,
)
MARGIN = 5e-4
"""Between the best two logits of a greedy token: otherwise which is the best is a matter of rounding."""

COMMON = {
    *("llama-grouped-untied", "llama-odd-heads", "mistral", "mixtral", "qwen2", "qwen3_moe"),
    *("gemma2", "phi3", "gpt_oss", "falcon-alibi", "deepseek_v3", "cohere2"),
}
"""Used most, and with every mechanism between them; `make test-slow` runs the others."""

KEPT = {"deepseek_v3", "dots1", "exaone_moe", "ernie4_5_moe", "gpt_oss", "llama"}
"""Those of which `transformers` leaves tensors in float32 in a dtype of 16 bits, and one of which it leaves none."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COMMON else pytest.mark.slow) for name, case in CASES.items() if case.tps],
)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path, name):
    case = CASES[name]
    path, reference = make(name, tmp_path)
    ids = torch.randint(2, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits[0]
    tokens, margin = greedy(reference, ids[:, :PROMPT])
    assert margin > MARGIN, "this checkpoint has a draw: give it another seed"
    listed = ids[0].tolist()
    for tp in case.tps:
        group = InProcessGroup(path, tp)
        parts = [group.logits(listed[:40], 0), group.logits(listed[40:60], 40)]
        parts += [group.logits([listed[position]], position) for position in range(60, 70)]
        ours = torch.cat(parts)
        assert (ours - expected).abs().max() <= 1e-4
        assert torch.equal(group.logits(listed, 0), ours) == case.exact  # the same bits in any chunk and alone
        if tp <= 2:
            assert greedy_in_group(group, listed[:PROMPT]) == tokens


def greedy(reference, prompt):
    with torch.inference_mode():
        out = reference.generate(
            prompt,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, prompt.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).min()


def greedy_in_group(group, prompt):
    out = []
    logits = group.logits(prompt, 0)
    for position in range(PROMPT, PROMPT + NEW):
        out.append(int(logits[-1].argmax()))
        logits = group.logits(out[-1:], position)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "dots1", "exaone_moe"])
def test_models_of_16_bits_choose_experts_by_a_bias_of_float32(tmp_path, name, dtype):
    """The routers' scores are alike, and their biases differ by less than 16 bits hold."""
    path, reference = make(name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(reference).values():
            bias = router.e_score_correction_bias
            router.weight.zero_()
            bias.copy_(1 + torch.randperm(len(bias), generator=generator) * 2**-18)
            assert len(bias.to(dtype).unique()) == 1
    reference.save_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    group = InProcessGroup(path, 1, dtype=dtype)
    ours, theirs = choices(group.models[0].module), choices(reference)
    ids = torch.randint(2, VOCABULARY, (1, 20), generator=generator)
    with torch.inference_mode():
        reference(ids)
    group.logits(ids[0].tolist(), 0)
    assert len(ours) > 0
    assert ours == theirs
    assert all(each.e_score_correction_bias.dtype is torch.float32 for each in routers(group.models[0].module).values())


def routers(model):
    """The modules that choose experts, by name."""
    return {name: each for name, each in model.named_modules() if hasattr(each, "e_score_correction_bias")}


def choices(model):
    """What the routers will choose: for each its tokens' sets of experts."""
    chosen = {}
    for name, router in routers(model).items():
        router.register_forward_hook(
            lambda _module, _given, out, name=name: chosen.update({name: [sorted(each) for each in out[2].tolist()]})
        )
    return chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in KEPT else pytest.mark.slow) for name in CASES if "-" not in name],
)
def test_tensors_have_the_dtypes_that_transformers_loads_them_in(tmp_path, name, dtype):
    path, _ = make(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    group = InProcessGroup(path, 1, dtype=dtype)
    assert kept_in_float32(group.models[0].module) == kept_in_float32(theirs)
    assert group.logits(list(range(2, 20)), 0).isfinite().all()


def kept_in_float32(model):
    return {name for name, stored in model.state_dict().items() if stored.dtype is torch.float32}


@pytest.mark.parametrize("name", ["phi3-two-ropes", "phimoe-two-ropes", "llama-dynamic-rope"])
def test_frequencies_for_long_contexts_do_not_depend_on_the_batch(name, tmp_path):
    """`transformers` takes one set up to 64 positions, others beyond; the engine goes by what it serves."""
    path, reference = make(name, tmp_path)
    ids = torch.randint(2, VOCABULARY, (1, 80), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = {count: reference(ids[:, :count]).logits[0] for count in (60, 80)}
    assert (expected[80][:60] - expected[60]).abs().max() > 0.01
    for max_context, count in ((64, 60), (80, 80)):
        group = InProcessGroup(path, 1, max_context)
        first = group.logits(ids[0, :20].tolist(), 0)
        ours = torch.cat([first, group.logits(ids[0, 20:count].tolist(), 20)])
        assert (ours - expected[count]).abs().max() <= 1e-4
        assert torch.equal(group.logits(ids[0, :count].tolist(), 0), ours)


def test_seeded_choices_are_the_same_on_any_number_of_ranks(tmp_path):
    """The vocabulary of 331 is spread over ranks; draws that fall on the edge between two tokens are left out."""
    path, _ = make("llama-eight-heads", tmp_path)
    ids = torch.randint(2, VOCABULARY, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = {tp: InProcessGroup(path, tp).logits(ids, 0) for tp in (1, 2, 4, 8)}
    draws = np.random.default_rng(1).random(64)
    edges = torch.softmax(logits[1].double(), -1).cumsum(-1).numpy()
    clear = np.abs(edges - draws[:, None]).min(axis=1) > 1e-5
    assert clear.sum() > 50
    chosen = {tp: sample(rows[clear], SAMPLING, draws[clear]) for tp, rows in logits.items()}
    assert len(set(chosen[1])) > 30
    assert chosen[1] == chosen[2] == chosen[4] == chosen[8]


def sample(logits, sampling, draws):
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    sampler.add(sampling)
    none = np.zeros(len(draws), np.int32)
    return sampler.sample(logits, none, none, draws).read()[0]


def test_every_architecture_has_a_case():
    assert {case.model_type for case in CASES.values()} == set(ARCHITECTURES)


def test_every_architecture_that_can_have_a_sliding_window_has_a_case_with_one():
    """`transformers` computes a window by a mask. Not every model gives it to the attention function as well."""
    masked = {model_type for model_type in ARCHITECTURES if "create_sliding_window_causal_mask" in source(model_type)}
    assert len(masked) > 20
    assert masked == {case.model_type for case in CASES.values() if case.tps and has_window(case)} & masked


PARTLY_WINDOWED = {
    *("cohere2", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss", "mellum", "olmo3", "vaultgemma"),
    *("qwen2-window", "qwen3-window"),
}
"""Cases with a window in some layers, which keep it alone: as for `WINDOWED`."""
WINDOWED = {"mistral", "mixtral-window", "phi3-window", "phimoe-window", "qwen3_moe-window", "starcoder2"}
"""Cases with a window in every layer: the tests of logits show that no layer sees more, which a rank refuses."""


def test_the_window_of_every_layer_is_known_without_the_models_code(tmp_path):
    windows, layers = {}, {}
    for name, case in CASES.items():
        info = inspect_model(described(tmp_path / name, case.model_type, **case.settings))
        windows[name] = info.window
        layers[name] = info.windowed
    assert {name for name, window in windows.items() if window is not None} == WINDOWED
    assert {windows[name] for name in WINDOWED} == {SlidingWindow(37)}
    assert {name for name, given in layers.items() if given is not None} == PARTLY_WINDOWED
    assert {layers[name].window for name in PARTLY_WINDOWED} == {SlidingWindow(37)}


TURNS = {each: known for each, known in ARCHITECTURES.items() if known.turns}


@pytest.mark.parametrize("model_type", TURNS)
def test_which_layers_have_a_window_is_known_from_older_configurations_too(model_type, tmp_path):
    """These do not list the layers."""
    shape = {"num_hidden_layers": 13, "sliding_window": 16, "max_position_embeddings": 512}
    if model_type == "exaone_moe":
        shape["first_k_dense_replace"] = 1
    config = described(tmp_path, model_type, **shape)
    settings = json.loads((tmp_path / "config.json").read_text())
    kinds = settings.pop("layer_types")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    windowed = inspect_model(config).windowed
    assert windowed.numbers == tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    assert 0 < len(windowed.numbers) < 13


def described(path, model_type, **settings):
    """The engine's settings for a checkpoint of which there is the configuration alone."""
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    AutoConfig.for_model(model_type, **settings, architectures=names).save_pretrained(path)
    (path / "model.safetensors").write_bytes(safetensors_bytes())
    return EngineConfig(model=str(path), kv_compression="none")


@pytest.mark.parametrize("name", ["mistral", "phi3-window", "phimoe-window", "gemma2", "qwen2-window"])
def test_a_layer_that_sees_more_than_is_kept_is_refused(name, tmp_path):
    path, _ = make(name, tmp_path)
    info = inspect_model(EngineConfig(model=str(path)))
    is_part = info.windowed is not None
    ids, layout = (
        torch.arange(2, 40),
        StepLayout(np.zeros(1, np.int32), np.array([38], np.int32), np.array([[0, 1, 2]])),
    )
    for tokens, is_refused in ((37, False), (36, True)):
        with pytest.raises(LockstepError, match="sees 37") if is_refused else nullcontext(), torch.inference_mode():
            window = SlidingWindow(tokens)
            changes = {"windowed": replace(info.windowed, window=window)} if is_part else {"window": window}
            model = build_model(replace(info, **changes), Alone(), torch.float32)
            load_weights(model.module, info, torch.device("cpu"))
            geometry = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
            cache = KvCache(**geometry, blocks=3, dtype=torch.float32, device=torch.device("cpu"))
            model.logits(ids, step_attention(cache, layout, deterministic=True), torch.tensor([37]))


def source(model_type):
    """The file of the model, in `transformers`."""
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return inspect.getsource(sys.modules[model.__module__])


def has_window(case):
    config = AutoConfig.for_model(case.model_type, **case.settings)
    in_layers = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return getattr(config, "sliding_window", None) == 37 and in_layers


def test_the_table_in_the_documentation_is_what_is_tested():
    assert PAGE.read_text() == page(), "run: .venv/bin/python libs/engine/tests/architecture_table.py"


@pytest.mark.parametrize(
    ("name", "tp", "changes", "words"),
    [
        ("llama", 3, {}, "4 attention heads cannot be split over tp = 3"),
        ("bloom-six-heads", 4, {}, "6 attention heads cannot be split over tp = 4"),
        ("llama-six-heads", 2, {}, "3 key/value heads can be neither split nor repeated over tp = 2"),
        ("llama-eight-heads", 8, {"intermediate_size": 100}, "intermediate_size 100 cannot be split over tp = 8"),
        ("gpt2", 4, {"n_inner": 90}, "intermediate_size 90 cannot be split over tp = 4"),
        ("granitemoeshared", 4, {"shared_intermediate_size": 30}, "the 30 features of .*input_linear cannot be split"),
        ("gpt2", 1, {"model_type": "minimax"}, "keep a recurrent state"),
        (
            "gpt2",
            1,
            {"model_type": "never-seen"},
            "never-seen.* is not among the supported architectures: arcee, bloom",
        ),
        ("gpt2", 1, {"quantization_config": {"quant_method": "mxfp4"}}, "quantized .mxfp4."),
        ("cohere2", 1, {"layer_types": ["chunked_attention", "full_attention"]}, "layers of chunked_attention"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path, name, tp, changes, words):
    path = make(name, tmp_path)[0]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(LockstepError, match=words):
        InProcessGroup(path, tp)


def test_a_checkpoint_saved_without_its_head_is_found_by_its_bare_names(tmp_path):
    """As BLOOM and GPT-2 are published."""
    path, reference = make("gpt2", tmp_path)
    architectures = json.loads((path / "config.json").read_text())["architectures"]
    reference.base_model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
    ids = torch.arange(2, 30)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert (InProcessGroup(path, 1).logits(ids.tolist(), 0) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["falcon-alibi", "deepseek_v3"])
@pytest.mark.slow
def test_rank_processes_serve_them_too(tmp_path, name):
    path, reference = make(name, tmp_path)
    Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0")).save(str(path / "tokenizer.json"))
    prompt = list(range(40, 40 + PROMPT))
    tokens, margin = greedy(reference, torch.tensor([prompt]))
    assert margin > MARGIN
    with Engine(path, tp=2, threads=1, kv_memory_bytes=2**20) as engine:
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        assert engine.generate_ids([prompt, prompt[:9], prompt], params)[::2] == [tokens, tokens]
        assert engine.core.status().deterministic
