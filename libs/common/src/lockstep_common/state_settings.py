"""The settings with which a service reaches the state server."""

from pydantic import Field, ValidationInfo, field_validator

from lockstep_common.address import check_target
from lockstep_common.settings import PodSettings, check_identity


class StateAddressSettings(PodSettings):
    """The address and the identity of the state server. A service says in its own `state_server` what it is for."""

    state_server: str = Field("", description="Address of the state server, host:port or unix:/path; none if empty.")
    state_identity: str | None = Field(
        None,
        validate_default=True,
        description="Name that the state server's certificate has to be for, a DNS name; with `tls_cert`.",
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
