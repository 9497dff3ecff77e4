"""Limits the number of elements in a JSON body before it is parsed.

Parsing makes objects of some hundred bytes for each value, so a body within its size limit could still take seconds and
hundreds of megabytes. Counting punctuation outside of strings takes milliseconds. It never decides whether the body is
valid: the parser does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep_common.errors import ErrorCode, LockstepError

MAX_DEPTH = 64
"""Deepest nesting of objects and arrays. JSON schemas nest two levels for each level of what they describe."""
MAX_CONTAINERS = 16 << 10
"""Largest number of objects and arrays. A conversation of 4,096 messages with one content part has about 12,300."""
MAX_PAIRS = 20_000
"""Largest number of fields of objects. The same conversation has about 16,400."""
MAX_STRINGS = 64 << 10
"""Largest number of field names and texts. The same conversation has about 32,800."""

_NOT_PUNCTUATION = bytes(byte for byte in range(256) if byte not in b"[]{},:")
_NOT_BRACKETS = b",:"


@dataclass(frozen=True)
class Structure:
    """Counts of a body's JSON elements."""

    values: int
    """Upper bound of the elements of arrays and the values of fields."""
    pairs: int
    containers: int
    depth: int


def check_structure(body: bytes | bytearray, max_values: int) -> None:
    """Raise INVALID_REQUEST for a body with too many elements.

    Args:
        body: the body; one that is not valid JSON may pass.
        max_values: limit for elements and fields together. Only token ids can be this many.
    """
    _check([_without_escapes(body)], max_values, "the body has")


def check_texts(texts: Iterable[str], max_values: int, who: str = "the arguments of all tool calls have") -> None:
    """Raise INVALID_REQUEST if texts that may be JSON have more elements together than a body may have.

    `who` begins the sentence that says so.
    """
    plain = [_without_escapes(text.encode("utf-8", "surrogatepass")) for text in texts]
    _check(plain, max_values, who)


def _check(plain: list[bytes], max_values: int, who: str) -> None:
    if sum(each.count(b'"') for each in plain) > 2 * MAX_STRINGS:  # splitting at quotation marks takes the most time
        raise too_many(who, "strings", MAX_STRINGS)
    found = [_measure(each) for each in plain]
    for name, count, limit in (
        ("values", sum(each.values for each in found), max_values),
        ("fields", sum(each.pairs for each in found), MAX_PAIRS),
        ("objects and arrays", sum(each.containers for each in found), MAX_CONTAINERS),
        ("levels", max((each.depth for each in found), default=0), MAX_DEPTH),
    ):
        if count > limit:
            raise too_many(who, name, limit)


def _without_escapes(body: bytes | bytearray) -> bytes:
    """The body with only those quotation marks that begin and end strings."""
    plain = bytes(body)
    if b"\\" not in plain:
        return plain
    # Valid JSON has backslashes in strings only. In a run of them each pair is one escaped backslash, and a single one
    # left before a quotation mark escapes that mark.
    return plain.replace(b"\\\\", b"").replace(b'\\"', b"")


def _measure(plain: bytes) -> Structure:
    """Count the punctuation outside of strings. Exact for valid JSON."""
    punctuation = b"".join(plain.split(b'"')[::2]).translate(None, _NOT_PUNCTUATION)
    containers = punctuation.count(b"[") + punctuation.count(b"{")
    return Structure(
        values=punctuation.count(b",") + containers,
        pairs=punctuation.count(b":"),
        containers=containers,
        depth=_depth(punctuation.translate(None, _NOT_BRACKETS)) if containers <= MAX_CONTAINERS else 0,
    )


def _depth(brackets: bytes) -> int:
    deepest = depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def too_many(who: str, name: str, limit: int) -> LockstepError:
    """The error for more elements of a name than the limit. `who` begins the sentence: `the body has`."""
    return LockstepError(ErrorCode.INVALID_REQUEST, f"{who} more than {limit} {name}")
