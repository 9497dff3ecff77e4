"""What a discovery finds, and what it is to the rest of the router."""

from dataclasses import dataclass
from typing import Protocol

from lockstep_router.discovery.report import Report


@dataclass(frozen=True)
class Found:
    """A worker as a discovery names it. Another one that answers at the same address is another `Found`."""

    target: str
    """gRPC target: unix:/path or host:port, an IPv6 host in brackets."""
    worker_id: str | None = None
    """Who has to answer there; None: whoever does."""


class Discovery(Protocol):
    """A way to know the workers."""

    async def run(self, report: Report) -> None:
        """Report all workers at once, again whenever they may have changed, and what stands in the way; until
        cancelled. It never gives up, and what it cannot see any more it still holds for there.
        """
