"""The requests of fault experiments: one of each kind that can fail in a particular way.

Each has one answer, because it is greedy or seeded, so a stream under a fault can be compared with the same
stream undisturbed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep_tools.load.history import StreamRequest

_OPENINGS = (
    "It was a dark night, and",
    "Call me",
    "The captain of the ship stood",
    "My dear Watson, said he,",
    "She looked at the letter and",
    "To be, or not to be,",
)


def mixed_requests(model: str) -> list[StreamRequest]:
    """Greedy and seeded, chat and plain, one choice and two, short and long; one ends at a stop string."""
    return [_request(model, number) for number in range(14)]


def with_sessions(requests: Sequence[StreamRequest]) -> Callable[[int], StreamRequest]:
    """Makes the n-th request of a run: repeats the given ones, each time in a new session."""

    def make(number: int) -> StreamRequest:
        request = requests[number % len(requests)]
        return StreamRequest(request.path, request.body, {"X-Session-ID": f"session {number}"})

    return make


def _request(model: str, number: int) -> StreamRequest:
    # One in seven needs several steps for its prompt alone.
    sentences = 200 if number % 7 == 5 else 1 + 4 * (number % 3)
    text = " ".join([_OPENINGS[(number + n) % len(_OPENINGS)] for n in range(sentences)])
    body: dict[str, Any] = {
        "model": model,
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
        message = {"role": "user", "content": text}
        return StreamRequest("/chat/completions", body | {"messages": [message], "logprobs": True})
    return StreamRequest("/completions", body | {"prompt": text, "logprobs": 0})
