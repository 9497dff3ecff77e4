"""The router's settings: flags, `LOCKSTEP_…` environment, YAML file."""

import ipaddress
import os
import socket
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from lockstep_common.address import check_target, is_unix
from lockstep_common.settings import UNQUOTED
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode, SettingsConfigDict

from lockstep_router.output.formats import OFF, TOOL_FORMATS
from lockstep_router.output.reasoning import REASONING_FORMATS
from lockstep_router.policies import check_policy
from lockstep_router.state_settings import StateServerSettings
from lockstep_router.tenants.shared_storage import MEMORY, check_address, has_tls

DiscoveryKind = Literal["static", "dns", "kubernetes"]
_PAIRS = {
    "model_policies": "model=policy",
    "model_tool_formats": "model=format",
    "model_reasoning_formats": "model=format",
}
MAX_ROUTER_ID_CHARS = 128
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_NEEDED_BY = {"workers": "static", "workers_dns": "dns", "kubernetes_selector": "kubernetes"}


def default_router_id(given: dict[str, Any]) -> str:
    """A name that no other live router has: the pod's name or, outside a pod, host name and pid."""
    return given.get("pod_name") or f"{socket.gethostname()}-{os.getpid()}"


class RouterSettings(StateServerSettings):
    """The settings of one router process. Times are in seconds."""

    model_config = SettingsConfigDict(allow_inf_nan=False)  # every wait ends; and JSON, as processes get it, has no inf

    peer_identity_may_be_uri = False  # gRPC checks a server's certificate for DNS names only

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one and logs it.")
    management_port: int = Field(
        8001,
        ge=0,
        le=65535,
        description="Port of /healthz, /readyz, /metrics and /status; 0 picks a free one and logs it.",
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the gRPC API on the same address; 0 picks a free one and logs it; no gRPC if not set.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share the ports, each with limits, resumable streams and idempotency keys of its "
        "own, as if it were another router; more than one for several cores of one machine.",
    )
    grpc_max_calls_per_connection: int = Field(
        128, ge=1, le=4096, description="Calls at a time on one gRPC connection; clients wait with further ones."
    )
    grpc_max_connection_age_s: float = Field(
        3600.0,
        ge=0,
        le=1_000_000,
        description="A gRPC connection that is older takes no new calls, so that clients spread over the routers "
        "again; 0: no limit.",
    )
    http_tls_cert: str | None = Field(
        None, description="PEM file of the certificate and chain shown to clients; plain HTTP and gRPC if not set."
    )
    http_tls_key: str | None = Field(None, validate_default=True, description="PEM file of its key.")
    http_tls_client_ca: str | None = Field(
        None, description="PEM file of authorities: clients must show a certificate that comes from one of them."
    )
    keys_file: str | None = Field(
        None,
        description="YAML file of tenants with the hashes of their API keys and their limits: requests without one of "
        "the keys are 401. If not set, everyone is served.",
    )
    console: Literal["off", "management", "public"] = Field(
        "management",
        description="Where /console/ is served, the web page for people: nowhere, on the management port (read-only), "
        "or on `port` too, where it can chat; `public` needs `keys_file`, unless `host` is a loopback address.",
    )
    console_routers: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        description="host:port of management ports, comma-separated: every address of each is a router that the "
        "console shows too. With `management_tls`, a router's certificate must be for the host.",
    )
    dashboard_url: str = Field(
        "", max_length=2048, description="Address of dashboards (http or https) that the console links to."
    )
    limits_storage: str = Field(
        "memory",
        description="Where tenants' limits of a minute are counted: `memory`, for each router by itself, or "
        "`redis://host:port/database` (`rediss://` with TLS), for all routers together.",
    )
    limits_storage_password_file: str | None = Field(None, description="File with the password of `limits_storage`.")
    limits_storage_ca: str | None = Field(
        None,
        description="PEM file of authorities for the certificate of `limits_storage`, besides those of the system.",
    )
    limits_storage_timeout_s: float = Field(
        0.1,
        gt=0,
        le=10,
        description="Longest wait for `limits_storage`; then the router counts in its memory until it answers again.",
    )
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
    kubernetes_selector: str = Field(
        "", validate_default=True, description="Labels of the EndpointSlices, as `key=value,…`; for `kubernetes`."
    )
    kubernetes_namespace: str | None = Field(
        None, validate_default=True, description="Namespace of the EndpointSlices; the pod's own if not set."
    )
    served_models: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=256,
        description="Names of models that may have no worker when the router starts, comma-separated: a request for "
        "one of them waits for its first worker. For another model that no worker has reported it is 404, once a "
        "worker has reported any.",
    )
    router_id: str = Field(
        default_factory=default_router_id,
        min_length=1,
        max_length=MAX_ROUTER_ID_CHARS,
        pattern=r"^[!-~]+$",
        description="This router's name to workers and clients; the pod's, or host name and pid.",
    )
    max_connections: int = Field(
        8192,
        ge=1,
        description="Client connections at a time, TLS handshakes included; beyond, the one longest without a complete "
        "request is closed, or the new one.",
    )
    max_connections_per_client: int = Field(
        0, ge=0, description="Connections of one client address over HTTP; 0: no limit, as behind a proxy."
    )
    max_header_bytes: int = Field(
        32 << 10, ge=1024, description="Request line, headers and framing of a request; more is 431."
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="A request's headers, and a TLS handshake, must be complete by then."
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body; more is 413.")
    max_body_values: int = Field(
        150_000,
        ge=1024,
        description="Elements of lists and fields of objects in a body, so token ids too; more is 400.",
    )
    max_bodies_bytes: int = Field(
        128 << 20,
        ge=1 << 20,
        description="All bodies whose prompts are not token ids yet, an eighth of it for bodies up to 64 KiB; beyond, "
        "the largest that still arrives is 503.",
    )
    bodies_bytes_per_s: int = Field(
        64 << 20,
        ge=1 << 20,
        description="Rate at which bodies above 64 KiB are read together; their clients wait. What refused bodies have "
        "left is dropped at the same rate.",
    )
    body_timeout_s: float = Field(30.0, gt=0, description="A request's body must have arrived by then.")
    write_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for this long is cut off.")
    keepalive_interval_s: float = Field(
        15.0, ge=0, description="A stream on which nothing is sent for this long gets a comment; 0: never."
    )
    websocket_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        description="Origins of web pages, comma-separated, that may open a WebSocket besides the router's own, and "
        "without keys send any request; `*`: all. Clients that are no browsers send none.",
    )
    websocket_max_requests: int = Field(64, ge=1, le=4096, description="Requests at a time on one WebSocket.")
    websocket_idle_timeout_s: float = Field(
        300.0, gt=0, description="A WebSocket without a request for this long is closed."
    )
    websocket_pong_timeout_s: float = Field(
        20.0, gt=0, description="A WebSocket whose client is silent for this long after a ping is closed."
    )
    max_streams: int = Field(4096, ge=1, description="Streams at a time; more is 503 with Retry-After.")
    max_n: int = Field(16, ge=1, le=128, description="Largest `n` and `best_of` of a request.")
    max_prompts: int = Field(64, ge=1, le=4096, description="Most prompts in one completion request.")
    max_embedding_inputs: int = Field(
        1024, ge=1, le=4096, description="Texts in one request for embeddings; more is 400."
    )
    max_streams_per_request: int = Field(
        64, ge=1, description="Answers of one request: prompts times `n` or `best_of`; more is 400."
    )
    text_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="Threads that tokenize prompts of up to 16 Ki characters; as many do those of up to 256 Ki, one "
        "longer ones.",
    )
    allow_control_tokens_in_text: bool = Field(
        False, description="Control tokens that clients write in prompts and messages count as such, not as text."
    )
    anonymous_cache: Literal["address", "shared"] = Field(
        "address", description="Clients without an API key share prefixes with those of their address, or with all."
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        description="Addresses and networks of proxies, comma-separated, whose X-Forwarded-For names the client.",
    )
    max_journals_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="Token ids and kept log probabilities of all streams, and whole answers being sent, about; beyond, "
        "new requests are 503.",
    )
    resume_window_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="A resumable request runs on for this long after its client has left, and its answer is kept for "
        "as long after its end.",
    )
    max_resumable_streams: int = Field(
        1024,
        ge=1,
        description="Resumable requests that run or are kept; beyond, the tenant with the most loses those that ended "
        "first, or new ones are 503.",
    )
    max_resumable_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        description="The journals of resumable requests, about, by the same rule; they count in `max_journals_bytes`.",
    )
    max_unread_tokens: int = Field(
        4096,
        ge=1,
        description="Tokens and log probabilities held for a client that reads slowly; beyond, its stream is paused.",
    )

    max_queue_wait_s: float = Field(
        300.0,
        gt=0,
        description="A stream waits this long for a worker, and for its turn there, before its client gets an error. "
        "A request whose estimated wait is longer is refused at once.",
    )
    first_token_deadline_s: float = Field(
        30.0, gt=0, description="A stream that its worker runs, but that makes no progress for this long, moves on."
    )
    inter_token_deadline_s: float = Field(
        5.0,
        gt=0,
        description="A stream without a token, on a worker that finishes no step, moves on; later if the worker's own "
        "deadline for the step is later.",
    )
    heartbeat_timeout_s: float = Field(1.5, gt=0, description="A worker silent for this long loses its streams.")
    suspicion_phi: float = Field(
        8.0,
        ge=0,
        le=100,
        description="New streams avoid a worker whose heartbeats are so late that the probability of that is 10 to the "
        "minus this (phi accrual), or whose step has taken 0.3 of its own deadline; 0: never.",
    )
    eject_after: int = Field(
        3,
        ge=0,
        description="New streams avoid a worker after so many faults in a row of streams that other workers "
        "complete; 0: never.",
    )
    eject_share: float = Field(
        0.5, gt=0, le=1, description="Largest share of a model's workers that is ejected at a time; one always may be."
    )
    eject_initial_s: float = Field(
        10.0, gt=0, description="An ejected worker is probed by one stream after this time, doubled by each failure."
    )
    eject_max_s: float = Field(300.0, gt=0, description="Longest ejection, up to a quarter more by jitter.")
    slow_factor: float = Field(
        3.0,
        ge=0,
        le=100,
        validate_default=True,
        description="New streams avoid a worker that takes so many times as long as the model's others, for a step or "
        "a first token of the same size, while others have room; 0: never, else above 1.5.",
    )
    connect_timeout_s: float = Field(3.0, gt=0, description="From dialling a worker to its Hello.")
    connect_hedge_s: float = Field(
        0.25,
        gt=0,
        description="A connection to a worker that is not established by then is tried a second time, at its next "
        "address if it has several; the first one that is established is used.",
    )
    tokenizer_timeout_s: float = Field(30.0, gt=0, description="To fetch a model's tokenizer files from a worker.")
    backoff_initial_s: float = Field(0.1, gt=0, description="First pause before dialling a worker again.")
    backoff_max_s: float = Field(1.0, gt=0, description="Longest pause before dialling a worker again.")
    max_attempts: int = Field(
        6, ge=1, description="Attempts of a stream that may fail in a row on workers that live on."
    )
    quarantine_after: int = Field(
        3,
        ge=1,
        description="Deaths of workers in a row that one stream alone may cause; then its client gets an error.",
    )
    retry_share: float = Field(
        0.2, ge=0, le=1, description="Retries after refusals and failures, as a share of all streams."
    )
    exact_failover: Literal["prefer", "strict"] = Field(
        "prefer",
        description="Where no worker has the numerics fingerprint that a stream began with: `prefer` continues it on "
        "another worker and marks the answer as inexact, `strict` waits for one.",
    )
    policy: str = Field(
        "sticky",
        description="How the worker for a stream is chosen: `sticky`, `hybrid`, `stateless`, `round_robin`, "
        "`weighted`, `least_loaded`, `prefix_aware`, or an entry point of the group `lockstep.policies`.",
    )
    model_policies: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        max_length=256,
        description="Policies of single models in place of `policy`: a mapping, or `model=policy`, comma-separated.",
    )
    model_tool_formats: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        max_length=256,
        description="Formats in which single models write tool calls: `hermes`, `llama3`, `mistral`, `json` or `off`; "
        "a mapping, or `model=format`, comma-separated. For all others the chat template shows it.",
    )
    model_reasoning_formats: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        max_length=256,
        description="Formats in which single models mark reasoning: `think`, `magistral`, `seed_oss` or `off`; a "
        "mapping, or `model=format`, comma-separated. For all others the chat template shows it.",
    )
    queue_threshold: int = Field(
        2,
        ge=0,
        description="A session leaves its worker for the least loaded one when more requests than this queue; for "
        "`sticky` and `weighted`. With `hybrid` it goes to the next one of its order.",
    )
    load_bound: float = Field(
        1.1,
        gt=1,
        le=100,
        description="No worker gets more requests than this times the average, or 4 if that is more; for `hybrid` and "
        "`prefix_aware`.",
    )
    prefix_index_blocks: int = Field(
        131_072,
        ge=1024,
        le=1 << 24,
        description="Blocks of 16 tokens in the index of each model with `prefix_aware`, shared by its workers, at "
        "up to 140 bytes each.",
    )
    lame_duck_s: float = Field(
        0.0, ge=0, description="After SIGTERM, new requests are still served for this long, though /readyz says 503."
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="After that, streams may run on for this long.")

    @property
    def namespace(self) -> str:
        """The namespace of the EndpointSlices."""
        return self.kubernetes_namespace or self.pod_namespace or ""

    def policy_of(self, model: str) -> str:
        """The name of a model's policy."""
        return self.model_policies.get(model, self.policy)

    @field_validator("limits_storage")
    @classmethod
    def _check_storage(cls, value: str) -> str:
        try:
            check_address(value)
        except ValueError as error:
            raise PydanticCustomError(UNQUOTED, "{reason}", {"reason": str(error)}) from None
        return value

    @field_validator("limits_storage_password_file")
    @classmethod
    def _check_password_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("limits_storage") == MEMORY:
            raise ValueError("needs limits_storage")
        return value

    @field_validator("limits_storage_ca")
    @classmethod
    def _check_storage_ca(cls, value: str | None, info: ValidationInfo) -> str | None:
        storage = info.data.get("limits_storage")  # none if it cannot be used
        if value is not None and storage is not None and not has_tls(storage):
            raise ValueError("needs a limits_storage that begins with rediss://")
        return value

    @field_validator("console")
    @classmethod
    def _check_console(cls, value: str, info: ValidationInfo) -> str:
        if value == "public" and info.data.get("keys_file") is None and info.data.get("host") not in _LOOPBACK:
            raise ValueError("needs keys_file, unless host is a loopback address")
        return value

    @field_validator("dashboard_url")
    @classmethod
    def _check_dashboard_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
        except ValueError:
            parts = None
        if value and (parts is None or parts.scheme not in ("http", "https") or not parts.hostname or "@" in value):
            raise ValueError("must be an address with http:// or https://, without a user")
        return value

    @field_validator("http_tls_key")
    @classmethod
    def _check_http_tls(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is None) != (info.data.get("http_tls_cert") is None):
            raise ValueError("goes together with http_tls_cert")
        return value

    @field_validator("http_tls_client_ca")
    @classmethod
    def _check_client_ca(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("http_tls_cert"):
            raise ValueError("needs http_tls_cert")
        return value

    @field_validator(
        "workers",
        "served_models",
        "workers_dns",
        "console_routers",
        "trusted_proxies",
        "websocket_origins",
        mode="before",
    )
    @classmethod
    def _split(cls, value: object) -> object:
        """Split `a,b`, the form in environment and flags."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("model_policies", "model_tool_formats", "model_reasoning_formats", mode="before")
    @classmethod
    def _split_pairs(cls, value: object, info: ValidationInfo) -> object:
        """Split `model=value,model=value`, the form in environment and flags."""
        if not isinstance(value, str):
            return value
        pairs = [part.strip().rpartition("=") for part in value.split(",") if part.strip()]
        if not all(model.strip() and policy.strip() for model, _, policy in pairs):
            raise ValueError(f"must be {_PAIRS[info.field_name or '']}, comma-separated")
        policies = {model.strip(): policy.strip() for model, _, policy in pairs}
        if len(policies) < len(pairs):
            raise ValueError("the same model is listed twice")
        return policies

    @field_validator("slow_factor")
    @classmethod
    def _check_slow_factor(cls, factor: float) -> float:
        if 0 < factor <= 1.5:
            raise ValueError("must be 0 or above 1.5")
        return factor

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        check_policy(name)
        return name

    @field_validator("model_policies")
    @classmethod
    def _check_policies(cls, policies: dict[str, str]) -> dict[str, str]:
        for model, name in policies.items():
            try:
                check_policy(name)
            except ValueError as error:
                raise ValueError(f"{name!r} of {model!r} {error}") from error
        return policies

    @field_validator("model_tool_formats", "model_reasoning_formats")
    @classmethod
    def _check_formats(cls, formats: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        known = (*(TOOL_FORMATS if info.field_name == "model_tool_formats" else REASONING_FORMATS), OFF)
        for model, name in formats.items():
            if name not in known:
                raise ValueError(f"{name!r} of {model!r} must be one of {', '.join(known)}")
        return formats

    @field_validator("workers", "workers_dns", "kubernetes_selector")
    @classmethod
    def _check_needed(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        kind = _NEEDED_BY[info.field_name or ""]
        if not value and info.data.get("discovery") == kind:
            raise ValueError(f"must be set for discovery = {kind}")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks

    @field_validator("workers", "workers_dns", "console_routers")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        may_be_path = info.field_name == "workers"
        for target in targets:
            try:
                if is_unix(target) and not may_be_path:
                    raise ValueError("must be host:port")
                check_target(target)
            except ValueError as error:
                raise ValueError(f"{target!r} {error}") from None
        if len(set(targets)) < len(targets):
            raise ValueError("the same one is listed twice")
        return targets

    @field_validator("kubernetes_namespace")
    @classmethod
    def _check_namespace(cls, value: str | None, info: ValidationInfo) -> str | None:
        if not value and info.data.get("discovery") == "kubernetes" and not info.data.get("pod_namespace"):
            raise ValueError("must be set for discovery = kubernetes outside of a pod")
        return value
