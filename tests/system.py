"""A running Lockstep seen from outside: reads the router's status, and waits for changes of it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from lockstep_tools.failure import CommandError
from lockstep_tools.serving.status import READY, fetch
from machine import PATIENCE_S, wait_for

REFERENCE = Path(__file__).parents[1] / "models/reference"
MODEL = REFERENCE.name
_PLAIN = False
"""As httpx's `verify`: to load the system's certificates, which plain HTTP does not need, takes 30 ms."""
_ROUNDING_S = 0.001
"""Of a lag in a router's status."""
MOST_TOKENS = 1900
"""Tokens that a stream can have after a short prompt, in the reference model's context of 2,048."""

Json = dict[str, Any]


class System:
    """The router at `url` (without /v1) and the workers that it knows. `management_url` is its management port."""

    def __init__(self, url: str, management_url: str) -> None:
        self.url = url
        self.management_url = management_url

    @property
    def api(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def status(self) -> Json | None:
        """The router's status; None while it does not answer."""
        try:
            with httpx.Client(timeout=5.0, trust_env=False, verify=_PLAIN) as client:
                return fetch(client, self.management_url)
        except CommandError:
            return None

    def router(self) -> Json:
        """The router's status of itself."""
        return wait_for(self.status, "the router answers")["router"]

    def workers(self) -> dict[str, Json]:
        """The status of the router's workers, by id; empty while it does not answer."""
        return {worker["id"]: worker for worker in (self.status() or {"workers": []})["workers"]}

    def worker(self, worker_id: str) -> Json:
        """The status of one worker."""
        return wait_for(lambda: self.workers().get(worker_id), f"{worker_id} is known")

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""
        with httpx.Client(timeout=5.0, trust_env=False, verify=_PLAIN) as client:
            body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
            return client.post(f"{self.url}/tokenize", json=body).raise_for_status().json()["tokens"]

    def tokens_lasting(self, seconds: float) -> int:
        """Tokens of a stream that takes about so long on this machine; no more than fit into the model's context."""
        body = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": 100, "ignore_eos": True}
        began_s = time.monotonic()
        with httpx.Client(timeout=60.0, trust_env=False, verify=_PLAIN) as client:
            client.post(f"{self.api}/completions", json=body).raise_for_status()
        return min(max(200, int(100 * seconds / (time.monotonic() - began_s))), MOST_TOKENS)

    def until(
        self, holds: Callable[[dict[str, Json]], object], what: str, within_s: float = PATIENCE_S
    ) -> dict[str, Json]:
        """Wait until something holds of the workers; returns them."""

        def find() -> dict[str, Json] | None:
            workers = self.workers()
            return workers if workers and holds(workers) else None

        found = wait_for(find, what, within_s)
        assert found is not None
        return found

    def until_state(self, worker_id: str, state: str, within_s: float = PATIENCE_S) -> Json:
        """Wait until a worker is in a state; returns it."""
        return self.until(lambda all_: all_[worker_id]["state"] == state, f"{worker_id} is {state}", within_s)[
            worker_id
        ]

    def until_ready(self, within_s: float = 60.0) -> dict[str, Json]:
        """Wait until every worker is ready; returns them."""
        return self.until(all_ready, "every worker is ready", within_s)

    def until_idle(self, within_s: float = PATIENCE_S) -> dict[str, Json]:
        """Wait until nothing runs or waits and every block is free; returns the workers."""
        return self.until(lambda workers: all(map(is_idle, workers.values())), "all blocks are free", within_s)

    def until_at_rest(self, within_s: float = PATIENCE_S) -> dict[str, Json]:
        """Wait until each worker has reported that it is idle since the router had no stream; returns the workers.

        A worker's last report may be from before the last stream, or from its first half.
        """
        self.until(lambda workers: not any(each["streams"] for each in workers.values()), "no stream runs", within_s)
        ended_s = time.monotonic()

        def at_rest() -> dict[str, Json]:
            asked_s = time.monotonic()
            workers = self.workers()
            heard_s = [each["last_seen_s"] for each in workers.values()]
            reported = all(each is not None and each < asked_s - ended_s for each in heard_s)
            return workers if reported and all(map(_is_at_rest, workers.values())) else {}

        return wait_for(at_rest, "all blocks are free", within_s)

    def serving(self, within_s: float = PATIENCE_S) -> Json:
        """The worker that runs a stream of the router, by its own report as well.

        The report alone may still count a stream that has ended.
        """

        def serves(worker: Json) -> bool:
            return worker["streams"] > 0 and worker["running"] > 0

        workers = self.until(lambda all_: any(map(serves, all_.values())), "something runs", within_s)
        return next(worker for worker in workers.values() if serves(worker))


async def until_mirrored(management_urls: list[str]) -> None:
    """Wait until the state server has all that streams of these routers had when this was called."""
    began_s, missing = time.monotonic(), set(management_urls)
    async with httpx.AsyncClient(trust_env=False, verify=_PLAIN) as client:
        while missing:
            for url in sorted(missing):
                asked_s = time.monotonic()
                state = (await client.get(f"{url}/status")).json()["router"]["state"]
                assert asked_s < began_s + PATIENCE_S, state
                if asked_s - state["lag_s"] > began_s + _ROUNDING_S:
                    missing.remove(url)
            await asyncio.sleep(0.01)


def all_ready(workers: dict[str, Json]) -> bool:
    """Every worker is ready."""
    return all(worker["state"] == READY for worker in workers.values())


def _is_at_rest(worker: Json) -> bool:
    return not worker["streams"] and is_idle(worker)


def is_idle(worker: Json) -> bool:
    """The worker runs nothing and holds no block."""
    return not worker["running"] and not worker["queued"] and worker["free_blocks"] == worker["total_blocks"] > 0
