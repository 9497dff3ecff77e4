"""What the messages of a rank's start say of its clock."""

import pytest
from lockstep_engine.control import Ready
from lockstep_engine.rank_process import RankProcess


@pytest.mark.parametrize(
    ("offset_s", "there_s", "back_s", "least_s"),
    [
        (0.0, 0.001, 0.002, 0.0),
        (0.5, 0.001, 0.002, 0.499),
        (-0.5, 0.001, 0.002, 0.498),
        (0.001, 0.25, 0.5, 0.0),  # no more than the messages took
    ],
)
def test_two_messages_bound_how_far_a_clock_is(offset_s, there_s, back_s, least_s):
    sent_s, received_s, answered_s = 100.0, 100.0 + there_s, 107.0
    process = RankProcess(0, loaded_at_s=received_s, allocated_at_s=answered_s)
    assert process.clock_skew_s == (0, 0)
    process.ready = Ready(True, "cpu", "float32")
    assert process.clock_skew_s == (0, 0), "a rank that does not say it"
    process.ready.loaded_at_s = sent_s + offset_s
    process.ready.allocated_at_s = answered_s + back_s + offset_s
    least, most = process.clock_skew_s
    assert least == pytest.approx(least_s)
    assert least <= abs(offset_s) <= most <= least + there_s + back_s + 1e-9
