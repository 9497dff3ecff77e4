"""The third tier of the prefix cache: cold KV blocks in the state server, which all workers of a model share."""

from lockstep_worker.kv_store.store import KvStore, StoreOptions

__all__ = ["KvStore", "StoreOptions"]
