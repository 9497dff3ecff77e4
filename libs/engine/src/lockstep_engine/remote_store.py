"""What the engine needs of a store for KV blocks outside of this machine, the prefix cache's third tier. The engine
knows which blocks it wants and where their contents go; whoever implements this knows the network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HeadRange:
    """Heads of the model's KV cache, by their numbers in the model, which one part of a block is for."""

    first: int
    count: int


@dataclass(frozen=True)
class BlockForm:
    """How a block's contents are laid out; equal for all blocks of a worker that have one version."""

    dtype: str
    """Lower-case letters, digits and underscores."""
    shape: tuple[int, ...]
    length: int
    """Bytes of one part."""


@dataclass(frozen=True)
class StoredBlock:
    """A part of a block in host memory."""

    hash: bytes
    """SHA-256 of the chain of exact token ids, seeded with all that decides about the content."""
    heads: HeadRange
    form: BlockForm
    content: memoryview
    """Valid until `offer` returns."""


@dataclass(frozen=True)
class FetchResult:
    """How a fetch has ended."""

    blocks: int
    """Leading blocks of which every part is complete."""
    outcome: str
    """`fetched`, `absent`, `gate` (computing is faster), `unmeasured` (nothing is known of the way), `deadline`,
    `unavailable` or `damaged`.
    """


class RemoteStore(Protocol):
    """All is called in the driver's loop; nothing blocks it, and nothing raises but CancelledError."""

    on_lost: Callable[[Sequence[bytes]], None]
    """The engine sets it. Called with the hashes of blocks that were taken and will not be stored: offer them again."""

    @property
    def fetch_timeout_s(self) -> float:
        """Longest time of a fetch. One that takes longer is cancelled, and what has come is lost."""

    @property
    def is_away(self) -> bool:
        """Whether it does not answer now. What is offered meanwhile may never be stored."""

    def is_kept(self, offered_at: float) -> bool:
        """Whether it will still have for a while what it took, or was seen to have, at this time of `time.monotonic`.
        False: offer it again.
        """

    async def fetch(
        self,
        tenant: str,
        hashes: Sequence[bytes],
        heads: Sequence[HeadRange],
        form: BlockForm,
        recompute_s: Callable[[int], float],
        into: Callable[[int, int], memoryview],
        further_bytes: int,
    ) -> FetchResult:
        """Fetch the leading blocks of a chain that are there for all heads, if that is faster than computing them.

        Args:
            tenant: whose blocks are fetched; those of other tenants are never returned.
            hashes: of the blocks wanted, in the chain's order.
            heads: of each part that a block is made of.
            form: what each part must be; other parts count as damaged.
            recompute_s: estimates the seconds until so many leading blocks would be computed; of 0 blocks: until the
                request's turn comes.
            into: the memory, of `form.length` bytes, for the block at an index of `hashes` and the part at an index of
                `heads`. It stays valid until the fetch ends or is cancelled.
            further_bytes: of blocks that the caller fetches next; without them these blocks are of no use.
        """

    def offer(self, tenant: str, blocks: Sequence[StoredBlock]) -> int:
        """Have parts of blocks stored later. Returns how many leading ones were taken; the others do not fit the
        queue.
        """
