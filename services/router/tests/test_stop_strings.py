"""Stop strings are found wherever the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_router.text.stop_strings import StopStrings

text = st.text(alphabet="abc", max_size=40)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def expected(whole, stop_list):
    """The text up to the stop string that ends first; of two with one end, the one that begins first."""
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stop_list if stop in whole]
    return whole if not ends else whole[: min(ends)[1]]


def split(whole, cuts):
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


def run(pieces, stop_list):
    finder = StopStrings(stop_list)
    given_out = []
    for piece in pieces:
        given_out.append(finder.feed(piece))
        if finder.found:
            return given_out, True
    given_out.append(finder.flush())
    return given_out, False


@given(text, stops, st.lists(st.integers(0, 40), max_size=8))
def test_result_does_not_depend_on_the_pieces(whole, stop_list, cuts):
    given_out, found = run(split(whole, cuts), stop_list)
    assert "".join(given_out) == expected(whole, stop_list)
    assert found == any(stop in whole for stop in stop_list)


@given(text, stops)
def test_only_a_possible_beginning_is_held_back(whole, stop_list):
    finder = StopStrings(stop_list)
    seen = ""
    for index, char in enumerate(whole):
        seen += finder.feed(char)
        if finder.found:
            return
        held = whole[len(seen) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stop_list)


@pytest.mark.parametrize(
    ("pieces", "stop_list", "result"),
    [
        (["Hel", "lo wor", "ld"], ["lo w"], "Hel"),
        (["ab", "ab", "c"], ["abc"], "ab"),
        (["aab"], ["ab"], "a"),
        (["x"], [], "x"),
        (["end\n", "\n"], ["\n\n"], "end"),
        (["stop"], ["stop"], ""),
        (["abcd"], ["abcd", "bc"], "a"),
    ],
)
def test_examples(pieces, stop_list, result):
    assert "".join(run(pieces, stop_list)[0]) == result
