"""Returns memory that large requests have freed to the system.

The allocator keeps freed memory for later use. After a burst of large requests that is hundreds of megabytes, which
count against a container's limit.
"""

import asyncio

from lockstep_common.freed_memory import return_freed_memory

_TRIM_AFTER_S = 2.0


class MemoryTrimmer:
    """Makes the allocator return free memory some time after a request for it, once for a burst of requests."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def trim_soon(self) -> None:
        """Trim some seconds from now; called when something large is about to be freed."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def stop(self) -> None:
        """Cancel a pending trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
