"""The W3C trace context of a request: the headers `traceparent` and `tracestate`.

It checks their form, and writes them for the next service. Baggage is neither read nor passed on: it is data of clients
that no service here needs. It makes no spans.
"""

import re
from dataclasses import dataclass
from typing import Self

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_VERSION_WITHOUT_EXTRAS = "00"
_INVALID_VERSION = "ff"
_MAX_CHARS = 128
_SAMPLED = 1

_STATE_KEY = r"[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
_STATE_MEMBER = re.compile(rf"({_STATE_KEY})=([ -+\--<>-~]{{0,255}}[!-+\--<>-~])")
_MAX_STATE_CHARS = 512
_MAX_STATE_MEMBERS = 32


def parse_traceparent(text: str) -> str:
    """Return the value if it is well formed, else an empty string.

    The form is that of W3C Trace Context level 1, section 3.2: version 00 has four parts, a later version may have
    more, and ids of zeros are invalid. The specification requires that a malformed value is ignored, so it is no error.
    """
    match = _TRACEPARENT.fullmatch(text) if 0 < len(text) <= _MAX_CHARS else None
    if match is None:
        return ""
    version, trace_id, parent_id, _, extras = match.groups()
    if version == _INVALID_VERSION or (version == _VERSION_WITHOUT_EXTRAS and extras is not None):
        return ""
    return text if trace_id.strip("0") and parent_id.strip("0") else ""


def parse_tracestate(text: str) -> str:
    """Return the value if it is well formed and of at most 512 characters, else an empty string (section 3.3)."""
    if not text or len(text) > _MAX_STATE_CHARS:
        return ""
    members = [member for each in text.split(",") if (member := each.strip(" \t"))]
    matches = [_STATE_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    if len(members) > _MAX_STATE_MEMBERS or len(keys) < len(members):
        return ""  # a member is malformed, or two have the same key
    return ",".join(members)


def trace_fields(traceparent: str) -> dict[str, str]:
    """What a log line says of a well-formed `traceparent`; nothing if it is empty."""
    if not traceparent:
        return {}
    _, trace_id, span_id, *_ = traceparent.split("-")
    return {"trace_id": trace_id, "span_id": span_id}


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as other services refer to it."""

    trace_id: int
    span_id: int
    is_sampled: bool
    """Whether the service of the span keeps the trace."""
    state: str = ""
    """`tracestate`, which belongs to other vendors' systems."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """The context in these headers; None without a well-formed `traceparent`."""
        if not traceparent or not parse_traceparent(traceparent):
            return None
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        is_sampled = bool(int(flags, 16) & _SAMPLED)
        return cls(int(trace_id, 16), int(span_id, 16), is_sampled, parse_tracestate(tracestate))

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.is_sampled else '00'}"
