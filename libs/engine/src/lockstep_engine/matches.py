"""Remembers what the tiers of the prefix cache have for requests that wait for blocks.

A long prompt that does not fit is considered in every step, and to look up thousands of its blocks takes milliseconds.
What was found stays true until one of these blocks comes, goes, or begins or ceases to be used.
"""

from typing import NamedTuple

from lockstep_engine.blocks import BlockKey, Needs

_MAX_REMEMBERED = 8
"""Requests that are remembered: those first in line. Each costs a look-up whenever a block changes."""


class Hits(NamedTuple):
    """How many of a sequence's first blocks the pools or the tier in host memory hold."""

    usable: int
    """A sequence can start after this many blocks: each is held in the version that the sequence will see."""
    known: int
    """This many blocks are held in at least one version."""


class Match(NamedTuple):
    """What was found for a request."""

    keys: list[BlockKey]
    """Of the blocks that it need not compute if they are cached."""
    tokens: int
    """How many it had."""
    hits: Hits
    takes: Needs
    """Blocks that it takes from the free ones."""


class Matches:
    """The matches of waiting requests that are still true, by the requests' ids."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Match, frozenset[bytes]]] = {}
        """With the digests of its keys."""

    def get(self, request_id: str, tokens: int) -> Match | None:
        """What was found for a request that has so many tokens, if that is still true."""
        match, _ = self._known.get(request_id, (None, None))
        return match if match is not None and match.tokens == tokens else None

    def remember(self, request_id: str, match: Match) -> None:
        """Remember what was found for a request that cannot start."""
        known, _ = self._known.get(request_id, (None, None))
        if known is not match and (known is not None or len(self._known) < _MAX_REMEMBERED):
            self._known[request_id] = (match, frozenset(key.digest for key in match.keys))

    def forget(self, request_id: str) -> None:
        """A request starts or ends."""
        self._known.pop(request_id, None)

    def changed(self, digest: bytes) -> None:
        """A block with these contents comes or goes in any tier and version, or begins or ceases to be used."""
        if self._known:
            for request_id in [each for each, (_, digests) in self._known.items() if digest in digests]:
                del self._known[request_id]
