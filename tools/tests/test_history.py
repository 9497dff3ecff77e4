"""Each check must be able to fail: a faultless history passes, and every kind of damage to it is found."""

import dataclasses
from collections.abc import Callable

import pytest
from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, StreamRequest, position_of, violations

TEXTS = ["It", " was", " a", " dark", " night"]


def faultless(tokens: bool = False) -> History:
    pieces = [
        Piece(float(number), f"cmpl-1:{number}", 0, text, tokens=1 if tokens else None)
        for number, text in enumerate(TEXTS, start=1)
    ]
    pieces[-1] = dataclasses.replace(pieces[-1], finish="length")
    usage = {"prompt_tokens": 3, "completion_tokens": len(TEXTS)}
    pieces += [Piece(6.0, "cmpl-1:5", usage=usage), Piece(6.0, "cmpl-1:5", done=True)]
    request = StreamRequest("/completions", {"stream_options": {"include_usage": True}})
    return History(request, started_s=0.5, ended_s=6.0, pieces=pieces)


def lose_the_end(history: History) -> None:
    del history.pieces[3:5]
    history.pieces[2] = dataclasses.replace(history.pieces[2], finish="length")


def double(history: History) -> None:
    history.pieces.insert(2, history.pieces[2])


def swap(history: History) -> None:
    history.pieces[1], history.pieces[2] = history.pieces[2], history.pieces[1]


def count_again(history: History) -> None:
    """A token twice, with correct positions: only the count shows it."""
    again = dataclasses.replace(history.pieces[2], tokens=2)
    history.pieces[2] = again


def forget_the_end_mark(history: History) -> None:
    del history.pieces[-1]


def end_twice(history: History) -> None:
    history.pieces.append(history.pieces[-1])


def talk_after_the_end(history: History) -> None:
    history.pieces.append(Piece(7.0, "cmpl-1:5", usage={"completion_tokens": 5}))


def finish_never(history: History) -> None:
    history.pieces[4] = dataclasses.replace(history.pieces[4], finish=None)


def finish_twice(history: History) -> None:
    history.pieces[3] = dataclasses.replace(history.pieces[3], finish="stop")


def talk_after_finish(history: History) -> None:
    history.pieces.insert(5, Piece(6.0, "cmpl-1:6", 0, " more"))
    history.pieces[6] = dataclasses.replace(history.pieces[6], usage={"completion_tokens": 6})


def misreport_usage(history: History) -> None:
    history.pieces[5] = dataclasses.replace(history.pieces[5], usage={"completion_tokens": 4})


def forget_usage(history: History) -> None:
    del history.pieces[5]


def fail(history: History) -> None:
    history.error = "the worker is gone"


def drop_ids(history: History) -> None:
    history.pieces[:] = [dataclasses.replace(piece, id=None) for piece in history.pieces]


def test_a_faultless_history_passes() -> None:
    assert violations(faultless(), reference="".join(TEXTS), require_ids=True) == []
    assert violations(faultless(tokens=True), reference="".join(TEXTS), require_ids=True) == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_the_end, "usage says 5 tokens, 3 were delivered"),
        (double, "position 3 came after 3"),
        (swap, "position 2 came after 3"),
        (forget_the_end_mark, "0 end marks"),
        (end_twice, "2 end marks"),
        (talk_after_the_end, "events after the end mark"),
        (finish_never, "0 finish reasons"),
        (finish_twice, "2 finish reasons"),
        (talk_after_finish, "text after the finish reason"),
        (misreport_usage, "usage says 4 tokens, 5 were delivered"),
        (forget_usage, "no usage"),
        (fail, "failed: the worker is gone"),
        (drop_ids, "text without a position"),
    ],
)
def test_damage_is_found(damage: Callable[[History], None], sentence: str) -> None:
    history = faultless()
    damage(history)
    assert any(sentence in problem for problem in violations(history, require_ids=True))


def test_token_counts_find_what_positions_hide() -> None:
    history = faultless(tokens=True)
    count_again(history)
    assert violations(history) == ["choice 0: 4 tokens were shown at position 3", *violations(history)[1:]]
    lost = faultless(tokens=True)
    lost.pieces[2] = dataclasses.replace(lost.pieces[2], tokens=0)
    assert violations(lost) == ["choice 0: 4 tokens were shown, 5 counted"]


def test_a_different_text_is_found() -> None:
    (problem,) = violations(faultless(), reference="It was a dork night")
    assert "at character 10: 'ark night', not 'ork night'" in problem
    assert violations(faultless(), reference="It was a dark night, and")


def test_a_server_without_ids_has_no_violation() -> None:
    history = faultless()
    drop_ids(history)
    assert violations(history) == []
    assert history.tokens == 5  # by the usage


def test_a_cancelled_stream_need_not_end_but_must_begin_right() -> None:
    history = faultless()
    del history.pieces[3:]
    history.cancelled = True
    assert violations(history, reference="".join(TEXTS), require_ids=True) == []
    assert violations(history, reference="It is") != []
    double(history)
    assert violations(history) != []


def test_a_piece_may_hold_several_tokens_and_choices_are_counted_apart() -> None:
    history = faultless()
    del history.pieces[1]
    other = [dataclasses.replace(piece, choice=1) for piece in history.pieces if piece.choice == 0]
    history.pieces[-2:-2] = other
    history.pieces[-2] = dataclasses.replace(history.pieces[-2], usage={"completion_tokens": 10})
    assert violations(history, require_ids=True) == []
    assert history.choices == [0, 1]
    assert history.tokens == 10


def test_silences() -> None:
    history = faultless()
    history.pieces[3] = dataclasses.replace(history.pieces[3], at_s=4.5)
    assert history.first_token_s == 0.5
    assert history.longest_gap_s() == 1.5
    assert history.longest_gap_s(since_s=4.6) == 0.5
    assert history.longest_gap_s(until_s=2.5) == 1.0


@pytest.mark.parametrize(
    ("event_id", "choice", "position"),
    [
        ("r-1:4", 0, 4),
        ("r-1:4", 1, 4),
        ("r-1:4f", 0, 4),
        ("r-1:4f,u", None, 4),
        ("r-1:4,7f", 0, 4),
        ("r-1:4,7f", 1, 7),
        ("r-1:-,7", 0, None),
        ("r-1:x", 0, None),
        (None, 0, None),
    ],
)
def test_positions_of_both_kinds_of_ids(event_id: str | None, choice: int | None, position: int | None) -> None:
    assert position_of(Piece(0.0, event_id, choice)) == position
