"""Parts of a stream that grow: what has been given of each, and what of a repeat of it is new."""

from dataclasses import dataclass, field
from typing import Any


class DivergedError(Exception):
    """A repeat differs from what has been given."""


@dataclass
class Text:
    """A field whose pieces are joined."""

    given: list[str] = field(default_factory=list)
    repeated: str = ""
    """What was given before the repeat began."""
    position: int = 0

    def take(self, piece: str) -> str:
        """The part of a piece that is new."""
        known = self.repeated[self.position : self.position + len(piece)]
        if not piece.startswith(known):
            raise DivergedError
        self.position += len(known)
        new = piece[len(known) :]
        if new:
            self.given.append(new)
        return new

    def start_over(self) -> None:
        """What comes from now on is a repeat."""
        self.repeated = "".join(self.given)
        self.given = [self.repeated]
        self.position = 0

    @property
    def is_behind(self) -> bool:
        """Whether the repeat has not reached what was given."""
        return self.position < len(self.repeated)


@dataclass
class Entries:
    """A list to which events append."""

    given: list[object] = field(default_factory=list)
    """What identifies each entry."""
    repeated: int = 0
    position: int = 0

    def take(self, entries: list[Any]) -> list[Any]:
        """The entries that are new."""
        known = min(len(entries), self.repeated - self.position)
        keys = [_key(entry) for entry in entries]
        if keys[:known] != self.given[self.position : self.position + known]:
            raise DivergedError
        self.position += known
        self.given += keys[known:]
        return entries[known:]

    def start_over(self) -> None:
        """What comes from now on is a repeat."""
        self.repeated = len(self.given)
        self.position = 0

    @property
    def is_behind(self) -> bool:
        """Whether the repeat has not reached what was given."""
        return self.position < self.repeated


def _key(entry: Any) -> object:
    """What must be equal in an entry of a repeat: the token. Its log probability is computed again."""
    if isinstance(entry, dict):
        return entry.get("token")
    return entry if isinstance(entry, str) else None
