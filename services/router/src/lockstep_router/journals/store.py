"""The interface of the stores for journals of resumable streams."""

from typing import Protocol

from lockstep_router.journals.records import Claim, Outcome, Piece, Record, StoredStream


class JournalStore(Protocol):
    """Keeps the journals of resumable streams, each until some time after its end.

    Nobody but the router that runs a stream writes to it. A backend may be behind by what it has not written yet.
    """

    @property
    def kept(self) -> int:
        """Streams that have ended and are still kept by this router."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory of this process for all streams, also those that still run."""

    async def open(self, record: Record) -> None:
        """Begin the journal of a stream.

        Raises:
            LockstepError: OVERLOADED, there is no room for it.
        """

    def append(self, request_id: str, piece: Piece) -> None:
        """Append tokens, without waiting for anything. Pieces of streams that are not open are ignored.

        Raises:
            ValueError: the piece does not continue its choice.
        """

    async def seal(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        """Note how a stream ended. It can be read for `keep_s` more seconds, unless room is needed for others."""

    async def read(self, request_id: str) -> StoredStream | None:
        """A stream; None if there is none."""

    async def remove(self, request_id: str) -> None:
        """Forget a stream, and the idempotency key that names it."""

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give an idempotency key to a stream that is about to be opened; of several at once, one gets it.

        Args:
            scope: the key, and whose it is.
            claim: the stream.

        Returns:
            The claim of the stream that has the key already; None: the key is this stream's now.
        """

    async def release(self, request_id: str) -> None:
        """Make the idempotency key of a stream free for another one."""

    def shrink(self, wanted_bytes: int) -> None:
        """Free memory of this process: forget the streams that ended first, until so many bytes are free."""

    def expire(self) -> None:
        """Forget the streams whose time is over. Called about every second."""
