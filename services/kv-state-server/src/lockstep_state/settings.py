"""The state server's settings, from flags, environment (`LOCKSTEP_…`), a YAML file, or the defaults here."""

from typing import Annotated

from lockstep_common.address import check_listen_address
from lockstep_common.memory_limit import usable_memory
from lockstep_common.settings import UNQUOTED, PodSettings, check_identity
from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from lockstep_state.backend import Limits
from lockstep_state.redis_backend.connect import parse_address

MEMORY = "memory"
_TRANSFER_PART = 8
"""Of memory, for blocks that are moved: three copies of them, half of it for entries, an eighth for the rest."""


class StateSettings(PodSettings):
    """The settings of one state server."""

    listen: Annotated[str, AfterValidator(check_listen_address)] = Field(
        "0.0.0.0:9100", description="Address for gRPC: host:port or unix:/path."
    )
    management_port: int = Field(
        9101, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 picks a free one and logs it."
    )
    worker_identity: str | None = Field(
        None,
        description="Name that workers' certificates are for, as `peer_identity` is for routers; workers are refused "
        "if not set.",
    )
    store: str = Field(
        MEMORY,
        description="Where everything is kept: `memory`, `redis://host:port/database`, `redis+cluster://host:port,…` "
        "or `redis+sentinel://host:port,…/database?master=name`; `rediss` for TLS.",
    )
    store_username: str | None = Field(None, description="User of Redis' ACL.")
    store_password_file: str | None = Field(None, description="File with the password of Redis.")
    store_sentinel_password_file: str | None = Field(None, description="File with the password of the sentinels.")
    store_ca: str | None = Field(None, description="PEM file of Redis' authorities; those of the system if not set.")
    store_cert: str | None = Field(None, description="PEM file of the certificate shown to Redis.")
    store_key: str | None = Field(None, description="PEM file of its key.")
    store_prefix: str = Field("lockstep:", max_length=64, description="Of all keys in Redis.")
    store_timeout_s: float = Field(0.05, gt=0, le=10, description="Longest wait for a small operation of Redis.")
    store_batch_timeout_s: float = Field(
        0.5, gt=0, le=30, description="Longest wait for a batch of writes, a stream or blocks."
    )
    store_connections: int = Field(32, ge=1, le=1024, description="Connections to each Redis server.")
    encryption_key_file: str | None = Field(
        None,
        description="File with keys of 32 bytes in hexadecimal, one a line: values in Redis are encrypted with the "
        "first one (AES-GCM), and decrypted with any. Not encrypted if not set.",
    )
    max_memory_bytes: int = Field(256 << 20, ge=1 << 20, description="Of everything kept in memory.")
    max_stream_bytes: int = Field(16 << 20, ge=1 << 10, description="Of one stream's journal.")
    max_tenant_bytes: int = Field(
        1 << 30, ge=1 << 10, description="Of a tenant's streams, sessions and idempotency keys."
    )
    max_tenant_streams: int = Field(10_000, ge=1, description="Streams of a tenant, those that have ended included.")
    max_tenant_block_bytes: int = Field(1 << 30, ge=1 << 10, description="Of a tenant's KV blocks.")
    max_block_share: float = Field(
        0.75,
        ge=0,
        le=1,
        description="KV blocks are stored as long as Redis uses no more than this part of its `maxmemory`: the rest is "
        "for journals.",
    )
    max_block_bytes: int = Field(16 << 20, ge=1 << 10, le=1 << 28, description="Of one KV block.")
    max_batch: int = Field(4096, ge=1, le=65536, description="Writes, streams or blocks named in one call.")
    max_transfers: int = Field(16, ge=1, le=1024, description="Calls at a time that put or get blocks.")
    max_transfer_bytes: int | None = Field(
        None,
        ge=1 << 10,
        description="Bytes of blocks that these calls have in memory at a time, each about three times; an eighth of "
        "the memory limit if not set. A larger block is moved alone.",
    )
    max_calls: int = Field(1024, ge=1, description="Calls at a time; more are refused.")
    ttl_s: float = Field(
        600,
        gt=0,
        description="What is stored without a time to live is kept for so long. Routers and workers give one.",
    )
    max_ttl_s: float = Field(86_400, gt=0, description="Greatest time to live.")
    call_timeout_s: float = Field(5, gt=0, description="Longest time of a call, unless its own deadline is sooner.")
    transfer_timeout_s: float = Field(30, gt=0, description="The same for calls that put or get blocks.")
    drain_timeout_s: float = Field(10, ge=0, description="After SIGTERM, time for calls to end.")

    @property
    def limits(self) -> Limits:
        """What one stream and one tenant may take."""
        return Limits(
            self.max_stream_bytes, self.max_tenant_bytes, self.max_tenant_streams, self.max_tenant_block_bytes
        )

    @property
    def transfer_bytes(self) -> int:
        """Of blocks that are moved at a time."""
        return self.max_transfer_bytes or usable_memory() // _TRANSFER_PART

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str) -> str:
        if value != MEMORY:
            try:
                parse_address(value)
            except ValueError as error:
                raise PydanticCustomError(UNQUOTED, str(error)) from None  # it may have a password
        return value

    @field_validator("worker_identity")
    @classmethod
    def _check_worker(cls, value: str | None) -> str | None:
        return None if value is None else check_identity(value)
