"""A log line as a record, the choice of records, and their form for people. Nothing in a line is trusted."""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from lockstep_tools.escaping import harmless

LEVELS = ("debug", "info", "warning", "error", "critical")

MAX_LINE_CHARS = 64 << 10
"""The rest of a longer line is dropped."""
_SHOWN_FIRST = ("time", "level", "service", "pod", "message", "exception", "stack", "stderr")
_TEXTS = ("exception", "stack", "stderr")
"""Fields of several lines; they are shown below the record."""
_BEFORE_REQUEST = re.compile(r"(?:chatcmpl-|cmpl-|resp_)(?=.)")
"""What an answer's own id begins with, before the id of its request."""
_LAST_NUMBERS = (re.compile(r"-[0-9]+$"), re.compile(r"-[0-9]+-[0-9]+$"))
"""What the ids of a request's streams end with: the number of the prompt, and of the choice where there are some."""


@dataclass(frozen=True)
class Line:
    """One line of a source."""

    source: str
    """The file or the pod."""
    text: str
    fields: dict[str, Any]
    """Empty if it is not JSON: what a library or another program has printed."""

    @property
    def time(self) -> str:
        """As in the line, in UTC with milliseconds; empty: unknown."""
        return str(self.fields.get("time", ""))


def parse(source: str, text: str) -> Line:
    """The line's fields, if it is a line of a service."""
    text = text[:MAX_LINE_CHARS].rstrip("\r\n")
    try:
        fields = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        fields = {}
    return Line(source, text, fields if isinstance(fields, dict) and "message" in fields else {})


@dataclass(frozen=True)
class Choice:
    """Which lines are wanted; None: all."""

    request: str | None = None
    """The id of a request, of its answer, of the streams of it, or of its trace."""
    rank: int | None = None
    level: str | None = None
    """The least level."""
    service: str | None = None
    """`router`, `worker`, `worker w0` or `state`."""
    since: str = ""
    """As `Line.time`; empty: no limit."""
    until: str = ""

    def wants(self, line: Line) -> bool:
        """Whether a line is wanted. A line that is not JSON is wanted only if nothing is restricted."""
        fields = line.fields
        if not fields:
            return self == Choice()
        return (
            (self.request is None or _is_of(fields, self.request))
            and (self.rank is None or fields.get("rank") == self.rank)
            and (self.level is None or _severity(fields.get("level")) >= LEVELS.index(self.level))
            and (self.service is None or _is_part(self.service, str(fields.get("service", ""))))
            and (not self.since or line.time >= self.since)
            and (not self.until or line.time < self.until)
        )


def request_of(id_: str) -> str:
    """The id of a request, of its own or of its answer's id."""
    return _BEFORE_REQUEST.sub("", id_, count=1) if _BEFORE_REQUEST.match(id_) else id_


def _is_of(fields: dict[str, Any], asked: str) -> bool:
    """Whether a line is about what is asked for. Clients choose the ids of requests, so these are compared as a whole:
    a part of one may be the id of another.
    """
    ids = (asked, request_of(asked))
    trace = str(fields.get("trace", "")).split("-")[1:2]  # as in a header `traceparent`
    return (
        fields.get("request_id") in ids
        or fields.get("trace_id") == asked
        or trace == [asked]
        or _is_stream_of(fields.get("stream"), ids)
    )


def _is_stream_of(stream: object, ids: tuple[str, str]) -> bool:
    if not isinstance(stream, str):
        return False
    return stream in ids or any(numbers.sub("", stream) in ids for numbers in _LAST_NUMBERS)


def _is_part(wanted: str, service: str) -> bool:
    return service == wanted or service.startswith(f"{wanted} ")


def _severity(level: object) -> int:
    return LEVELS.index(level) if level in LEVELS else 0


def moment(text: str, now: datetime) -> str:
    """A time as lines have it, of an ISO time or of an age such as 90s, 15m, 2h.

    Raises:
        ValueError: it is neither.
    """
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if text and text[-1] in units and text[:-1].isdecimal():
        age_s = int(text[:-1]) * units[text[-1]]
        then = now - timedelta(seconds=min(age_s, int(now.timestamp())))  # no line is older than 1970
    else:
        then = datetime.fromisoformat(text)
        try:
            then = then.replace(tzinfo=UTC) if then.tzinfo is None else then.astimezone(UTC)
        except OverflowError:
            raise ValueError(f"before the year 1 or after the year 9999: {text}") from None
    return then.strftime("%Y-%m-%dT%H:%M:%S.") + f"{then.microsecond // 1000:03d}Z"


def readable(line: Line) -> str:
    """The line for people; texts of several lines are indented below it."""
    fields = line.fields
    if not fields:
        return f"{harmless(line.source)}: {harmless(line.text)}"
    place = str(fields.get("pod") or fields.get("service") or line.source)
    head = (
        f"{harmless(line.time):24} {harmless(str(fields.get('level', '?'))):7} "
        f"{harmless(place)}: {harmless(str(fields['message']))}"
    )
    others = "".join(f" {harmless(key)}={_value(value)}" for key, value in fields.items() if key not in _SHOWN_FIRST)
    below = [harmless(each) for name in _TEXTS for each in str(fields.get(name) or "").splitlines()]
    return "\n    ".join([head + others, *below])


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return harmless(f'"{text}"' if " " in text and isinstance(value, str) else text)
