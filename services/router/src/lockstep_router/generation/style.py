"""The form of an answer, whichever face writes it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Style:
    """The form of the answer that the client asked for."""

    kind: Literal["chat", "text"]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False
