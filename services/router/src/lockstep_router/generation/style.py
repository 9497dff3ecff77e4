"""The form of an answer, whichever face writes it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class Style:
    """The form of the answer that the client asked for. Not changed after construction; not frozen, for speed."""

    kind: Literal["chat", "text", "responses"]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False
    options: str = ""
    """What a response repeats of its request, as a JSON object: only of the kind `responses`."""
