"""The interface of a backend, and the plain data that goes through it.

A backend knows keys, not tenants and names: `lockstep_state.keys` has made one key of both. All of it is linearizable
for each key, and nothing more is promised across keys. Every operation may raise `LockstepError`: UNAVAILABLE if the
store does not answer, which leaves open whether a change was made; every change can be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep_api.v1 import state_pb2

from lockstep_state.logs import Log


@dataclass(frozen=True)
class Limits:
    """What one stream and one tenant may take."""

    stream_bytes: int
    """A stream's record, tokens and seal."""
    tenant_bytes: int
    """All streams and names of a tenant. Only what is new is refused: open streams go on, and names are kept."""
    tenant_streams: int
    """Streams of a tenant, those that have ended included."""
    tenant_block_bytes: int
    """All blocks of a tenant. They have a limit of their own, so that they never take the room of streams."""


@dataclass(frozen=True)
class Opening:
    """The beginning of a stream."""

    record: bytes
    choices: int
    owner: str
    left_s: float | None = None
    """Of the request's own timeout; None: it has none."""


@dataclass(frozen=True)
class Write:
    """One stream's part of a batch."""

    tenant: str
    key: str
    epoch: int
    ttl_s: float
    opening: Opening | None = None
    pieces: Sequence[state_pb2.Piece] = ()
    """At most one of each choice."""
    seal: bytes | None = None


@dataclass(frozen=True)
class Take:
    """The router that continues a stream, and for how long it is kept without another write."""

    owner: str
    ttl_s: float


@dataclass(frozen=True)
class StoredStream:
    """A stream as it is stored."""

    record: bytes
    logs: Sequence[Log]
    """Of each choice. Not to be changed."""
    seal: bytes | None
    epoch: int
    owner: str
    left_s: float | None = None
    """Of the request's own timeout; None: it has none, or it is not known."""


@dataclass(frozen=True)
class Binding:
    """What a name is bound to: a session to its worker, an idempotency key to its request."""

    target: bytes
    """Compared."""
    note: bytes = b""
    """Kept with it."""


@dataclass(frozen=True)
class Lease:
    """A name's lease."""

    owner: str
    """Empty: it is free."""
    epoch: int
    """Of the last grant; 0: none is known."""
    expires_in_s: float


@dataclass(frozen=True)
class Block:
    """One block to be stored."""

    tenant: str
    key: str
    value: bytes
    ttl_s: float


class Backend(Protocol):
    """Keeps everything. Values are given back as they were stored, or not at all."""

    @property
    def unready(self) -> str | None:
        """Why it cannot be used now, in a few words; None if it can."""

    async def append(self, writes: Sequence[Write]) -> list[state_pb2.WriteResult]:
        """Write to streams, one write to each, completely or not at all. Raises nothing: each has its outcome."""

    async def read(self, key: str, take: Take | None = None) -> StoredStream | None:
        """A stream; None if there is none. With `take` its epoch grows by the same operation."""

    async def head(self, key: str) -> StoredStream | None:
        """A stream without its tokens: its logs may be empty. None if there is none."""

    async def trim(self, tenant: str, keys: Sequence[str], tombstone_ttl_s: float) -> int:
        """Forget streams; how many there were.

        One that was taken leaves a tombstone with its epoch for so many seconds, so that writes of lower epochs are
        stale as before. Tombstones count in the tenant's bytes, and may be forgotten early to make room.
        """

    async def bind(
        self, tenant: str, key: str, binding: Binding, ttl_s: float, expected: bytes | None, stream: str = ""
    ) -> tuple[bool, Binding]:
        """Bind a name.

        Args:
            tenant: in whose bytes it counts.
            key: the name.
            binding: to what.
            ttl_s: for how long.
            expected: the target now, empty for none; None: any. The new target is always right, so that calls
                can be repeated.
            stream: the key of the stream of the request that is the target; empty: it is no request. A name is not
                evicted as long as this stream runs.

        Returns:
            Whether it was done, and what the name is bound to now.

        Raises:
            LockstepError: OVERLOADED, there is no room, in the store or for the tenant.
        """

    async def bound(self, key: str) -> Binding | None:
        """What a name is bound to."""

    async def touch(self, tenant: str, key: str, ttl_s: float) -> Binding | None:
        """What a name is bound to; its time begins again."""

    async def unbind(self, tenant: str, key: str, target: bytes | None) -> bool:
        """Forget a name, if it is bound to this target (None: to any); whether it was."""

    async def acquire(self, key: str, owner: str, ttl_s: float) -> tuple[bool, Lease]:
        """Take a lease that no other owner holds, with a higher epoch; whether it was done, and the lease now."""

    async def renew(self, key: str, owner: str, epoch: int, ttl_s: float) -> tuple[bool, Lease]:
        """Hold a lease for longer. Once it has expired this is refused."""

    async def release(self, key: str, owner: str, epoch: int) -> tuple[bool, Lease]:
        """Give a lease back."""

    async def lease(self, key: str) -> Lease:
        """A lease now."""

    async def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks; False for those that there is no room for."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Blocks; None for those that are not there."""

    async def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of blocks, about; 0 for those that are not there."""

    async def discard(self, tenant: str, keys: Sequence[str]) -> None:
        """Forget blocks."""

    async def run(self) -> None:
        """What has to be done all the time, until it is cancelled."""

    async def close(self) -> None:
        """Close connections."""
