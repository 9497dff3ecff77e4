"""Checks histories: a pure function from what clients saw to what is wrong with it.

A stream's tokens are a prefix of the expected ones: none is lost, doubled, moved or changed. It ends exactly once, in
time, with all its tokens or with a typed error that its situation allows, and nothing follows the end.
"""

from dataclasses import dataclass
from itertools import pairwise

from lockstep_common.errors import ErrorCode

from simulated.history import TERMINAL, History, Kind
from simulated.model import ids_of

TYPED = frozenset(map(str, ErrorCode))
CLIENT_CODES = frozenset({"connection_failed", "stream_lost", "stream_diverged", "protocol_error"})
"""Errors that clients find themselves."""
NEVER = frozenset(
    {
        ErrorCode.INTERNAL,
        ErrorCode.CANCELLED,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_API_KEY,
        ErrorCode.ORIGIN_NOT_ALLOWED,
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.NOT_FOUND,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.PAYLOAD_TOO_LARGE,
        ErrorCode.RESOURCE_EXHAUSTED,
        ErrorCode.DRAINING,
        ErrorCode.STREAM_NOT_FOUND,
        ErrorCode.STREAM_MOVED,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
    }
)
"""Errors that no fault of the workers explains: every request is valid. What happened to a client explains some:
its router drained, its stream was cancelled, or it came back too late.
"""
KINDS = frozenset(
    {
        # In histories.
        "no end",
        "several ends",
        "text after the end",
        "broken text",
        "wrong tokens",
        "wrong count",
        "wrong usage",
        "early end",
        "untyped error",
        "unexplained error",
        "silence",
        "late",
        "time runs back",
        # Between routers and their clients.
        "broken off",
        "cut by the drain",
        "lost",
        "kept too long",
        "generated twice",
        # Inside of routers and workers; there are wrong tokens, too.
        "unknown stream",
        "begins again",
        "seniority",
        "lower epoch",
        "runs on",
        "leak",
        "exception",
    }
)
"""All kinds of violations."""


@dataclass(frozen=True)
class Violation:
    """One thing that must not happen."""

    kind: str
    """One of `KINDS`."""
    subject: str
    """The stream, router or worker."""
    detail: str
    at: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is missing in KINDS")

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject} at {self.at:.3f}: {self.detail}"


@dataclass(frozen=True)
class Rules:
    """What holds in one simulation."""

    longest_silence_s: float
    """Between two events of a stream, from its arrival on; the client's own pauses come on top."""
    deadline_slack_s: float
    """A request with a timeout ends at most so long after it."""
    allowed_errors: frozenset[ErrorCode]
    """Errors that the faults explain. The error of a timeout, and the quarantine of a request that kills workers, are
    always explained. So is that of one whose workers faults hit as often as quarantine takes: see `explained`."""


def check(histories: list[History], rules: Rules) -> list[Violation]:
    """Everything that is wrong."""
    return [violation for history in histories for violation in check_stream(history, rules)]


def check_stream(history: History, rules: Rules) -> list[Violation]:
    return [
        *_check_ends(history),
        *_check_tokens(history),
        *_check_error(history, rules),
        *_check_times(history, rules),
    ]


def _check_ends(history: History) -> list[Violation]:
    ends = [event for event in history.events if event.kind in TERMINAL]
    if not ends:
        return [Violation("no end", history.name, f"{len(history.events)} events", history.progress_at)]
    found = []
    if len(ends) > 1:
        kinds = ", ".join(f"{end.kind} {end.value}" for end in ends)
        found.append(Violation("several ends", history.name, kinds, ends[1].at))
    after = history.events[history.events.index(ends[0]) + 1 :]
    if any(event.kind is Kind.TEXT for event in after):
        found.append(Violation("text after the end", history.name, after[0].value, after[0].at))
    return found


def _check_tokens(history: History) -> list[Violation]:
    expected, got = history.expected.ids, []
    for event in history.events:
        if event.kind is not Kind.TEXT:
            continue
        try:
            got.extend(ids_of(event.value))
        except ValueError as error:
            return [Violation("broken text", history.name, str(error), event.at)]
        if tuple(got) != expected[: len(got)]:
            return [Violation("wrong tokens", history.name, _describe(got, expected), event.at)]
        # A client with stop strings gets no text of a token that completes one, though it counts.
        is_whole = len(got) == len(expected)
        if not history.has_stops and event.tokens not in (len(got), history.expected.counted if is_whole else len(got)):
            detail = f"{event.tokens} counted, {len(got)} delivered"
            return [Violation("wrong count", history.name, detail, event.at)]
    finish = next((event for event in history.events if event.kind is Kind.FINISH), None)
    if finish is not None and (tuple(got), finish.value) != (expected, history.expected.finish):
        wanted = f"{len(expected)} tokens and {history.expected.finish}"
        return [Violation("early end", history.name, f"{len(got)} tokens and {finish.value} for {wanted}", finish.at)]
    if not history.has_stops and history.usage not in (None, history.expected.counted):
        detail = f"{history.usage} counted of {history.expected.counted}"
        return [Violation("wrong usage", history.name, detail, history.progress_at)]
    return []


def _describe(got: list[int], expected: tuple[int, ...]) -> str:
    at = next(index for index, token in enumerate(got) if expected[index : index + 1] != (token,))
    token = got[at]
    what = "changed"
    if token in expected[:at]:
        what = "doubled or moved back"
    elif token in expected[at + 1 :]:
        what = "reordered" if expected[at] in got[at + 1 :] else "lost"
    return f"{what} at position {at}: {token} in place of {expected[at] if at < len(expected) else 'the end'}"


def _check_error(history: History, rules: Rules) -> list[Violation]:
    found = []
    for event in history.events:
        if event.kind is not Kind.ERROR or event.value in history.explained:
            continue
        if event.value in CLIENT_CODES:
            found.append(Violation("unexplained error", history.name, event.value, event.at))
            continue
        if event.value not in TYPED:
            found.append(Violation("untyped error", history.name, event.value, event.at))
            continue
        code = ErrorCode(event.value)
        if code is ErrorCode.DEADLINE_EXCEEDED and history.timeout_s is not None:
            is_allowed = event.at >= history.arrived_at + history.timeout_s - rules.deadline_slack_s
        elif code is ErrorCode.REQUEST_QUARANTINED:
            is_allowed = history.is_poison
        else:
            is_allowed = code in rules.allowed_errors and code not in NEVER
        if not is_allowed:
            found.append(Violation("unexplained error", history.name, code, event.at))
    return found


def _check_times(history: History, rules: Rules) -> list[Violation]:
    found = []
    times = [history.arrived_at, *(event.at for event in history.events)]
    longest_s, at = max(((later - earlier, later) for earlier, later in pairwise(times)), default=(0.0, 0.0))
    if times != sorted(times):
        found.append(Violation("time runs back", history.name, "", times[0]))
    allowed_s = rules.longest_silence_s + history.patience_s
    if longest_s - history.paused_s > allowed_s:
        limit = f"{allowed_s:.1f} s are allowed"
        found.append(Violation("silence", history.name, f"{longest_s:.2f} s, {limit}", at))
    ended_at = history.ended_at
    if history.timeout_s is not None and ended_at is not None:
        late_s = ended_at - history.arrived_at - history.timeout_s - history.paused_s - history.tardy_s
        if late_s > rules.deadline_slack_s:
            found.append(Violation("late", history.name, f"{late_s:.2f} s after its timeout", ended_at))
    return found
