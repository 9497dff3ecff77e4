"""Fetches and reads what a router reports of itself and its workers (`GET /status`). Prints nothing."""

from collections.abc import Mapping
from typing import Any

import httpx

from lockstep_tools.failure import UNUSABLE, CommandError

READY = "ready"
ADDRESS_HINT = "`lockstep serve` prints the address of its management port as `manage`: give it with --url"
"""What to do where nothing answers."""


def fetch(client: httpx.Client, root: str) -> dict[str, Any]:
    """The router's status.

    Args:
        client: an HTTP client.
        root: the address of the router's management port.

    Raises:
        CommandError: no router answers there.
    """
    try:
        response = client.get(f"{root}/status")
        status = response.json() if response.status_code == 200 else None
    except httpx.HTTPError as error:
        sentence = f"no router answers at {root} ({error or type(error).__name__}). {ADDRESS_HINT}"
        raise CommandError(sentence, UNUSABLE) from None
    except ValueError:
        status = None
    if not isinstance(status, dict) or "workers" not in status:
        sentence = f"{root} is not the management port of a router: /status has HTTP status {response.status_code}"
        raise CommandError(sentence, UNUSABLE)
    return status


def state_of(entry: Mapping[str, Any]) -> str:
    """The state of a worker or rank in lower case."""
    return str(entry.get("state", "unknown")).lower()


def is_ready(status: Mapping[str, Any]) -> bool:
    """At least one worker can take requests."""
    return any(state_of(worker) == READY for worker in status["workers"])
