"""The settings for the state server, which routers share."""

from lockstep_common.state_settings import StateAddressSettings
from pydantic import Field


class StateServerSettings(StateAddressSettings):
    """Where the state server is, and how long it is waited for. Times are in seconds."""

    state_server: str = Field(
        "",
        description="Address of the state server, host:port or unix:/path: other routers can continue this router's "
        "resumable streams then, and idempotency keys hold on all routers. If empty, both are in this router's memory.",
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
