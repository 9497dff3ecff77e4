"""Numbers in a worker's frames: NaN, or one without a bound, would spread to waits, policies and JSON.

Those of embeddings are checked where they are read.
"""

from collections.abc import Iterable
from itertools import chain

from lockstep_api.v1 import worker_pb2

from lockstep_router.workers.connection import ProtocolError

_LARGEST = 1e12
"""Beyond every time, in seconds, and every rate."""


def check_status(status: worker_pb2.Status) -> None:
    """Raise ProtocolError for a status with such a number."""
    _check("status.tokens_per_s", status.tokens_per_s)
    _check("status.step_deadline_s", status.step_deadline_s)
    _check("status.queue_wait_s", status.queue_wait_s)
    _check("status.queue_wait_per_request_s", status.queue_wait_per_request_s)
    for wait_s in status.queue_waits_s.values():
        _check("status.queue_waits_s", wait_s)
    for rank in status.ranks:
        _check("status.ranks.compute_s", rank.compute_s)
        _check("status.ranks.collective_s", rank.collective_s)


def check_rejected(rejected: worker_pb2.Rejected) -> None:
    """Raise ProtocolError for a refusal with such a number."""
    _check("rejected.retry_after_s", rejected.retry_after_s)


def check_ended(attempts: Iterable[worker_pb2.EndedAttempt]) -> None:
    """Raise ProtocolError for a report of ended attempts with such a number."""
    for attempt in attempts:
        for work in chain(attempt.prefill, attempt.decode):
            _check("ended_attempts.compute_s", work.compute_s)
            _check("ended_attempts.collective_s", work.collective_s)
            _check("ended_attempts.idle_s", work.idle_s)


def _check(name: str, number: float) -> None:
    if not abs(number) <= _LARGEST:  # NaN is not, either
        raise ProtocolError(f"{name} is {number}")
