"""The comparison with llama.cpp pairs each of our weights with its counterparts, and works without llama.cpp."""

import pytest
from against_llama import OURS, PAIRS, WEIGHTS, compare, own_text, report_text


class Side:
    """Gives one token over and over: our engine, or llama.cpp in its interpreter."""

    def __init__(self, token):
        self._token = token

    def generate_ids(self, prompts, params):
        return [[self._token] * params.max_tokens for _ in prompts]

    def run(self, _name, request):
        return [[self._token] * request["tokens"] for _ in request["prompts"]], 0.5


def engines(*names):
    return {name: Side(7) for name in names}


def test_each_of_ours_has_a_row_for_each_counterpart():
    rows = compare(engines(*OURS), Side(7), "tiny", 2, 300, 4, 1)
    assert [(row["our_weights"], row["weights"]) for row in rows] == [
        (ours, theirs) for ours in OURS for theirs in PAIRS[ours]
    ]
    assert {row["weights"] for row in rows} == set(WEIGHTS)
    assert {row["llama_cpp_tokens_per_s"] for row in rows} == {2 * 4 / 0.5}
    assert {row["same_tokens_up_to_first_difference"] for row in rows} == {1.0}
    page = report_text({"threads": 1, "llama_cpp_python": "0", "rows": rows})
    assert page.count("\n| tiny | 2 |") == len(rows)


def test_tokens_that_differ_are_counted():
    rows = compare(engines("float"), Side(8), "tiny", 1, 300, 4, 1)
    assert {row["same_tokens_up_to_first_difference"] for row in rows} == {0.0}


@pytest.mark.parametrize("streams", [1, 8])
def test_without_llama_cpp_ours_are_compared_with_our_float(streams):
    rows = compare(engines("float", "int8 with head"), None, "tiny", streams, 300, 4, 1)
    assert [row["our_weights"] for row in rows] == ["float", "int8 with head"]
    assert rows[0]["ours_over_our_float"] == 1.0
    assert own_text({"rows": rows}).count("\n| tiny |") == 2
