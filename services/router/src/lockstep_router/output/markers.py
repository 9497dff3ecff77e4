"""Finds markers in text that arrives in pieces."""

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first marker in a text begins, and which one it is; empty markers are never found."""
    found = [(at, marker) for marker in markers if marker and (at := text.find(marker)) >= 0]
    return min(found, default=None)


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of a text that may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
