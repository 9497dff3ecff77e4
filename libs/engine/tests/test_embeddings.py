"""Embeddings: equal to `transformers`, with the same bits whatever else a step computes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import AsyncEngine, Engine, Request, SamplingParams
from lockstep_engine.config import EngineConfig, HotWindow
from lockstep_engine.model_config import inspect_model
from lockstep_engine.plan import Result
from lockstep_engine.request import Phase
from scripted_ranks import Server, words


def expected(prompt, *, mean):
    """What scripted ranks give: states are (token + 1, 1)."""
    states = np.stack([np.array(prompt) + 1.0, np.ones(len(prompt))], axis=1)
    vector = states.sum(axis=0) if mean else states[-1]
    return (vector / np.sqrt((vector * vector).sum())).astype(np.float32).tolist()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 100, 512])
def test_an_embedding_is_one_output_after_the_whole_prompt(mean, depth, length):
    server = Server(max_batch_tokens=32, depth=depth, mean_pooling=mean)
    prompt = words(length, 1)
    number = server.embed(prompt)
    server.run()
    assert server.embedding(number) == expected(prompt, mean=mean)
    assert [count for _, count in server.computed(number)] == [32] * (length // 32) + [length % 32] * (length % 32 > 0)
    server.assert_idle()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_embeddings_beside_streams(mean, depth):
    server = Server(max_batch_tokens=16, depth=depth, mean_pooling=mean, blocks=200)
    prompts = [words(length, length) for length in (3, 40, 17, 90)]
    mixed = []
    for prompt in prompts:
        mixed.append((server.embed(prompt), server.submit(prompt, max_tokens=5)))
        server.step()
    server.run()
    for prompt, (embedding, stream) in zip(prompts, mixed, strict=True):
        assert server.embedding(embedding) == expected(prompt, mean=mean)
        assert server.ids(stream) == server.expected(stream)
    server.assert_idle()


def test_streams_get_a_token_in_every_step_while_a_long_text_is_embedded():
    server = Server(max_batch_tokens=32)
    stream = server.submit(words(5, 1), max_tokens=20)
    server.step()
    server.embed(words(200, 2))
    for _ in range(8):
        server.step()
    assert [count for _, count in server.computed(stream)] == [5] + [1] * 8


@pytest.mark.parametrize("mean", [False, True])
def test_a_cached_prefix_is_used_unless_all_states_are_needed(mean):
    server = Server(mean_pooling=mean, max_batch_tokens=64)
    prompt = words(60, 1)
    for _ in range(2):
        server.embed(prompt)
        server.run()
    assert server.computed(1) == [(0, 60) if mean else (48, 12)]
    assert server.embedding(0) == server.embedding(1) == expected(prompt, mean=mean)
    assert server.outputs[1][0].cached_tokens == (0 if mean else 48)
    stream = server.submit(prompt, max_tokens=1)
    server.run()
    assert server.computed(stream) == [(48, 12)], "streams find what embeddings have computed"


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_that_are_preempted_are_computed_again(mean, depth):
    server = Server(blocks=10, max_batch_tokens=4, depth=depth, mean_pooling=mean, prefix_cache=False)
    prompts = [words(120, seed) for seed in range(3)]
    streams = [server.submit(words(20, 9), max_tokens=100, priority=1)]
    numbers = [server.embed(prompt) for prompt in prompts]
    server.run()
    assert server.restarts() > 0, "the test needs a preemption"
    assert [server.embedding(number) for number in numbers] == [expected(prompt, mean=mean) for prompt in prompts]
    assert [server.ids(number) for number in streams] == [server.expected(number) for number in streams]
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("blocks", "cold_blocks", "share", "hot_window"),
    [(8, 0, 1.0, None), (16, 0, 0.5, None), (6, 2, 1.0, HotWindow(1, 4)), (12, 4, 0.5, HotWindow(1, 4))],
)
def test_a_text_may_take_all_that_there_is(blocks, cold_blocks, share, hot_window, depth):
    """It has no further token, for which there would be no room."""
    server = Server(
        blocks=blocks,
        cold_blocks=cold_blocks,
        tenant_share=share,
        hot_window=hot_window,
        context_length=128,
        depth=depth,
    )
    prompt = words(128, 1)
    number, stream = server.embed(prompt), server.submit(words(20, 2))
    server.run()
    assert server.embedding(number) == expected(prompt, mean=False)
    assert server.ids(stream) == server.expected(stream)
    assert server.restarts() == 0
    again = server.embed(prompt)
    server.run()
    assert server.embedding(again) == expected(prompt, mean=False)
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 7, 16, 33, 200])
@pytest.mark.parametrize("length", [95, 96, 97, 112, 127, 128, 129])
def test_texts_around_the_end_of_a_block_with_compression(length, budget, depth):
    server = Server(
        blocks=12, cold_blocks=8, hot_window=HotWindow(1, 4), max_batch_tokens=budget, depth=depth, context_length=160
    )
    prompt = words(length, 1)
    numbers = [server.embed(prompt), server.embed(words(length, 2))]
    stream = server.submit([*prompt, *words(10, 3)], max_tokens=5)
    server.run()
    assert [server.embedding(number) for number in numbers] == [
        expected(each, mean=False) for each in (prompt, words(length, 2))
    ]
    assert server.ids(stream) == server.expected(stream)
    server.assert_idle()


def test_a_text_that_can_never_fit_is_refused_and_the_field_is_named():
    server = Server(blocks=7)
    with pytest.raises(LockstepError, match="the prompt needs 8 blocks of KV cache, this engine has 7") as refused:
        server.embed(words(113, 1))
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert refused.value.field == "prompt_ids"


def test_each_part_of_a_text_is_reported():
    server = Server(max_batch_tokens=32)
    server.embed(words(70, 1))
    seen = []
    while server.step():
        seen += [change.phase for change in server.scheduler.sequences.take_phases()]
    assert seen == [Phase.RUNNING] * 2, "the last part ends the request"


def test_a_cancelled_text_gives_nothing():
    server = Server(max_batch_tokens=32, mean_pooling=True)
    number = server.embed(words(100, 1))
    server.step()
    assert server.cancel(number)
    server.run()
    assert server.outputs[number] == []
    server.assert_idle()


def test_states_that_are_no_numbers_are_an_error():
    server = Server()
    number = server.embed(words(5, 1))
    plan = server.scheduler.schedule()
    server.finish(Result(plan.step, [], [], 0, 0, [], embeddings=np.full((1, 2), np.nan, np.float32)))
    (output,) = server.outputs[number]
    assert output.error.code is ErrorCode.NUMERICAL_ERROR
    assert output.embedding is None
    server.assert_idle()


# With a model.

TOKENIZER = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
LENGTHS = (1, 2, 15, 16, 17, 40, 150, 512)


def texts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 331, (length,), generator=generator).tolist() for length in LENGTHS]


def reference_of(model, ids, pooling):
    with torch.inference_mode():
        states = model.base_model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = states.mean(dim=0) if pooling == "mean" else states[-1]
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize(
    ("architecture", "pooling", "tp"),
    [
        pytest.param("llama-grouped-untied", "mean", 1, marks=pytest.mark.slow),
        pytest.param("llama-grouped-untied", "last", 2, marks=pytest.mark.slow),
        pytest.param("gpt2", "mean", 2, marks=pytest.mark.slow),
    ],
)
def test_embeddings_equal_transformers_and_do_not_depend_on_the_batch(tmp_path: Path, architecture, pooling, tp):
    path, reference = make(architecture, tmp_path)
    (path / "tokenizer.json").write_text(TOKENIZER)
    settings = {"tp": tp, "threads": 1, "max_seqs": 8, "kv_compression": "none", "embeddings": pooling}
    prompts = texts()
    with Engine(path, max_batch_tokens=64, **settings) as engine:
        together = engine.embed(prompts)
        alone = [engine.embed([prompt])[0] for prompt in prompts]
        sampling = SamplingParams(max_tokens=12, temperature=0)
        streams = [Request(f"s{number}", tuple(prompt[:20]), sampling) for number, prompt in enumerate(prompts)]
        embeds = [Request(f"e{number}", tuple(prompt), sampling, embeds=True) for number, prompt in enumerate(prompts)]
        mixed = engine.run([each for pair in zip(streams, embeds, strict=True) for each in pair])
        undisturbed = engine.run(
            [Request(f"u{number}", each.prompt_ids, sampling) for number, each in enumerate(streams)]
        )
    for prompt, vector in zip(prompts, together, strict=True):
        assert vector.dtype == np.float32
        assert np.abs(vector - reference_of(reference, prompt, pooling)).max() < 1e-5, len(prompt)
    assert [vector.tobytes() for vector in alone] == [vector.tobytes() for vector in together]
    beside = [outputs[0].embedding.tobytes() for outputs in mixed[1::2]]
    assert beside == [vector.tobytes() for vector in together]
    ids = [[id_ for output in outputs for id_ in output.ids] for outputs in mixed[::2]]
    assert ids == [[id_ for output in outputs for id_ in output.ids] for outputs in undisturbed]


def test_what_cannot_be_embedded_is_refused(tmp_path: Path):
    path, _ = make("llama-grouped-untied", tmp_path)

    def refusal(length, *, embeddings="last", **fields):
        config = EngineConfig(model=str(path), embeddings=embeddings, max_context=64)
        engine = AsyncEngine(config, on_outputs=lambda _step, _outputs: None, on_change=lambda: None)
        with pytest.raises(LockstepError) as refused:
            engine.submit(Request("x", tuple(range(2, 2 + length)), SamplingParams(), embeds=True, **fields))
        return refused.value

    assert refusal(64).code is ErrorCode.UNAVAILABLE, "a text may fill the context: only the ranks are missing"
    assert refusal(65).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert refusal(65).message == "the prompt has 65 tokens, more than the context of 64"
    assert refusal(5, emitted_ids=(7,)).field == "emitted_ids"
    assert refusal(5, embeddings="none").field == "embed"


# What a checkpoint says.


@pytest.fixture
def checkpoint(tmp_path):
    path, _ = make("llama-grouped-untied", tmp_path)
    return path


def declare(path, pooling, modules=("Transformer", "Pooling", "Normalize"), **config):
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    listed = [{"idx": index, "type": f"sentence_transformers.models.{name}"} for index, name in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(listed))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | config))


def embedding_of(path, **settings):
    return inspect_model(EngineConfig(model=str(path), **settings)).embedding


def test_a_model_without_the_files_gives_embeddings_only_if_told(checkpoint):
    assert embedding_of(checkpoint) is None
    assert embedding_of(checkpoint, embeddings="none") is None
    assert embedding_of(checkpoint, embeddings="mean").pooling == "mean"
    assert embedding_of(checkpoint, embeddings="last").size == 64


@pytest.mark.parametrize(
    ("declared", "pooling"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers(checkpoint, declared, pooling):
    declare(checkpoint, declared)
    assert embedding_of(checkpoint).pooling == pooling
    assert embedding_of(checkpoint, embeddings="none") is None


@pytest.mark.parametrize(
    ("declared", "modules", "named"),
    [
        ({"pooling_mode_cls_token": True}, (), "pooling_mode_cls_token"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, (), "mean and pooling_mode_max_tokens"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({}, (), "no pooling"),
        ([], (), "not a JSON object"),
        ({"pooling_mode_lasttoken": True}, ("Transformer", "Pooling", "Dense"), "Dense"),
    ],
)
def test_poolings_that_there_are_not_are_named(checkpoint, declared, modules, named):
    declare(checkpoint, declared, modules)
    with pytest.raises(LockstepError, match=named) as refused:
        embedding_of(checkpoint)
    assert refused.value.field == "model"
    assert embedding_of(checkpoint, embeddings="none") is None


def test_broken_files_are_refused(checkpoint):
    declare(checkpoint, {})
    (checkpoint / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(LockstepError, match=r"config\.json cannot be read as JSON"):
        embedding_of(checkpoint)


@pytest.mark.parametrize(
    ("config", "dimensions", "is_any"),
    [
        ({}, (), False),
        ({"matryoshka_dimensions": [32, 16, 64, 128, 0, "x", 16]}, (16, 32), False),
        ({"is_matryoshka": True}, (), True),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8]}, (8,), False),
        ({"is_matryoshka": "yes", "matryoshka_dimensions": "all"}, (), False),
    ],
)
def test_smaller_sizes_are_those_that_the_configuration_names(checkpoint, config, dimensions, is_any):
    declare(checkpoint, {"pooling_mode": "mean"}, **config)
    info = embedding_of(checkpoint)
    assert (info.dimensions, info.any_dimension) == (dimensions, is_any)


def test_models_with_other_poolings_do_not_continue_each_others_streams(checkpoint):
    digests = {
        wanted: inspect_model(EngineConfig(model=str(checkpoint), embeddings=wanted)).digest
        for wanted in ("auto", "none", "mean", "last")
    }
    assert digests["auto"] == digests["none"]
    assert len(set(digests.values())) == 3
