"""The workers as this router sees them: their links, their models, and the choice of the worker for a stream.

It never holds a stream's tokens and never decides whether a stream continues.
"""

from lockstep_router.workers.link import Link, LinkState
from lockstep_router.workers.workers import Workers, model_not_found

__all__ = ["Link", "LinkState", "Workers", "model_not_found"]
