"""Why an attempt ended before its stream did, and what follows from it."""

from dataclasses import dataclass
from enum import StrEnum

from lockstep_common.errors import ErrorCode


class Loss(StrEnum):
    """The reasons for which a stream leaves its worker; the `reason` of the failover metric."""

    LINK_LOST = "link_lost"
    SILENT = "silent"
    RESTARTING = "restarting"
    NEW_EPOCH = "new_epoch"
    WORKER_LOST = "worker_lost"
    FIRST_TOKEN_DEADLINE = "first_token_deadline"  # noqa: S105  (no password)
    INTER_TOKEN_DEADLINE = "inter_token_deadline"  # noqa: S105
    GAP = "gap"
    MALFORMED = "malformed"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    SLOW_CLIENT = "slow_client"

    @property
    def is_blameless(self) -> bool:
        """The stream cannot be the cause: such losses do not use up its attempts."""
        return self in _BLAMELESS

    @property
    def worker_may_go_on(self) -> bool:
        """The worker may still be computing the stream and has to be told to stop."""
        return self in _NEED_CANCEL

    @property
    def avoid_s(self) -> float:
        """For how long the stream rather waits than goes back to this life of this worker.

        Nothing for losses that change the worker's state, which keeps streams away by itself.
        """
        return _AVOID_S.get(self, 0.0)


_BLAMELESS = frozenset({Loss.DRAINING, Loss.OVERLOADED, Loss.UNAVAILABLE, Loss.SLOW_CLIENT})
_NEED_CANCEL = frozenset(
    {
        Loss.SILENT,
        Loss.FIRST_TOKEN_DEADLINE,
        Loss.INTER_TOKEN_DEADLINE,
        Loss.GAP,
        Loss.MALFORMED,
        Loss.SLOW_CLIENT,
    }
)
_AVOID_S = {
    Loss.WORKER_LOST: 0.25,
    Loss.UNAVAILABLE: 0.25,
    Loss.OVERLOADED: 0.5,
    Loss.DRAINING: 1.0,
    Loss.FIRST_TOKEN_DEADLINE: 1.0,
    Loss.INTER_TOKEN_DEADLINE: 1.0,
    Loss.GAP: 1.0,
    Loss.MALFORMED: 1.0,
}

BY_CODE = {
    ErrorCode.WORKER_LOST: Loss.WORKER_LOST,
    ErrorCode.DRAINING: Loss.DRAINING,
    ErrorCode.OVERLOADED: Loss.OVERLOADED,
    ErrorCode.UNAVAILABLE: Loss.UNAVAILABLE,
}
"""What a worker's retryable rejections mean; any other code counts as a lost worker."""


@dataclass(frozen=True)
class Lost:
    """The end of an attempt whose stream goes on elsewhere."""

    reason: Loss
    retry_after_s: float = 0.0
    """The worker's own wish; 0: none."""
