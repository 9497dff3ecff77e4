"""Numbers in a worker's frames: NaN, or one without a bound, would spread to waits, policies and JSON.

Such a number counts as 0, which says "unknown" in each of these fields; the streams of the worker go on. Those of
embeddings are checked where they are read.
"""

from google.protobuf.message import Message
from lockstep_api.v1 import worker_pb2

_LARGEST = 1e12
"""Beyond every time, in seconds, and every rate."""
_OF_STATUS = ("tokens_per_s", "step_deadline_s", "queue_wait_s", "queue_wait_per_request_s")
_OF_RANKS = ("compute_s", "collective_s")
_OF_WORK = ("compute_s", "collective_s", "idle_s")


def clear_unusable(frame: worker_pb2.WorkerFrame) -> str:
    """Set such numbers of a Status, Rejected or EndedAttempts to 0; the name of one of them, empty if there is none."""
    match frame.WhichOneof("frame"):
        case "status":
            return _clear_status(frame.status)
        case "rejected":
            return _clear(frame.rejected, ("retry_after_s",))
        case "ended_attempts":
            works = (work for each in frame.ended_attempts.attempts for work in (*each.prefill, *each.decode))
            return max((_clear(work, _OF_WORK) for work in works), default="")
        case _:
            return ""


def _clear_status(status: worker_pb2.Status) -> str:
    found = [_clear(status, _OF_STATUS), *(_clear(rank, _OF_RANKS) for rank in status.ranks)]
    for priority, wait_s in status.queue_waits_s.items():
        if not _is_usable(wait_s):
            status.queue_waits_s[priority] = 0.0
            found.append("queue_waits_s")
    return max(found)


def _clear(message: Message, names: tuple[str, ...]) -> str:
    unusable = [name for name in names if not _is_usable(getattr(message, name))]
    for name in unusable:
        message.ClearField(name)
    return unusable[0] if unusable else ""


def _is_usable(number: float) -> bool:
    return abs(number) <= _LARGEST  # which NaN is not
