"""What a client that comes back to a resumable stream must find, and what it cannot find any more."""

import pytest
from simulated.tracks import Track

WINDOW_S = 2.0


@pytest.mark.parametrize(
    ("facts", "now", "must", "cannot"),
    [
        ({"readers": 1}, 100.0, True, False),
        ({"left_at": 10.0}, 11.0, True, False),
        ({"left_at": 10.0}, 12.0, False, False),
        ({"left_at": 10.0}, 12.5, False, True),
        ({"left_at": 10.0, "readers": 1}, 50.0, True, False),
        ({"left_at": 10.0, "sealed_at": 11.0}, 12.5, True, False),
        ({"left_at": 10.0, "sealed_at": 11.0}, 14.0, False, False),
        ({"left_at": 10.0, "sealed_at": 11.0}, 14.5, False, True),
        ({"readers": 1, "cancelled_at": 10.0}, 10.1, False, True),
        ({}, 10.0, False, False),
    ],
)
def test_what_the_window_says(facts, now, must, cannot):
    track = Track("r-1", ("s-0",), **facts)
    assert track.must_exist(now, WINDOW_S) is must
    assert track.cannot_exist(now, WINDOW_S) is cannot
