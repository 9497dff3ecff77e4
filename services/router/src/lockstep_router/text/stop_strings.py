"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through up to the stop string that is completed first (of two that end together, the longer).

    Text that may be the beginning of a stop string is held back until the next pieces decide. The result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Take the next piece and return the text that is final now; sets `found` if a stop string was completed.

        Args:
            text: the piece.
            counts: whether a stop string may end in this piece. One that may not is text like any other.
        """
        if not self._stops:
            return text
        assert not self.found, "the stream has ended"
        held = self._held
        text = held + text
        at = self._find(text, len(held)) if counts else None
        if at is not None:
            self._held = ""
            self.found = True
            return text[:at]
        self._held = text[len(text) - self._suspicious(text) :]
        return text[: len(text) - len(self._held)]

    def completes(self, text: str) -> bool:
        """Whether the next piece would complete a stop string."""
        return self._find(self._held + text, len(self._held)) is not None

    @property
    def held(self) -> str:
        """The text held back."""
        return self._held

    def flush(self) -> str:
        """The text still held back, for a stream that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, held: int) -> int | None:
        """Where the stop string begins that is completed first; None: there is none. What ends in the first `held`
        characters did not count when they came.
        """
        found = [
            (at + len(stop), at) for stop in self._stops if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        return min(found)[1] if found else None

    def _suspicious(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length] in self._first_chars:
                tail = text[-length:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return length
        return 0


NO_STOP_STRINGS = StopStrings(())
"""It keeps nothing, so all texts without stop strings can share it."""
