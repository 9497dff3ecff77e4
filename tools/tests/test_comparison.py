"""The comparison finds each kind of damage, and excuses only the given failures."""

import dataclasses
from collections.abc import Callable

import pytest
from lockstep_tools.load.comparison import compare
from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, StreamRequest

TEXTS = ["It", " was", " a", " dark", " night"]


def stream(texts: list[str] | None = None, number: int = 0, error: str | None = None) -> History:
    """A faultless stream of these tokens, or the beginning of one that failed."""
    texts = TEXTS if texts is None else texts
    pieces = [Piece(float(n), f"cmpl-1:{n}", 0, text) for n, text in enumerate(texts, start=1)]
    if error is None:
        pieces[-1] = dataclasses.replace(pieces[-1], finish="length")
        usage = {"prompt_tokens": 3, "completion_tokens": len(texts)}
        pieces += [Piece(6.0, f"cmpl-1:{len(texts)}", usage=usage), Piece(6.0, f"cmpl-1:{len(texts)}", done=True)]
    request = StreamRequest("/completions", {"stream_options": {"include_usage": True}})
    return History(request, number=number, ended_s=6.0, pieces=pieces, error=error)


UNDISTURBED = [stream()]


def damaged(damage: Callable[[list[Piece]], None]) -> History:
    history = stream()
    damage(history.pieces)
    return history


def double(pieces: list[Piece]) -> None:
    pieces.insert(2, pieces[2])


def test_equal_streams_hold() -> None:
    comparison = compare([stream(number=0), stream(number=1)], UNDISTURBED)
    assert (comparison.holds, comparison.streams, comparison.problems) == (True, 2, [])


def test_pieces_of_several_tokens_are_the_same_text() -> None:
    history = stream()
    history.pieces[1] = dataclasses.replace(history.pieces[1], text="It was")
    del history.pieces[0]
    assert compare([history], UNDISTURBED).holds


def test_a_changed_word_is_found() -> None:
    comparison = compare([stream(["It", " was", " a", " dork", " night"])], UNDISTURBED)
    assert (comparison.holds, comparison.changed, comparison.failed) == (False, 1, 0)
    assert comparison.problems == [
        "stream 0: choice 0: from token 4 on the text is not that of the undisturbed stream",
    ]


def test_a_text_cut_short_with_a_proper_end_is_found() -> None:
    comparison = compare([stream(TEXTS[:4])], UNDISTURBED)
    assert (comparison.lost_tokens, comparison.changed) == (1, 1)
    assert "ends at token 4, not 5" in comparison.problems[0]


def test_a_longer_text_is_found() -> None:
    comparison = compare([stream([*TEXTS, " and"])], UNDISTURBED)
    assert (comparison.doubled_tokens, comparison.changed, comparison.holds) == (1, 1, False)


def test_a_doubled_piece_is_found() -> None:
    assert "position 3 came after 3" in compare([damaged(double)], UNDISTURBED).problems[0]


def test_a_choice_without_text_is_found() -> None:
    assert not compare([History(stream().request, ended_s=1.0)], UNDISTURBED).holds


@pytest.mark.parametrize("excused", [False, True])
def test_a_failure_counts_unless_it_is_excused(excused: bool) -> None:
    broken = stream(TEXTS[:2], error="the connection broke")
    comparison = compare([broken, stream()], UNDISTURBED, excuse=lambda _: "router killed" if excused else None)
    assert comparison.holds is excused
    assert (comparison.failed, comparison.lost_tokens) == ((0, 0) if excused else (1, 3))
    assert dict(comparison.excused) == ({"router killed": 1} if excused else {})


def test_what_an_excused_stream_sent_must_be_correct_too() -> None:
    broken = stream(["It", " is"], error="the connection broke")
    comparison = compare([broken], UNDISTURBED, excuse=lambda _: "router killed")
    assert (comparison.changed, comparison.holds) == (1, False)


def test_a_stream_that_did_not_fail_is_never_excused() -> None:
    assert not compare([stream(TEXTS[:4])], UNDISTURBED, excuse=lambda _: "router killed").holds
