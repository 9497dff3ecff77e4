"""The worker's settings, from flags, environment (`LOCKSTEP_…`), a YAML file, or the defaults here."""

import re
import socket
from dataclasses import fields
from typing import Annotated, Literal

from lockstep_common.address import check_listen_address
from lockstep_common.settings import ServiceSettings, check_identity, check_together
from lockstep_engine import EngineConfig
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

_UNITS = {"": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}

OTHER_NAMES = {"kv_memory_bytes": "kv_memory", "label": "worker_id"}
"""Engine options whose setting has another name."""

INTERNAL_OPTIONS = frozenset({"collectives"})
"""Engine options without a setting: they exist for tests and measurements."""


def parse_bytes(value: object) -> object:
    """The size in bytes of a quantity in Kubernetes' form: `512Mi`, `2Gi`, `1.5G` or a plain number.

    Values other than text are left to pydantic.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]i?|)B?", value.strip())
    if match is None:
        raise ValueError("must be a number of bytes such as 536870912, 512Mi or 2Gi")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


class WorkerSettings(ServiceSettings):
    """The settings of one worker process."""

    model: str = Field(description="model directory in the Hugging Face layout")
    name: str | None = Field(None, description="name of the model in the API; the directory's base name if not set")
    pod_name: str | None = Field(None, description="this worker's pod")
    pod_namespace: str | None = Field(None, description="the pod's namespace")
    pod_uid: str | None = Field(None, description="the pod's uid")
    worker_id: str = Field(
        default_factory=lambda given: given.get("pod_name") or socket.gethostname(),
        min_length=1,
        max_length=128,
        description="unique among the workers of a router; the pod's or the host's name if not set",
    )
    listen: Annotated[str, AfterValidator(check_listen_address)] = Field(
        "0.0.0.0:9000", description="address for gRPC: host:port or unix:/path"
    )
    management_host: str = Field("127.0.0.1", description="address for health and metrics")
    management_port: int = Field(
        9001, ge=0, le=65535, description="port of /healthz, /readyz and /metrics; 0 picks a free one and logs it"
    )
    liveness_timeout_s: float = Field(
        20.0, gt=0, description="/healthz is 503 when the event loop has not run for this long"
    )
    tls_cert: str | None = Field(
        None, description="PEM file of the worker's certificate and chain; plain text if not set"
    )
    tls_key: str | None = Field(None, description="PEM file of its key")
    tls_ca: str | None = Field(None, description="PEM file of the authorities that routers' certificates come from")
    peer_identity: str | None = Field(
        None,
        validate_default=True,
        description="DNS name or URI (spiffe://…) that a router's certificate has to be for; nobody else is admitted",
    )
    management_tls: bool = Field(False, description="HTTPS on the management port, with tls_cert")
    tp: int = Field(1, ge=1, description="ranks (GPUs, or groups of CPU threads) that share the model")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cuda where there is one for each rank, if auto")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV cache")
    max_seqs: int = Field(64, ge=1, description="requests running at once")
    max_batch_tokens: int = Field(512, ge=1, description="tokens computed in one step, over all requests")
    max_queue: int = Field(256, ge=1, description="requests waiting at most; one more is refused as overloaded")
    max_context: int | None = Field(None, ge=2, description="prompt and output; the model's own limit if not set")
    kv_memory: Bytes | None = Field(
        None, description="KV cache of one rank, in bytes or as 512Mi; a default if not set"
    )
    kv_compression: Literal["lazy", "immediate", "per_layer", "none"] = Field(
        "lazy", description="eight bits for blocks of KV: lazy behind the hot window, immediate, per_layer, none"
    )
    kv_hot_window: int = Field(64, ge=16, description="last tokens that lazy and per_layer keep uncompressed")
    kv_compressed_layers: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="layers that per_layer compresses, from 0, comma-separated"
    )
    kv_tenant_share: float = Field(
        1.0, gt=0, le=1, description="part of the KV cache that one tenant's running requests may hold"
    )
    prefix_cache: bool = Field(True, description="keep the KV of shared prompt prefixes")
    deterministic: bool | None = Field(
        None, description="a request's tokens do not depend on the batch; on the CPU if not set"
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a rank; if not set, the CPU limit divided by tp"
    )
    overlap: bool | None = Field(None, description="plan a step while the one before it runs; on CUDA if not set")
    cuda_graphs: bool = Field(True, description="on CUDA, record steps of decoding once and replay them")
    min_shm: Bytes | None = Field(
        None,
        description="least size of /dev/shm; if not set, 256Mi a rank with device = cuda and tp > 1",
    )
    start_timeout_s: float = Field(600, gt=0, description="longest time for ranks to load")
    decode_deadline_s: float = Field(5, gt=0, description="a decoding step that takes longer has hung")
    prefill_deadline_s: float = Field(15, gt=0, description="the same for a step with prompt tokens in it")
    drain_timeout_s: float = Field(30, ge=0, description="after SIGTERM, time for running streams to end by themselves")
    status_interval_s: float = Field(0.1, gt=0, le=10, description="between heartbeats to the routers")
    max_routers: int = Field(16, ge=1, description="routers connected at once")
    outgoing_frames: int = Field(1024, ge=8, description="frames waiting for one router; one more ends its connection")
    kubernetes_events: bool = Field(False, description="post Events of the pod when ranks are lost and come back")
    termination_log: str | None = Field(
        None, description="file for the sentence with which the process ends; /dev/termination-log if that is there"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level of log lines shown"
    )

    @field_validator("kv_compressed_layers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split comma-separated text, the form of a list in flags and environment."""
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("peer_identity")
    @classmethod
    def _check_tls(cls, value: str | None, info: ValidationInfo) -> str | None:
        check_together({name: info.data.get(name) for name in ("tls_cert", "tls_key", "tls_ca")}, value)
        return None if value is None else check_identity(value)

    @field_validator("management_tls")
    @classmethod
    def _check_management_tls(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("tls_cert"):
            raise ValueError("needs tls_cert")
        return value

    @field_validator("kubernetes_events")
    @classmethod
    def _check_pod(cls, value: bool, info: ValidationInfo) -> bool:
        missing = [name for name in ("pod_name", "pod_namespace", "pod_uid") if not info.data.get(name)]
        if value and missing:
            raise ValueError(f"needs {', '.join(missing)}")
        return value

    def engine_config(self) -> EngineConfig:
        """The engine's configuration.

        Raises:
            LockstepError: INVALID_REQUEST for values that contradict each other.
        """
        names = (field.name for field in fields(EngineConfig) if field.name not in INTERNAL_OPTIONS)
        return EngineConfig(**{name: getattr(self, OTHER_NAMES.get(name, name)) for name in names})
