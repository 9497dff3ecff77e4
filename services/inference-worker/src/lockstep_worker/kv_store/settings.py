"""The settings for the state server, in which workers keep cold KV blocks."""

from lockstep_common.address import check_target
from lockstep_common.settings import PodSettings, check_identity
from pydantic import Field, ValidationInfo, field_validator

from lockstep_worker.quantities import Bytes


class StateServerSettings(PodSettings):
    """Where the state server is, and what it may cost. Times are in seconds."""

    state_server: str = Field(
        "",
        description="Address of the state server, host:port or unix:/path: cold blocks of the prefix cache are stored "
        "there, and fetched where that is faster than computing them. None are if empty. Needs `host_cache_bytes`.",
    )
    state_identity: str | None = Field(
        None,
        validate_default=True,
        description="Name that the state server's certificate has to be for, a DNS name; with `tls_cert`.",
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

    @field_validator("state_server")
    @classmethod
    def _check_state_server(cls, value: str) -> str:
        return check_target(value) if value else value

    @field_validator("state_identity")
    @classmethod
    def _check_state_identity(cls, value: str | None, info: ValidationInfo) -> str | None:
        has_tls = bool(info.data.get("tls_cert"))
        if value is not None and not has_tls:
            raise ValueError("needs tls_cert")
        if value is None and has_tls and info.data.get("state_server"):
            raise ValueError("must be set for a state_server with tls_cert")
        return None if value is None else check_identity(value, may_be_uri=False)
