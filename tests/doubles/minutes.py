"""The minutes of the clock, in which limits of tenants count."""

import time

_MINUTE_S = 60.0


def until_room_s(needed_s: float = 5.0) -> float:
    """Seconds to wait so that this minute does not end within `needed_s`: requests right before and after its end may
    be one more than the limit, because what the old minute counts is rounded down.
    """
    left_s = _MINUTE_S - time.time() % _MINUTE_S
    return 0.0 if left_s > needed_s else left_s + 0.1
