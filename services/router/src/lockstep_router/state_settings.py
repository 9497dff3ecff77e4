"""The settings for the state server, which routers share."""

from lockstep_common.address import check_target
from lockstep_common.settings import PodSettings, check_identity
from pydantic import Field, ValidationInfo, field_validator


class StateServerSettings(PodSettings):
    """Where the state server is, and how long it is waited for. Times are in seconds."""

    state_server: str = Field(
        "",
        description="Address of the state server, host:port or unix:/path: other routers can continue this router's "
        "resumable streams then, and idempotency keys hold on all routers. If empty, both are in this router's memory.",
    )
    state_identity: str | None = Field(
        None,
        validate_default=True,
        description="Name that the state server's certificate has to be for, a DNS name; with `tls_cert`.",
    )
    state_timeout_s: float = Field(
        0.05,
        gt=0,
        le=10,
        description="A request waits for the state server for this long; one that resumes another router's stream, and "
        "the mirror of the journals, for up to 20 times that.",
    )
    state_max_lag_s: float = Field(
        0.05,
        gt=0,
        le=10,
        description="The state server has the tokens of resumable streams after this time, as far as it keeps up.",
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
