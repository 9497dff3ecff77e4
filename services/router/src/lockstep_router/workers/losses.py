"""The reasons why a stream leaves its worker before its end, and their consequences."""

from dataclasses import dataclass
from enum import StrEnum

from lockstep_common.errors import ErrorCode


class Loss(StrEnum):
    """A reason; it is also the label `reason` of the failover metric."""

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
    def is_death(self) -> bool:
        """Whether one life of the worker seems to have ended: all its streams leave at once."""
        return self in _DEATHS

    @property
    def is_refusal(self) -> bool:
        """Whether the worker refused the stream; the router may not have known that it would."""
        return self in _REFUSALS

    @property
    def is_failure(self) -> bool:
        """Whether only this stream was lost, on a worker that lives: too many of these in a row are an error."""
        return self in _FAILURES

    @property
    def needs_cancel(self) -> bool:
        """Whether the worker may still compute the stream, so that it needs a Cancel."""
        return self in _NEED_CANCEL

    @property
    def avoid_s(self) -> float:
        """Back-off before the stream retries the same life of the same worker.

        It is 0 for losses that change the worker's state, because such a worker is not ready anyway.
        """
        return _AVOID_S.get(self, 0.0)


_DEATHS = frozenset({Loss.LINK_LOST, Loss.SILENT, Loss.RESTARTING, Loss.NEW_EPOCH})
_REFUSALS = frozenset({Loss.DRAINING, Loss.OVERLOADED, Loss.UNAVAILABLE})
_FAILURES = frozenset(
    {Loss.WORKER_LOST, Loss.FIRST_TOKEN_DEADLINE, Loss.INTER_TOKEN_DEADLINE, Loss.GAP, Loss.MALFORMED}
)
_NEED_CANCEL = frozenset(
    {
        # A Submit that is on its way when the ranks die arrives in the next epoch, which runs it.
        Loss.RESTARTING,
        Loss.NEW_EPOCH,
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
"""The loss for each code of a retryable rejection; any other code counts as a lost worker."""


@dataclass(frozen=True)
class Lost:
    """The end of an attempt whose stream continues on another worker."""

    reason: Loss
    retry_after_s: float = 0.0
    """The back-off that the worker asked for; 0: none."""
