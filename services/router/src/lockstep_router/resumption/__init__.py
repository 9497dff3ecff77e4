"""Streams that outlive their client's connection: they run for themselves, and clients read them from any position.

It knows no transport: a face turns a `Reading`'s events into its own, and names a place by a `Position`.
"""

from lockstep_router.resumption.position import After, Position, event_id, no_position
from lockstep_router.resumption.reading import Event, Reading
from lockstep_router.resumption.runs import IdempotencyKey, Runs

__all__ = ["After", "Event", "IdempotencyKey", "Position", "Reading", "Runs", "event_id", "no_position"]
