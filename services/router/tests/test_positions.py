"""Positions are written and read back, and nothing else is taken for one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.generation.choices import Delta
from lockstep_router.resumption import After, Position, event_id

places = st.one_of(st.tuples(st.just(-1), st.just(False)), st.tuples(st.integers(0, 9_999_999_999), st.booleans()))


@given(parts=st.lists(places, min_size=1, max_size=8), has_usage=st.booleans())
def test_positions_are_read_as_they_were_written(parts, has_usage):
    tokens, finished = zip(*parts, strict=True)
    position = Position(tokens, finished, has_usage and all(finished))
    assert Position.parse(str(position), len(parts), "field") == position
    after = After.parse(event_id("r-1", position), "field")
    assert (after.request_id, after.position, after.field) == ("r-1", str(position), "field")


@given(text=st.text(alphabet="0129-f,u: ", max_size=12), choices=st.integers(1, 4))
def test_texts_are_refused_or_have_one_meaning(text, choices):
    position = None
    with contextlib.suppress(LockstepError):
        position = Position.parse(text, choices, "field")
    if position is not None:
        assert Position.parse(str(position), choices, "field") == position
        assert len(position.tokens) == len(position.finished) == choices


def test_what_a_client_has_grows_with_its_events():
    position = Position.start(2)
    assert (str(position), position.unopened) == ("-,-", [0, 1])
    position = position.opened(1)
    assert (str(position), position.unopened) == ("-,0", [0])
    position = position.after(Delta(0, "text", 12)).after(Delta(1, "text", 7, "stop"))
    assert str(position) == "12,7f"
    assert str(position.after(Delta(0, "", 12, "length")).with_usage()) == "12f,7f,u"


@pytest.mark.parametrize("text", ["12f,7,u", "12f,u", "u", "12,7,9", "12", "", ",", "-f,1", "1f,-f"])
def test_positions_that_no_client_of_two_choices_has(text):
    with pytest.raises(LockstepError) as refused:
        Position.parse(text, 2, "field")
    assert (refused.value.field, refused.value.code) == ("field", ErrorCode.INVALID_REQUEST)


@pytest.mark.parametrize("text", ["", "r-1", "1" * 100_000 + ":1"])
def test_ids_that_are_no_events(text):
    with pytest.raises(LockstepError):
        After.parse(text, "field")
