"""The settings of the health detectors, as an interface."""

from typing import Protocol


class HealthLimits(Protocol):
    """The settings that the detectors use; `RouterSettings` has them. Times are in seconds."""

    @property
    def heartbeat_timeout_s(self) -> float:
        """Silence after which a worker loses its streams."""

    @property
    def suspicion_phi(self) -> float:
        """Level of suspicion from which on new streams avoid a worker; 0: never."""

    @property
    def eject_after(self) -> int:
        """Faults in a row after which a worker is ejected; 0: never."""

    @property
    def eject_share(self) -> float:
        """Largest share of a model's workers that is ejected at a time."""

    @property
    def eject_initial_s(self) -> float:
        """Length of the first ejection."""

    @property
    def eject_max_s(self) -> float:
        """Length of the longest ejection."""

    @property
    def slow_factor(self) -> float:
        """Multiple of the other workers' times from which on a worker is slow; 0: never."""

    @property
    def queue_threshold(self) -> int:
        """Queued requests above which a worker has no room."""
