"""The errors of a store."""

from lockstep_common.errors import ErrorCode, LockstepError


def unavailable(reason: str) -> LockstepError:
    """The store does not answer, or not as it should: callers go on without it."""
    return LockstepError(ErrorCode.UNAVAILABLE, f"the store cannot be used: {reason}", retry_after_s=1)


def full() -> LockstepError:
    """The store has no room. It can be read."""
    return LockstepError(ErrorCode.OVERLOADED, "the store is full", retry_after_s=1)


def over_quota() -> LockstepError:
    """The tenant has no room. Others may have."""
    return LockstepError(ErrorCode.OVERLOADED, "the tenant has as much as it may (max_tenant_bytes)", retry_after_s=1)
