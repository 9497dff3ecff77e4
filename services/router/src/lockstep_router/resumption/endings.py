"""Why a stream cannot be read, or is being ended: one error for each reason, the same on every face."""

from lockstep_common.errors import ErrorCode, LockstepError


def not_found() -> LockstepError:
    """The same for a stream that never was, that is gone, and that is another tenant's."""
    return LockstepError(ErrorCode.STREAM_NOT_FOUND, "there is no such stream, or it can no longer be resumed")


def cancelled() -> LockstepError:
    """A client has deleted the stream, here or at another router."""
    return LockstepError(ErrorCode.CANCELLED, "the stream was cancelled")


def gone() -> LockstepError:
    """No client has read the stream for `resume_window_s`."""
    return LockstepError(ErrorCode.CANCELLED, "no client reads the stream")


def draining() -> LockstepError:
    """The router ends; another one may continue the stream."""
    return LockstepError(ErrorCode.DRAINING, "this router is shutting down", retry_after_s=1)


def moved() -> LockstepError:
    """Another router has taken the stream over, because a client asked for it there. Final for those that read it here
    before: if they asked for it again, two readers could take it from each other for ever.
    """
    return LockstepError(ErrorCode.STREAM_MOVED, "another router has the stream now, as a client asked for it there")


def taken() -> LockstepError:
    """The same for readers that may have come after that: theirs may be the only client, which came back from there."""
    return LockstepError(ErrorCode.UNAVAILABLE, "another router has the stream; it can be resumed", retry_after_s=1)
