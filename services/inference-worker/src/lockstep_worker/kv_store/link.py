"""What is known of the way to the state server: its latency and bandwidth, from the transfers themselves.

Averages forget: a call counts a fifth, a transfer by its bytes and by the time since the one before. Fetches that run
at the same time share the bandwidth, so each measures what all of them have got.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lockstep_worker import metrics
from lockstep_worker.kv_store.gate import LinkEstimate

_CALL_WEIGHT = 0.2
_MEMORY_BYTES = 16 << 20
"""After a transfer of so many bytes, what was known before counts 1/e."""
_MEMORY_S = 6.0
"""After so long, the same. Next to nothing is left when the next probe measures a way that no fetch has used: one
stalled transfer, which may seem thousands of times slower, keeps the gate shut for a minute at most.
"""
_MIN_TRANSFER_S = 1e-6
_MIN_BYTES = 64 << 10
"""The time of a smaller transfer is all latency."""


@dataclass
class Transfer:
    """A fetch under way. `bytes` grows as they come."""

    expected: int
    began_at: float
    got_before: int
    """What all transfers had got when it began."""
    bytes: int = 0


@dataclass
class Link:
    """The estimates; none before the first transfer."""

    clock: Callable[[], float] = time.monotonic
    measured_at: float = field(init=False, default=-math.inf)
    """When a transfer was last measured."""
    _latency_s: float | None = field(init=False, default=None)
    _deviation_s: float = field(init=False, default=0.0)
    _s_per_byte: float | None = field(init=False, default=None)
    _known_bytes: float = field(init=False, default=0.0)
    """What that is worth: bytes of transfers, those that are partly forgotten counted in part."""
    _got: int = field(init=False, default=0)
    _transfers: list[Transfer] = field(init=False, default_factory=list)

    def estimate(self) -> LinkEstimate | None:
        """What a transfer costs now; None: not known yet."""
        if self._latency_s is None or self._s_per_byte is None:
            return None
        waiting = sum(each.expected - each.bytes for each in self._transfers)
        return LinkEstimate(self._latency_s + self._deviation_s, 1 / self._s_per_byte, waiting)

    def note_call(self, took_s: float) -> None:
        """A call without content has taken this long."""
        if self._latency_s is None:
            self._latency_s = took_s
        else:
            self._deviation_s += _CALL_WEIGHT * (abs(took_s - self._latency_s) - self._deviation_s)
            self._latency_s += _CALL_WEIGHT * (took_s - self._latency_s)
        metrics.REMOTE_LATENCY.set(self._latency_s)

    @contextmanager
    def transfer(self, expected: int) -> Iterator[Transfer]:
        """A transfer of so many bytes, measured when it ends, however it ends."""
        transfer = Transfer(expected, self.clock(), self._got)
        self._transfers.append(transfer)
        try:
            yield transfer
        finally:
            self._transfers.remove(transfer)
            self._measure(transfer)

    def received(self, transfer: Transfer, count: int) -> None:
        """Bytes of a transfer have come."""
        transfer.bytes += count
        self._got += count

    def _measure(self, transfer: Transfer) -> None:
        got = self._got - transfer.got_before
        if transfer.bytes < _MIN_BYTES:
            return
        now = self.clock()
        took_s = max(now - transfer.began_at - (self._latency_s or 0.0), _MIN_TRANSFER_S)
        sample = took_s / got
        kept = math.exp(-transfer.bytes / _MEMORY_BYTES)
        old_bytes = self._known_bytes * kept * math.exp(-(now - self.measured_at) / _MEMORY_S)
        new_bytes = _MEMORY_BYTES * (1 - kept)
        self._known_bytes = old_bytes + new_bytes
        self._s_per_byte = (old_bytes * (self._s_per_byte or 0.0) + new_bytes * sample) / self._known_bytes
        self.measured_at = now
        metrics.REMOTE_BANDWIDTH.set(1 / self._s_per_byte)
