"""One stream of tokens over several workers: its journal, its attempts, and the moves between them.

It never dials a worker and never sees text.
"""

from lockstep_router.streams.journal import Journal
from lockstep_router.streams.stream import Stream

__all__ = ["Journal", "Stream"]
