"""What a step launches on a GPU is what the committed table says: a change that adds a launch to each layer shows here,
without a GPU. `launch_count.py` writes the table anew.
"""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
from launch_count import (
    CODES,
    MODELS,
    SAMPLERS,
    TABLE,
    TPS,
    costs,
    entry,
    markdown,
    nothing_fetched,
    rows,
    sampled_step,
    sampler_entry,
)
from lockstep_engine.attention import StepLayout
from lockstep_engine.graphs import GraphedStep

COMMITTED = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = {row: case for row, *case in rows()}


@pytest.mark.parametrize("row", ROWS)
def test_a_step_launches_what_the_table_says(row):
    name, tp, exact, codes = ROWS[row]
    assert entry(name, tp, exact=exact, codes=codes) == COMMITTED[row]


@pytest.mark.parametrize("row", ROWS)
def test_decoding_never_waits_for_the_host(row):
    assert all(isinstance(cost, dict) for step, cost in COMMITTED[row].items() if step.startswith("decode"))


def test_the_table_has_these_rows_and_is_the_one_people_read():
    assert list(COMMITTED) == [*ROWS, *(f"Sampler: {kind}" for kind in SAMPLERS)]
    assert len(ROWS) == 2 * len(MODELS) * len(TPS) + len(CODES)
    assert TABLE.with_suffix(".md").read_text(encoding="utf-8") == markdown(COMMITTED)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_sampling_launches_what_the_table_says_for_any_number_of_rows(kind):
    counted = sampler_entry(kind)
    assert counted == COMMITTED[f"Sampler: {kind}"]
    assert len({(step["torch_operations"], step["triton_launches"]) for step in counted.values()}) == 1


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_hosts_work_for_sampling_does_not_grow_with_the_rows(kind):
    """Its time on another machine is unknown, but it goes into calls of functions, Python's and C's."""
    with nothing_fetched():
        one, many = (host_calls(sampled_step(kind, count)) for count in (1, 64))
    assert one <= many <= 1.1 * one


def test_the_hosts_work_for_a_recorded_step_does_not_grow_with_the_rows():
    graphs = GraphedStep(lambda inputs: inputs.ids + 1, 64, 4, torch.device("cpu"), sizes=(1, 64))
    graphs.capture()

    def step(count):
        layout = StepLayout(np.zeros(count, np.int32), np.ones(count, np.int32), np.zeros((count, 4), np.int32))
        return partial(graphs.run, torch.zeros(count, dtype=torch.int64), layout)

    one, many = (host_calls(step(count)) for count in (1, 64))
    assert many <= 1.1 * one


def host_calls(step):
    """Calls of functions in a step like the one before it."""
    step()
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", ["Llama-3-8B", "Mixtral-8x7B", "DeepSeek-V3"])
def test_each_layer_adds_the_same(name):
    two, three, four = (costs(name, 8, layers=layers) for layers in (2, 3, 4))
    for step in (f"decode {count}" for count in (1, 8, 64)):
        numbers = [each[step].numbers() for each in (two, three, four)]
        assert {field: numbers[2][field] - numbers[1][field] for field in numbers[0]} == {
            field: numbers[1][field] - numbers[0][field] for field in numbers[0]
        }


def test_a_layer_of_codes_is_ten_launches_too():
    two, three = (costs("Llama-3-8B", 1, layers=layers, codes="int4")["decode 8"] for layers in (2, 3))
    assert dict(three.names - two.names) == {
        "_coded": 4,
        "_add_rms_norm": 2,
        "_rotate_store": 1,
        "_attend": 1,
        "_reduce": 1,
        "_silu_mul": 1,
    }


def test_a_plain_layer_is_ten_launches():
    two, three = (costs("Llama-3-8B", 1, layers=layers)["decode 8"] for layers in (2, 3))
    assert dict(three.names - two.names) == {
        "mm": 4,
        "_add_rms_norm": 2,
        "_rotate_store": 1,
        "_attend": 1,
        "_reduce": 1,
        "_silu_mul": 1,
    }
