"""How unevenly the requests of a model are spread over its workers."""

from collections.abc import Sequence


def imbalance(requests: Sequence[int]) -> float:
    """The most requests on one worker over the average; 1.0 if the workers have fewer than one each.

    With fewer than one each no choice could spread them evenly.

    Args:
        requests: running and queued requests of each worker.
    """
    total = sum(requests)
    return max(requests) * len(requests) / total if total and total >= len(requests) else 1.0
