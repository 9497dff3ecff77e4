"""Finds hotspots: workers with a queue while another worker of the same model could start requests at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Worker = TypeVar("Worker")

_AFTER_S = 5.0
"""A queue that is gone sooner is a burst."""


@dataclass(frozen=True)
class Load:
    """What a worker reports of its load."""

    queued: int
    free_seqs: int
    """Requests that it could start now."""

    @property
    def has_room(self) -> bool:
        """Whether it could start a request at once."""
        return not self.queued and self.free_seqs > 0


class Hotspots(Generic[Worker]):
    """The hotspots among the workers of one model."""

    def __init__(self) -> None:
        self._since: dict[Worker, float] = {}
        """When each worker began to have a queue while another one had room."""

    def find(self, loads: Mapping[Worker, Load], now: float) -> set[Worker]:
        """The workers that have been hot for 5 s or longer.

        Args:
            loads: of the ready workers.
            now: the time, in seconds.
        """
        has_room = any(load.has_room for load in loads.values())
        hot = {worker for worker, load in loads.items() if load.queued and has_room}
        self._since = {worker: self._since.get(worker, now) for worker in hot}
        return {worker for worker, since in self._since.items() if now - since >= _AFTER_S}
