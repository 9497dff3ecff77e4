"""The load that a worker has reported."""

from dataclasses import dataclass
from typing import Self

from lockstep_api.v1 import worker_pb2


@dataclass(slots=True)
class Reported:
    """What requests need of a worker's last status. A message's fields take longer to read than all else about them.

    Not changed after construction; not frozen, for speed.
    """

    queued: int
    running: int
    free_seqs: int
    capacity: int
    queue_wait_s: float
    queue_wait_per_request_s: float
    queue_waits_s: dict[int, float]
    """By the class of the request, if the worker knows classes."""

    @classmethod
    def of(cls, status: worker_pb2.Status) -> Self:
        """That of a status."""
        return cls(
            status.queued,
            status.running,
            status.free_seqs,
            status.total_blocks,
            status.queue_wait_s,
            status.queue_wait_per_request_s,
            dict(status.queue_waits_s),
        )
