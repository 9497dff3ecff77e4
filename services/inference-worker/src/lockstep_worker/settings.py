"""The worker's settings, from flags, environment (`LOCKSTEP_…`), a YAML file, or the defaults here."""

import socket
from dataclasses import fields
from typing import Annotated, Literal

from lockstep_common.address import check_listen_address
from lockstep_engine import EngineConfig
from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from lockstep_worker.kv_store.settings import KvStoreSettings
from lockstep_worker.quantities import Bytes, BytesOrNone

OTHER_NAMES = {"kv_memory_bytes": "kv_memory", "label": "worker_id"}
"""Engine options whose setting has another name."""

INTERNAL_OPTIONS = frozenset({"collectives"})
"""Engine options without a setting: they exist for tests and measurements."""


class WorkerSettings(KvStoreSettings):
    """The settings of one worker process."""

    model: str = Field(description="Model directory in the Hugging Face layout.")
    name: str | None = Field(None, description="Name of the model in the API; the directory's base name if not set.")
    pod_uid: str | None = Field(None, description="Uid of the pod.")
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Sampling settings for requests that do not set them: those of the model's generation_config.json, "
        "or none.",
    )
    worker_id: str = Field(
        default_factory=lambda given: given.get("pod_name") or socket.gethostname(),
        min_length=1,
        max_length=128,
        description="Unique among the workers of a router; the pod's or the host's name if not set.",
    )
    listen: Annotated[str, AfterValidator(check_listen_address)] = Field(
        "0.0.0.0:9000", description="Address for gRPC: host:port or unix:/path."
    )
    management_port: int = Field(
        9001, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 picks a free one and logs it."
    )
    tp: int = Field(1, ge=1, description="Ranks (GPUs, or groups of CPU threads) that share the model.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="cuda where there is one for each rank, if auto."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="What the engine computes in, and of the KV cache; auto: float32 on the CPU."
    )
    max_seqs: int = Field(64, ge=1, description="Requests running at once.")
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens computed in one step, over all requests; if not set, 512. On CUDA steps of up to 512 are "
        "recorded; more compute long prompts faster, while running streams wait longer.",
    )
    max_queue: int = Field(256, ge=1, description="Requests waiting at most; one more is refused as overloaded.")
    max_context: int | None = Field(
        None, ge=2, description="Prompt and output; the model's own limit, with its rotary scaling, if not set."
    )
    kv_memory: Bytes | None = Field(
        None, description="KV cache of one rank, in bytes or as 512Mi; a default if not set."
    )
    kv_compression: Literal["lazy", "immediate", "per_layer", "none"] = Field(
        "lazy", description="Eight bits for blocks of KV: lazy behind the hot window, immediate, per_layer, none."
    )
    kv_hot_window: int = Field(64, ge=16, description="Last tokens that lazy and per_layer keep uncompressed.")
    kv_compressed_layers: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="Layers that per_layer compresses, from 0, comma-separated."
    )
    kv_tenant_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Part of the KV cache that one tenant's running requests may hold; once they are full, also of "
        "host memory for prefixes, and of the queue to the state server.",
    )
    prefix_cache: bool = Field(True, description="Keep the KV of shared prompt prefixes.")
    host_cache_bytes: BytesOrNone = Field(
        0,
        validate_default=True,
        description="Host memory of one rank, as 4Gi, for cached prefixes that its KV cache has evicted; 0: none.",
    )
    embeddings: Literal["auto", "last", "mean", "none"] = Field(
        "auto",
        description="Embeddings are the last token's hidden state, the mean of all, or none; if auto, as the model's "
        "1_Pooling/config.json says, none without it.",
    )
    deterministic: bool | None = Field(
        None,
        description="A request's tokens do not depend on the batch; on the CPU if not set, on CUDA only if true.",
    )
    tp_shards: Literal[1, 4] = Field(
        1,
        description=(
            "4: on the CPU with compiled kernels, a tp of 1, 2 and 4 gives the same tokens, "
            "so that workers share streams and KV blocks."
        ),
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a rank; if not set, the CPU limit divided by tp."
    )
    overlap: bool | None = Field(
        None,
        description="Plan a step while the one before it runs; if not set: yes, but on the CPU not while a stream with "
        "a grammar runs.",
    )
    cuda_graphs: bool = Field(
        True, description="On CUDA, record steps of decoding, and of up to 512 tokens, once and replay them."
    )
    fast_path: Literal["required", "prebuilt", "preferred"] = Field(
        "required",
        description="With device = cuda: without GPU kernels or CUDA graphs a start fails; prebuilt: also if a kernel "
        "was not compiled with the image; preferred: it is slower and logs why.",
    )
    min_shm: Bytes | None = Field(
        None,
        description="Least size of /dev/shm; if not set, 256Mi a rank with device = cuda and tp > 1.",
    )
    start_timeout_s: float = Field(600, gt=0, description="Longest time for ranks to load.")
    decode_deadline_s: float = Field(5, gt=0, description="A decoding step that takes longer has hung.")
    prefill_deadline_s: float = Field(
        15,
        gt=0,
        description="The same for a step with prompt tokens in it. "
        "On a CPU few of them have less time, by the measured pace.",
    )
    drain_timeout_s: float = Field(
        30, ge=0, description="After SIGTERM, time for running streams to end by themselves."
    )
    status_interval_s: float = Field(0.1, gt=0, le=10, description="Between heartbeats to the routers.")
    prefix_report_bytes_per_s: int = Field(
        262_144,
        ge=0,
        description="To each router whose policy wants them, reports of the blocks in the prefix cache; 0: none.",
    )
    max_routers: int = Field(16, ge=1, description="Routers connected at once.")
    outgoing_frames: int = Field(1024, ge=8, description="Frames waiting for one router; one more ends its connection.")
    vllm_metric_names: bool = Field(
        False,
        description="Also show load and the KV cache by vLLM's names of metrics, which autoscalers and gateways read.",
    )
    kubernetes_events: bool = Field(False, description="Post Events of the pod when ranks are lost and come back.")

    @field_validator("kv_compressed_layers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split comma-separated text, the form of a list in flags and environment."""
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("host_cache_bytes")
    @classmethod
    def _check_host_cache(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("state_server") and not value:
            raise ValueError("must be set for a state_server: blocks go there from host memory, and come back to it")
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
