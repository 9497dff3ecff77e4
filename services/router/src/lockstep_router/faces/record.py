"""The facts about one request, from its arrival to its log lines."""

import time
from collections.abc import Awaitable
from dataclasses import dataclass

from lockstep_router.faces.bodies import Reservation
from lockstep_router.tenants import Access, Account
from lockstep_router.traces import RequestTrace


@dataclass
class Record:
    """The facts about a request that are logged when it ends."""

    request_id: str
    account: Account
    """Of its tenant. If the router has no keys there is no tenant and no limit."""
    key_id: str = ""
    """Names the API key; empty if the router has no keys, or if there was no valid one."""
    access: Access | None = None
    """What the key gives access to."""
    status: int = 0
    """The status sent, or the error's status if a stream fails after 200."""
    started: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failovers: int = 0
    resumed: bool = False
    """Whether an earlier request started the stream."""
    trace: RequestTrace | None = None
    """None: there are no traces."""
    body: Reservation | None = None
    """The body's share of the budget for bodies."""

    def log_fields(self) -> dict[str, str]:
        """What each log line about the request says."""
        fields = {"request_id": self.request_id}
        return fields if self.trace is None else fields | self.trace.root.log_fields

    async def write(self, writing: Awaitable[None]) -> None:
        """Await a write to the client. The trace gets the time for which the client let it wait."""
        if self.trace is None:
            await writing
            return
        began_ns = time.monotonic_ns()
        try:
            await writing
        finally:
            self.trace.note_write(began_ns)

    def come_back(self) -> None:
        """It asks for the stream of an earlier request, whose trace it will join."""
        self.resumed = True
        if self.trace is not None:
            self.trace.trace.defer()

    def release_body(self) -> None:
        """Return the body's memory to the budget."""
        if self.body is not None:
            self.body.release()
            self.body = None
