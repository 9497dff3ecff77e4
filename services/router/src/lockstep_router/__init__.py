"""Lockstep's router: OpenAI's API in front of inference workers, with streams that outlive the workers they run on.

It owns text, the journal of every stream and the choice of the worker. It never loads a model.
"""

from lockstep_router.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings

__all__ = ["Router", "RouterSettings", "create_app"]
