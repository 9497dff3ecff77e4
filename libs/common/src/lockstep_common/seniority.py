"""The order in which streams wait. Workers queue by it, preempt by it from its end, and routers retry by it.

A class is a head start: a stream of a higher class goes before those of a lower one that arrived up to
`CLASS_HEAD_START_S` earlier, and after older ones. So a higher class goes first in a burst, and none waits for ever.
A stream's place does not change while it waits: what counts is when it arrived, and not how long that is ago.
"""

CLASS_HEAD_START_S = 60.0
"""Seconds that each class goes before the one below it. Two of them are well below the longest wait, 300 s."""

OUTPUT_HEAD_START_S = 30.0
"""Seconds that a stream goes before others of its class when it has output: its client is reading. It is less than a
class."""


def turn_at(arrived_at: float, priority: int, *, has_output: bool) -> float:
    """When a stream counts as arrived: the stream for which this is least goes first.

    Args:
        arrived_at: when it first arrived, in seconds on any clock, the same for all streams.
        priority: of its class (see `protocol.PRIORITIES`).
        has_output: whether it has had output, also elsewhere.
    """
    return arrived_at - priority * CLASS_HEAD_START_S - has_output * OUTPUT_HEAD_START_S
