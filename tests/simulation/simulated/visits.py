"""What clients of resumable streams do: as data, drawn from the seed."""

from dataclasses import dataclass
from random import Random

KINDS = ("library", "returns", "forgets", "pair", "joins", "cancels")


@dataclass(frozen=True)
class Visit:
    """The way of one client with its resumable stream.

    `library` uses `lockstep_client`, which continues on any router; the others speak HTTP to one router. `returns`
    leaves and comes back; `forgets` leaves for ever; `pair` has a second reader; `joins` sends its request again with
    the same idempotency key; `cancels` ends the stream from outside.
    """

    kind: str
    leaves_after: tuple[int, ...] = ()
    """Tokens of the first choice after which it leaves, each time."""
    away: tuple[float, ...] = ()
    """How long it is away, each time, in windows of resumption."""
    later_s: float = 0.0
    """When the second reader, the second request or the cancel comes, after the first request."""
    by_key: bool = False
    """The cancel names the idempotency key."""


def choose_visit(rng: Random, max_tokens: int) -> Visit:
    """A client."""
    kind = rng.choice(("library", "library", "returns", "returns", "forgets", "pair", "joins", "cancels"))
    times = rng.randint(1, 3) if kind == "returns" else int(kind == "forgets")
    leaves = tuple(sorted(rng.randrange(max_tokens) for _ in range(times)))
    away = tuple(
        rng.choice((rng.uniform(0.0, 0.2), rng.uniform(0.2, 0.9), rng.uniform(0.9, 2.5), rng.uniform(2.5, 4.0)))
        for _ in range(times)
    )
    later_s = rng.choice((rng.uniform(0.0, 0.1), rng.uniform(0.0, 2.0), rng.uniform(0.0, 8.0)))
    return Visit(kind, leaves, away, later_s, by_key=rng.random() < 0.5)
