"""The backend on Redis or Valkey: one server, sentinels or a cluster."""

from lockstep_state.redis_backend.connect import RedisOptions
from lockstep_state.redis_backend.redis_backend import RedisBackend

__all__ = ["RedisBackend", "RedisOptions"]
