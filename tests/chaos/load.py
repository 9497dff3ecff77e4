"""The requests of a chaos run and their undisturbed texts, and the count of what went wrong with the disturbed ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep_tools.endpoint import Endpoint
from lockstep_tools.history import History, StreamRequest, violations
from lockstep_tools.loadgen import Traffic, drive
from system import MODEL

CLIENTS = 8

_OPENINGS = (
    "It was a dark night, and",
    "Call me",
    "The captain of the ship stood",
    "My dear Watson, said he,",
    "She looked at the letter and",
    "To be, or not to be,",
)


def requests() -> list[StreamRequest]:
    """Greedy and seeded, chat and plain, one choice and two, short and long; one ends at a stop string."""
    made = []
    for number in range(14):
        # One in seven needs three steps for its prompt alone.
        sentences = 200 if number % 7 == 5 else 1 + 4 * (number % 3)
        text = " ".join([_OPENINGS[(number + n) % len(_OPENINGS)] for n in range(sentences)])
        body = {
            "model": MODEL,
            "max_tokens": (40, 100, 200)[number % 3],
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + number}
        if number % 5 == 4:
            body |= {"n": 2}
        if number % 7 == 6:
            body |= {"stop": [". "]}
        if number % 4 == 3:
            made.append(
                StreamRequest(
                    "/chat/completions", body | {"messages": [{"role": "user", "content": text}], "logprobs": True}
                )
            )
        else:
            made.append(StreamRequest("/completions", body | {"prompt": text, "logprobs": 0}))
    return made


@dataclass(frozen=True)
class Undisturbed:
    """A request and what it gives in peace."""

    request: StreamRequest
    texts: Sequence[str]
    """One a choice."""
    tokens: int


async def in_peace(endpoint: Endpoint) -> list[Undisturbed]:
    """Each request alone on an idle system."""
    made = []
    for history in await drive(endpoint, requests(), clients=1):
        problems = violations(history, require_ids=True)
        assert problems == [], (history.request, problems)
        made.append(Undisturbed(history.request, texts(history), history.tokens))
    return made


def texts(history: History) -> list[str]:
    """The text of each choice."""
    return [history.text(choice) for choice in history.choices]


@dataclass
class Verdict:
    """What clients saw, over all streams of a run."""

    requests: int = 0
    failed: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    """In words, of each stream that was not as in peace."""


def judge(histories: Iterable[History], calm: Sequence[Undisturbed]) -> Verdict:
    """Hold every stream against the protocol's promises and against the same stream in peace."""
    verdict = Verdict()
    for history in histories:
        expected = calm[history.number % len(calm)]
        verdict.requests += 1
        verdict.failed += history.error is not None
        verdict.lost_tokens += max(0, expected.tokens - history.tokens)
        verdict.doubled_tokens += max(0, history.tokens - expected.tokens)
        found = violations(history, require_ids=True)
        if texts(history) != list(expected.texts):
            found.append(f"the text is not that of the undisturbed stream: {texts(history)}, not {expected.texts}")
        verdict.problems += [f"stream {history.number}: {problem}" for problem in found]
    return verdict


def traffic(endpoint: Endpoint, calm: Sequence[Undisturbed]) -> Traffic:
    """All clients at once, each with a session of its own."""

    def make(number: int) -> StreamRequest:
        request = calm[number % len(calm)].request
        return StreamRequest(request.path, request.body, {"X-Session-ID": f"session {number}"})

    return Traffic(endpoint, make, clients=CLIENTS)
