"""Errors of the driver itself. They are noted by their type and place: a message may quote a prompt."""

import logging
import traceback
from pathlib import Path

logger = logging.getLogger("lockstep.engine")

NO_MEMORY = "the driver had no memory for a step"
_MAX_FRAMES = 8


def note(error: BaseException, epoch: int) -> str:
    """Log an error that nothing in the driver expects.

    Returns:
        The reason for which the ranks are lost, in a few words.
    """
    if isinstance(error, MemoryError):
        return NO_MEMORY
    kind = type(error).__name__
    logger.error("the driver failed", extra={"epoch": epoch, "error": kind, "where": _where(error)})
    return f"the driver failed: {kind}"


def _where(error: BaseException) -> str:
    """The functions in which it was raised, the innermost first."""
    frames = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return ", ".join(reversed(frames[-_MAX_FRAMES:]))
