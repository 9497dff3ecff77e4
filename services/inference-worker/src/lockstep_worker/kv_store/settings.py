"""The settings for the state server, in which workers keep cold KV blocks."""

from lockstep_common.state_settings import StateAddressSettings
from pydantic import Field

from lockstep_worker.quantities import Bytes


class KvStoreSettings(StateAddressSettings):
    """Where the state server is, and what it may cost. Times are in seconds."""

    state_server: str = Field(
        "",
        description="Address of the state server, host:port or unix:/path: cold blocks of the prefix cache are stored "
        "there, and fetched where that is faster than computing them. None are if empty. Needs `host_cache_bytes`.",
    )
    state_timeout_s: float = Field(
        0.25, gt=0, le=10, description="A fetch waits for this long to learn which blocks are there."
    )
    state_fetch_timeout_s: float = Field(
        5, gt=0, le=60, description="Longest time of a fetch; it also ends when its blocks would have been computed."
    )
    state_queue_bytes: Bytes = Field(
        256 << 20, ge=1 << 20, description="Blocks that wait to be stored, as 256Mi; more are dropped."
    )
    state_block_ttl_s: float = Field(
        3600, gt=0, description="The state server keeps blocks for this long, at most its own `max_ttl_s`."
    )
