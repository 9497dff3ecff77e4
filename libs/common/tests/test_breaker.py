"""When a circuit breaker opens, and what closes it."""

from lockstep_common.breaker import Breaker


def test_it_opens_once_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker("requests", 3)
    assert [breaker.note_failure() for _ in range(5)] == [False, False, True, False, False]
    assert breaker.is_open


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker("requests", 2)
    for _ in range(3):
        assert not breaker.note_failure()
        breaker.note_success()
    assert not breaker.is_open


def test_only_a_probe_closes_it_and_failures_are_counted_anew_then() -> None:
    breaker = Breaker("requests", 2)
    breaker.note_failure()
    breaker.note_failure()
    breaker.note_success()
    assert breaker.is_open
    breaker.close()
    assert not breaker.is_open
    assert [breaker.note_failure() for _ in range(2)] == [False, True]
