"""Histories as lines of JSON without their words: written by a load in a pod, read by a comparison elsewhere.

A line has positions, times, counts and fingerprints of the text, so every check of `history` and `comparison` can be
made from it. Times are converted to the wall clock, so that lines of several machines can be compared.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, StreamRequest, position_of

UNDISTURBED, STREAM, STATUS, SUMMARY = "undisturbed", "stream", "status", "summary"
"""The kinds of lines: an undisturbed stream, one of the load, what a router reports of its workers, and the summary."""

_SAME = ("number", "client", "error", "cancelled", "router", "status", "retry_after", "connect_failures")
_WORD = "·"  # replaces words that were not recorded


@dataclass
class Recalled(History):
    """A history parsed from its line."""

    recorded: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    """The marks of each choice, computed from its text before that was dropped."""

    def marks(self, choice: int = 0) -> dict[int, str]:
        """The marks as recorded."""
        return dict(self.recorded.get(choice, {}))


def wall_offset_s() -> float:
    """The difference of the wall clock and this process's monotonic clock."""
    return time.time() - time.monotonic()


def to_line(kind: str, history: History, offset_s: float) -> str:
    """The line of an ended stream; `offset_s` is this process's `wall_offset_s`."""
    assert history.ended_s is not None
    marks = {choice: history.marks(choice) for choice in history.choices}
    entry = {
        "kind": kind,
        "began": round(history.started_s + offset_s, 4),
        "ended": round(history.ended_s + offset_s, 4),
        **{name: getattr(history, name) for name in _SAME},
        "pieces": [_row(piece, history.started_s, marks) for piece in history.pieces],
    }
    return json.dumps(entry, separators=(",", ":"))


def from_entry(entry: Mapping[str, Any]) -> Recalled:
    """The history of a parsed line, its times on the wall clock."""
    history = Recalled(
        # The request is not recorded; that it asked for its usage is all that the checks need to know of it.
        request=StreamRequest("", {"stream_options": {"include_usage": True}}),
        started_s=entry["began"],
        ended_s=entry["ended"],
        **{name: entry[name] for name in _SAME},
    )
    marks: dict[int, dict[int, str]] = {}
    for row in entry["pieces"]:
        piece, mark = _piece(row, entry["began"])
        history.pieces.append(piece)
        position = position_of(piece)
        if piece.choice is not None and position is not None and mark is not None:
            marks.setdefault(piece.choice, {})[position] = mark
    history.recorded = marks
    return history


def _row(piece: Piece, began_s: float, marks: Mapping[int, Mapping[int, str]]) -> list[Any]:
    """A piece as a list, without the absent fields at its end: most pieces are a token of one choice."""
    position = position_of(piece)
    known = piece.choice is not None and position is not None
    row: list[Any] = [
        round((piece.at_s - began_s) * 1e3, 1),
        position,
        piece.choice,
        int(bool(piece.text)),
        marks[piece.choice].get(position) if known else None,  # type: ignore[index, arg-type] # `known` says so
        piece.tokens,
        piece.finish,
        None if piece.usage is None else dict(piece.usage),
        piece.done or None,
    ]
    while row[-1] is None:
        row.pop()
    return row


def _piece(row: list[Any], began_s: float) -> tuple[Piece, str | None]:
    """The piece of a row, and the mark of its choice's text."""
    padded = row + [None] * (9 - len(row))
    after_ms, position, choice, spoken, mark, tokens, finish, usage, done = padded
    piece = Piece(
        at_s=began_s + after_ms / 1e3,
        id=None if position is None else f":{position}",
        choice=choice,
        text=_WORD if spoken else "",
        tokens=tokens,
        finish=finish,
        usage=usage,
        done=bool(done),
    )
    return piece, mark
