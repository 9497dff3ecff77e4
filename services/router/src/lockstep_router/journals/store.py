"""The interface of the stores for journals of resumable streams."""

from collections.abc import Callable
from typing import Protocol

from lockstep_common.errors import LockstepError

from lockstep_router.journals.records import Claim, Outcome, Piece, RequestRecord, StoredStream


class StoreAwayError(LockstepError):
    """It is not known what other routers have, because the state server does not answer."""


class JournalStore(Protocol):
    """Keeps the journals of resumable streams, each until some time after its end.

    Only the router that runs a stream writes to it. What other routers can see may be behind by what has not been
    written there yet.
    """

    @property
    def kept(self) -> int:
        """Streams that have ended and are still kept by this router."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory of this process for all streams, also those that still run."""

    async def open(self, record: RequestRecord) -> None:
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
        """Note how a stream ended. It can be read for `keep_s` more seconds, unless room is needed for others. One that
        may go on after its failure can be taken until then, here and by other routers.
        """

    async def read(self, request_id: str) -> StoredStream | None:
        """A stream; None if there is none."""

    async def remove(self, request_id: str) -> None:
        """Forget a stream, and the idempotency key that names it. A failed one that goes on elsewhere is ended there.

        Raises:
            LockstepError: as for `look_up`, of a failed stream. It is forgotten here.
        """

    async def settle(self, request_id: str) -> None:
        """Wait until other routers can know that a stream was removed or discarded here; not for long, and not at all
        while no other router can learn it. If one had taken it before that, it is ended there.

        Raises:
            LockstepError: as for `look_up`, of a stream that another router has.
        """

    async def leave(self, request_id: str) -> None:
        """Forget a running stream here, so that another router may continue it; it keeps its idempotency key. Where no
        other router can know it, this is `remove`.
        """

    # Streams of other routers.

    @property
    def is_away(self) -> bool:
        """Whether it is impossible to ask for them now."""

    async def look_up(self, request_id: str, owner: str) -> StoredStream | None:
        """A stream of an owner that this router does not have; None: there is none, or it is impossible to ask.

        Raises:
            StoreAwayError: UNAVAILABLE, the answer has just failed to come.
            LockstepError: UNAVAILABLE, it cannot be given yet, or not by this router; OVERLOADED, too many ask at a
                time.
        """

    async def take(self, known: StoredStream) -> StoredStream | None:
        """Take over a stream that was looked up, or that has failed here and may go on, so that only this router writes
        to it from now on, and keep it here.

        Returns:
            What is known of it: the router that had it may have generated more. None: there is none any more.

        Raises:
            LockstepError: as for `look_up`; OVERLOADED, there is no room for it, and it was not taken.
        """

    async def discard(self, request_id: str, owner: str) -> bool:
        """Forget a stream of an owner that this router does not have, and end it where it runs; whether there was one.

        Raises:
            LockstepError: as for `look_up`.
        """

    def on_taken(self, callback: Callable[[str, float, bool], None]) -> None:
        """Have this called with each stream that another router has taken over. It is not kept here then.

        Args:
            callback: gets the stream's id, when it was last known to be this router's, in the event loop's time, and
                whether it was removed since then, as far as is known.
        """

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give an idempotency key to a stream that is about to be opened; of several at once, one gets it.

        Args:
            scope: the key, and whose it is.
            claim: the stream.

        Returns:
            The claim of the stream that has the key already; None: the key is this stream's now.
        """

    async def find(self, scope: str) -> Claim | None:
        """The claim of the stream that has an idempotency key; None if none has it."""

    async def release(self, request_id: str) -> None:
        """Make the idempotency key of a stream free for another one."""

    def shrink(self, wanted_bytes: int) -> None:
        """Free memory of this process: forget streams that have ended, until so many bytes are free.

        As where there is no room for a new stream, the tenant that has the most loses those that ended first.
        """

    def expire(self) -> None:
        """Forget the streams whose time is over. Called about every second."""
