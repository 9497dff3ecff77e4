"""A router with scripted workers, and a client of each of its faces."""

from collections.abc import Awaitable, Callable

import httpx
from faces import Face
from router_cluster import Cluster
from scripted_worker import Script


class System(Cluster):
    """A router with scripted workers, and a client of each face."""

    faces: dict[str, Face]
    http: httpx.AsyncClient


Make = Callable[..., Awaitable[System]]


def slow(system: System, delay_s: float = 0.02) -> None:
    for worker in system.workers:
        worker.script = Script(delay_s=delay_s)
