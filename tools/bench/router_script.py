"""The tokens that both backends of `router.py` say: the worker of Lockstep and the OpenAI server of other routers."""

FIRST = 300
COUNT = 3000
ENCODING = range(FIRST, FIRST + COUNT)
"""The ids that occur, of the reference model's vocabulary. Most are a few letters."""


def token(stream: int, position: int) -> int:
    """The token of a stream at a position."""
    return FIRST + (stream * 31 + position * 7919) % COUNT
