"""A request for which the model computes NaN or infinity ends with an error; requests beside it do not notice."""

import math

import pytest
import torch
from checkpoints import make
from in_process_engine import InProcessEngine, InProcessModel
from lockstep_common.errors import ErrorCode
from lockstep_engine import SamplingParams
from lockstep_engine.config import EngineConfig

POISON = 11
"""A prompt with this token makes the model compute NaN."""
NEAR, FAR = 1, 3
"""Prompts with it: just before the end, and before more blocks than NaN comes through in hot ones. A layer brings it
one block on, and there are three: the last token has it from cold blocks alone.
"""
PROMPTS = [
    [(5 * each + 3) % 200 + 20 for each in range(40)],
    [*range(30, 60), POISON, 70, 71],
    [9, 100, 250],
    [*range(30, 50), POISON, *range(60, 150)],
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make("llama-grouped-untied", tmp_path_factory.mktemp("model"))[0]


def requests(*numbers, **settings):
    params = SamplingParams(max_tokens=20, ignore_eos=True, **settings)
    return [(PROMPTS[number], (), params) for number in numbers]


def poison(loaded):
    embedding = loaded.model.module.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[POISON] = math.nan


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize("poisoned", [NEAR, FAR])
def test_only_the_poisoned_request_fails(path, poisoned, settings, window, depth, monkeypatch):
    hot_window = None if window is None else EngineConfig(model="", kv_hot_window=window).hot_window
    loaded = InProcessModel(path)
    first, third = InProcessEngine(loaded, depth=depth, hot_window=hot_window).run(*requests(0, 2, **settings))
    poison(loaded)
    engine = InProcessEngine(loaded, depth=depth, hot_window=hot_window)
    errors, update = [], engine.scheduler.update

    def note(result):
        outputs = update(result)
        errors.extend(each.error for each in outputs if each.error is not None)
        return outputs

    monkeypatch.setattr(engine.scheduler, "update", note)
    assert engine.run(*requests(0, poisoned, 2, **settings)) == [first, [], third]
    (error,) = errors
    assert error.code is ErrorCode.NUMERICAL_ERROR
    assert not error.meaning.retryable
    assert "NaN" in error.message
    # Nobody begins with what it has computed.
    assert engine.run(*requests(poisoned, **settings)) == [[]]
    blocks = engine.scheduler.blocks
    cached = {key.tokens for pool in (blocks.hot, blocks.cold) for key in pool._keys if key is not None}
    assert cached
    text = torch.tensor(PROMPTS[poisoned], dtype=torch.int32).split(16)
    assert not any(block.numpy().tobytes() in cached for block in text)
    assert engine.run(*requests(0, **settings)) == [first]
