"""What one client saw of one stream, and what is wrong with it.

The checks use nothing internal to Lockstep: they compare what arrived with what the protocol guarantees. So they can be
used on any server, and a test shows that each of them can fail.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lockstep_tools.load.endpoint import Piece


@dataclass(frozen=True)
class StreamRequest:
    """A streaming request to send."""

    path: str
    """/completions or /chat/completions."""
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class History:
    """One stream, as its client saw it. Times are on the monotonic clock."""

    request: StreamRequest
    number: int = 0
    """The request's number in its run."""
    client: int = 0
    started_s: float = 0.0
    ended_s: float | None = None
    """When it ended; None while it runs."""
    pieces: list[Piece] = field(default_factory=list)
    error: str | None = None
    cancelled: bool = False
    """The client broke it off; what it received until then must be correct."""
    router: str | None = None
    """The router that served it, by the answer's header; None before the answer, or without that header."""
    status: int | None = None
    """HTTP status of the answer; None when there was none."""
    retry_after: str | None = None
    """The header `Retry-After` of a refusal."""
    connect_failures: int = 0
    """Connections that could not be made before the request was sent, whether retried or not."""

    @property
    def spoken(self) -> list[Piece]:
        """The pieces that carry text."""
        return [piece for piece in self.pieces if piece.text]

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """The usage reported last."""
        return next((piece.usage for piece in reversed(self.pieces) if piece.usage is not None), None)

    @property
    def choices(self) -> list[int]:
        """The choices that appeared in any event."""
        return sorted({piece.choice for piece in self.pieces if piece.choice is not None})

    @property
    def tokens(self) -> int:
        """Completion tokens delivered: by the SSE ids, else the usage, else one for each piece of text."""
        positions = [self.position(choice) for choice in self.choices]
        if positions and None not in positions:
            return sum(position or 0 for position in positions)
        reported = (self.usage or {}).get("completion_tokens")
        return reported if isinstance(reported, int) else len(self.spoken)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first text."""
        return self.spoken[0].at_s - self.started_s if self.spoken else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [after.at_s - before.at_s for before, after in pairwise(self.spoken)]

    def text(self, choice: int = 0) -> str:
        """All text of a choice."""
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def position(self, choice: int = 0) -> int | None:
        """Tokens of a choice delivered so far, by the SSE ids; None when there are no such ids."""
        known = [position_of(piece) for piece in self.pieces if piece.choice == choice]
        return next((position for position in reversed(known) if position is not None), None)

    def marks(self, choice: int = 0) -> dict[int, str]:
        """A fingerprint of a choice's text up to each position, from which the words cannot be recovered.

        The text after n tokens is a function of these tokens, so streams of the same tokens have the same marks,
        however the tokens were divided into pieces.
        """
        running = hashlib.blake2b(digest_size=6)
        found = {}
        for piece in self.pieces:
            if piece.choice == choice:
                running.update(piece.text.encode())
                position = position_of(piece)
                if position is not None:
                    found[position] = running.hexdigest()
        return found

    def longest_gap_s(self, since_s: float = float("-inf"), until_s: float = float("inf")) -> float:
        """The longest silence between two pieces of text that ended after `since_s` and began before `until_s`."""
        return max(
            (
                after.at_s - before.at_s
                for before, after in pairwise(self.spoken)
                if after.at_s > since_s and before.at_s < until_s
            ),
            default=0.0,
        )


def position_of(piece: Piece) -> int | None:
    """The tokens of the choice delivered so far, by the SSE id: `<request id>:<n>`, or of a resumable stream
    `<request id>:<n>,<n>f`, a number for each choice, with `f` when it has its finish.
    """
    if piece.id is None:
        return None
    numbers = piece.id.rpartition(":")[2].split(",")
    at = (piece.choice or 0) if len(numbers) > 1 else 0
    number = numbers[at].removesuffix("f") if at < len(numbers) else ""
    return int(number) if number.isdecimal() else None


def violations(history: History, *, reference: str | None = None, require_ids: bool = False) -> list[str]:
    """Everything wrong with a finished stream; empty when nothing is.

    Args:
        history: the history of a stream that has ended.
        reference: the text that the first choice must have; a cancelled stream's must be the beginning of it.
        require_ids: a piece of text without an SSE id is wrong too (Lockstep's router sends them to clients that ask).
    """
    if history.error is not None:
        return [f"failed: {history.error}"]
    found = order_violations(history, require_ids=require_ids)
    if not history.cancelled:
        found += [problem for choice in history.choices for problem in _end(history, choice)]
        found += _terminal(history) + _usage(history)
    if reference is not None:
        found += _text(history, reference)
    return found


def order_violations(history: History, *, require_ids: bool = False) -> list[str]:
    """The part of `violations` that holds for any beginning of a stream, however it ended."""
    return [problem for choice in history.choices for problem in _order(history, choice, require_ids)]


def _order(history: History, choice: int, require_ids: bool) -> list[str]:
    """Positions grow with every piece of text, and no more tokens are shown than they count."""
    found = []
    last = shown = 0
    for piece in history.pieces:
        if piece.choice != choice:
            continue
        shown += piece.tokens or 0
        position = position_of(piece)
        if position is None:
            if piece.text and require_ids:
                found.append(f"choice {choice}: text without a position after token {last}")
            continue
        if position < last or (piece.text and position == last):
            found.append(f"choice {choice}: position {position} came after {last}")
        if shown > position:
            found.append(f"choice {choice}: {shown} tokens were shown at position {position}")
        last = max(last, position)
    return found


def _end(history: History, choice: int) -> list[str]:
    """A choice has one finish reason, and no text after it."""
    pieces = [piece for piece in history.pieces if piece.choice == choice]
    ends = [number for number, piece in enumerate(pieces) if piece.finish is not None]
    if len(ends) != 1:
        return [f"choice {choice}: {len(ends)} finish reasons"]
    if any(piece.text for piece in pieces[ends[0] + 1 :]):
        return [f"choice {choice}: text after the finish reason"]
    counted = [piece.tokens for piece in pieces if piece.tokens is not None]
    position = history.position(choice)
    # A stop string is cut out of the text, and its tokens are not shown.
    if pieces[ends[0]].finish == "length" and counted and position is not None and sum(counted) != position:
        return [f"choice {choice}: {sum(counted)} tokens were shown, {position} counted"]
    return []


def _terminal(history: History) -> list[str]:
    """The stream has one end mark, and it is the last event."""
    marks = sum(piece.done for piece in history.pieces)
    if marks != 1:
        return [f"{marks} end marks"]
    return [] if history.pieces[-1].done else ["events after the end mark"]


def _usage(history: History) -> list[str]:
    """The usage is reported when asked for, and counts the tokens delivered."""
    usage = history.usage
    if usage is None:
        asked = (history.request.body.get("stream_options") or {}).get("include_usage")
        return ["no usage, though it was asked for"] if asked else []
    positions = [history.position(choice) for choice in history.choices]
    if not positions or None in positions:
        return []
    delivered = sum(position or 0 for position in positions)
    reported = usage.get("completion_tokens")
    return [] if reported == delivered else [f"usage says {reported} tokens, {delivered} were delivered"]


def _text(history: History, reference: str) -> list[str]:
    text = history.text()
    if text == reference or (history.cancelled and reference.startswith(text)):
        return []
    same = next((n for n, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b), None)
    at = min(len(text), len(reference)) if same is None else same
    given, wanted = text[at : at + 20], reference[at : at + 20]
    return [f"the text differs from the reference at character {at}: {given!r}, not {wanted!r}"]
