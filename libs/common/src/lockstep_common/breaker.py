"""A circuit breaker: after several failures in a row there are no more tries until a probe has succeeded."""


class Breaker:
    """Counts failures in a row.

    Args:
        name: for logs, status and metrics.
        failures_to_open: failures in a row that open it.
    """

    def __init__(self, name: str, failures_to_open: int) -> None:
        self.name = name
        self.is_open = False
        self._failures_to_open = failures_to_open
        self._failures = 0

    def note_success(self) -> None:
        """A call succeeded. This does not close an open breaker: the call may have begun before it opened."""
        self._failures = 0

    def note_failure(self) -> bool:
        """A call failed; whether this has opened the breaker."""
        self._failures += 1
        if self.is_open or self._failures < self._failures_to_open:
            return False
        self.is_open = True
        return True

    def close(self) -> None:
        """A probe succeeded."""
        self.is_open, self._failures = False, 0
