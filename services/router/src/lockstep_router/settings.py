"""The router's settings: flags, `LOCKSTEP_…` environment, YAML file."""

import os
import socket
from typing import Annotated, Any, Literal

from lockstep_common.settings import ServiceSettings
from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

DiscoveryKind = Literal["static", "dns", "kubernetes"]
UNIX_PREFIX = "unix:"
_NEEDED_BY = {"workers": "static", "workers_dns": "dns", "kubernetes_selector": "kubernetes"}


def default_router_id(given: dict[str, Any]) -> str:
    """A name that no other live router has: the pod's or, outside of one, host and process."""
    return given.get("pod_name") or f"{socket.gethostname()}-{os.getpid()}"


class RouterSettings(ServiceSettings):
    """How one router process behaves. Times are in seconds."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one and logs it.")
    discovery: DiscoveryKind = Field(
        "static", description="Where workers are found: `workers`, `workers_dns`, or EndpointSlices of Kubernetes."
    )
    workers: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=1024,
        validate_default=True,
        description="gRPC targets of the workers: unix:/path or host:port, comma-separated; for `static`.",
    )
    workers_dns: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        validate_default=True,
        description="host:port, comma-separated: every address of each is a worker; for `dns`, and for `kubernetes` "
        "until its API server has answered once.",
    )
    dns_interval_s: float = Field(5.0, ge=0.1, le=300, description="Between two resolutions of `workers_dns`.")
    pod_name: str | None = Field(None, description="This router's pod.")
    pod_namespace: str | None = Field(None, description="The pod's namespace.")
    kubernetes_selector: str = Field(
        "", validate_default=True, description="Labels of the EndpointSlices, as `key=value,…`; for `kubernetes`."
    )
    kubernetes_namespace: str | None = Field(
        None, validate_default=True, description="Namespace of the EndpointSlices; the pod's own if not set."
    )
    router_id: str = Field(
        default_factory=default_router_id,
        min_length=1,
        max_length=128,
        pattern=r"^[!-~]+$",
        description="This router's name to workers and clients; the pod's, or host name and pid.",
    )
    termination_log: str | None = Field(
        None, description="File for the sentence with which the process ends; /dev/termination-log if that is there."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")

    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body; more is 413.")
    body_timeout_s: float = Field(30.0, gt=0, description="A request's body must have arrived by then.")
    write_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for this long is cut off.")
    max_streams: int = Field(4096, ge=1, description="Streams at a time; more is 503 with Retry-After.")
    max_n: int = Field(16, ge=1, le=128, description="Largest `n` of a request.")
    max_prompts: int = Field(64, ge=1, le=4096, description="Most prompts in one completion request.")
    max_unread_tokens: int = Field(
        4096, ge=1, description="Tokens held for a client that reads slowly; beyond, its stream is paused."
    )

    first_token_deadline_s: float = Field(30.0, gt=0, description="An attempt without its first token moves on.")
    inter_token_deadline_s: float = Field(
        5.0, gt=0, description="A stream without a token, on a worker that finishes no step, moves on."
    )
    heartbeat_timeout_s: float = Field(1.5, gt=0, description="A worker silent for this long loses its streams.")
    connect_timeout_s: float = Field(3.0, gt=0, description="From dialling a worker to its Hello.")
    tokenizer_timeout_s: float = Field(30.0, gt=0, description="To fetch a model's tokenizer files from a worker.")
    backoff_initial_s: float = Field(0.1, gt=0, description="First pause before dialling a worker again.")
    backoff_max_s: float = Field(1.0, gt=0, description="Longest pause before dialling a worker again.")
    max_attempts: int = Field(6, ge=1, description="Workers a stream may lose in a row without getting a token.")
    resume_deadline_s: float = Field(
        60.0, gt=0, description="A stream waits this long for a worker before its client gets an error."
    )
    queue_threshold: int = Field(
        2, ge=0, description="A session leaves its worker for the least loaded one when more requests than this queue."
    )
    lame_duck_s: float = Field(
        0.0, ge=0, description="After SIGTERM, new requests are still served for this long, though /readyz says 503."
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="After that, streams may run on for this long.")

    @property
    def namespace(self) -> str:
        """Where EndpointSlices are looked for."""
        return self.kubernetes_namespace or self.pod_namespace or ""

    @field_validator("workers", "workers_dns", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """`a,b` as environment and flags give it."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("workers", "workers_dns", "kubernetes_selector")
    @classmethod
    def _check_needed(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        kind = _NEEDED_BY[info.field_name or ""]
        if not value and info.data.get("discovery") == kind:
            raise ValueError(f"must be set for discovery = {kind}")
        return value

    @field_validator("workers", "workers_dns")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        may_be_path = info.field_name == "workers"
        for target in targets:
            if not is_target(target) or (target.startswith(UNIX_PREFIX) and not may_be_path):
                raise ValueError(f"{target!r} is not {'unix:/path or ' if may_be_path else ''}host:port")
        if len(set(targets)) < len(targets):
            raise ValueError("the same one is listed twice")
        return targets

    @field_validator("kubernetes_namespace")
    @classmethod
    def _check_namespace(cls, value: str | None, info: ValidationInfo) -> str | None:
        if not value and info.data.get("discovery") == "kubernetes" and not info.data.get("pod_namespace"):
            raise ValueError("must be set for discovery = kubernetes outside of a pod")
        return value


def is_target(text: str) -> bool:
    """Whether this is a gRPC target of the two forms that the router takes."""
    if text.startswith(UNIX_PREFIX):
        return len(text) > len(UNIX_PREFIX)
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    return bool(host) and is_port and (":" not in host or (host[0] == "[" and host[-1] == "]"))
