"""Journals of resumable streams: what is kept of each, behind one interface for all backends.

It never generates and never sees a client.
"""

from lockstep_router.journals.memory import MemoryJournalStore
from lockstep_router.journals.mirrored import MirroredJournalStore
from lockstep_router.journals.records import ChoiceLog, ChoiceRecord, Claim, Outcome, Piece, RequestRecord, StoredStream
from lockstep_router.journals.store import JournalStore, StoreAwayError

__all__ = [
    "ChoiceLog",
    "ChoiceRecord",
    "Claim",
    "JournalStore",
    "MemoryJournalStore",
    "MirroredJournalStore",
    "Outcome",
    "Piece",
    "RequestRecord",
    "StoreAwayError",
    "StoredStream",
]
