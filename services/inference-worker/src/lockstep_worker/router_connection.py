"""A router's connection to this worker: its number, the router's id, and the queue of frames to it."""

import time
from collections import deque

from lockstep_api.v1 import worker_pb2

from lockstep_worker.outbox import Outbox

MAX_ENDED = 256
"""The most attempts that a heartbeat reports as ended: the newest ones."""


class RouterConnection:
    """One connected router. Putting frames into its outbox never waits."""

    def __init__(self, number: int, router_id: str, outgoing_frames: int) -> None:
        self.number = number
        """Number of the Serve RPC in this process: a router that reconnects gets a new one."""
        self.router_id = router_id
        self.received = 0
        """Submits that have arrived."""
        self.greeted_at = time.monotonic()
        """When its RouterHello arrived, on the clock of `time.monotonic`: `Submit.arrived_s` is relative to this."""
        self.ended: deque[worker_pb2.EndedAttempt] = deque(maxlen=MAX_ENDED)
        """What the next heartbeat reports."""
        self.outbox = Outbox(outgoing_frames)
