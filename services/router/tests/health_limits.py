"""Settings of the health detectors, as tests change them."""

from dataclasses import dataclass


@dataclass
class Limits:
    heartbeat_timeout_s: float = 1.5
    suspicion_phi: float = 8.0
    eject_after: int = 3
    eject_share: float = 0.5
    eject_initial_s: float = 10.0
    eject_max_s: float = 300.0
    slow_factor: float = 3.0
    queue_threshold: int = 2
