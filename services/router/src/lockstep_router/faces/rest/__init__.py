"""The REST face: OpenAI's API over HTTP, with server-sent events for streams."""

from lockstep_router.faces.rest.app import create_app

__all__ = ["create_app"]
