"""A tenant: a name that separates prefix caches, and limits that its requests share, whichever key they use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """One entry of the file of keys, without its keys. A limit that is None does not hold."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and of answers together."""
    concurrent_streams: int | None = None
    """Answers in progress: one for each choice of each prompt."""
    priority: int = 0
    """Class of its streams: of -1, 0 and 1, higher ones run first."""
