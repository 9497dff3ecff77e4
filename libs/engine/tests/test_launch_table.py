"""What a step launches on a GPU is what the committed table says: a change that adds a launch to each layer shows here,
without a GPU. `launch_count.py` writes the table anew.
"""

import json

import pytest
from launch_count import MODELS, TABLE, TPS, costs, entry, markdown, rows

COMMITTED = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = {row: (name, tp, exact) for row, name, tp, exact in rows()}


@pytest.mark.parametrize("row", ROWS)
def test_a_step_launches_what_the_table_says(row):
    name, tp, exact = ROWS[row]
    assert entry(name, tp, exact=exact) == COMMITTED[row]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith("DeepSeek")])
def test_decoding_never_waits_for_the_host(row):
    assert all(isinstance(cost, dict) for step, cost in COMMITTED[row].items() if step.startswith("decode"))


def test_the_table_has_these_rows_and_is_the_one_people_read():
    assert list(COMMITTED) == list(ROWS)
    assert len(ROWS) == 2 * len(MODELS) * len(TPS)
    assert TABLE.with_suffix(".md").read_text(encoding="utf-8") == markdown(COMMITTED)


@pytest.mark.parametrize("name", ["Llama-3-8B", "Mixtral-8x7B"])
def test_each_layer_adds_the_same(name):
    two, three, four = (costs(name, 8, layers=layers) for layers in (2, 3, 4))
    for step in (f"decode {count}" for count in (1, 8, 64)):
        numbers = [each[step].numbers() for each in (two, three, four)]
        assert {field: numbers[2][field] - numbers[1][field] for field in numbers[0]} == {
            field: numbers[1][field] - numbers[0][field] for field in numbers[0]
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
