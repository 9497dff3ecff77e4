"""What a user sets about an engine. Plain data; nothing here imports torch."""

from dataclasses import dataclass

from lockstep_common.errors import ErrorCode, LockstepError

BLOCK_SIZE = 16
"""Tokens in a block of KV cache."""

KV_COMPRESSION = "lazy"
"""The default."""


@dataclass(frozen=True)
class HotWindow:
    """Which version of a full block of KV a query sees: hot in the model's dtype, or cold and compressed.

    It is a function of positions alone, so that a token has the same logits to the bit whether it is generated, part
    of a prompt cut into any chunks, computed again after a preemption, or on another worker.
    """

    sink: int
    """A sequence's first blocks that stay hot."""
    size: int
    """Blocks before a query's own that it sees hot; the ones before them, but for the sink, it sees cold."""

    def first_hot(self, query_block: int) -> int:
        """Queries in block `query_block` see the blocks from `sink` to before this one cold."""
        return max(self.sink, query_block - self.size)

    @property
    def blocks(self) -> int:
        """Hot blocks that a sequence needs to go on, its last one included."""
        return self.sink + self.size + 1


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine: one model, split over `tp` ranks."""

    model: str
    """Directory in the Hugging Face layout: config.json, *.safetensors, tokenizer.json."""
    name: str | None = None
    """Served name; the directory's base name when None."""
    tp: int = 1
    """Ranks that share the model."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one for each rank."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: float32 on the CPU, the checkpoint's on CUDA."""
    max_seqs: int = 64
    """Requests running at once."""
    max_batch_tokens: int = 512
    """Tokens computed in one step, prompt chunks and single new tokens together."""
    max_queue: int = 256
    """Requests waiting at most; one more is refused as OVERLOADED."""
    max_context: int | None = None
    """Prompt and output together; the model's own limit when None."""
    kv_memory_bytes: int | None = None
    """KV cache of one rank; when None 512 MiB on the CPU, 90 % of the free memory on CUDA."""
    kv_compression: str = KV_COMPRESSION
    """lazy: full blocks behind the hot window are kept in eight bits; immediate: all full blocks are; per_layer: as
    lazy, in `kv_compressed_layers` alone; none."""
    kv_hot_window: int = 64
    """Tokens before a query's own block that lazy and per_layer keep in the model's dtype, in whole blocks."""
    kv_compressed_layers: tuple[int, ...] = ()
    """Layers that per_layer compresses, counted from 0."""
    kv_tenant_share: float = 1.0
    """Part of the KV cache that the running requests of one tenant may hold."""
    prefix_cache: bool = True
    deterministic: bool | None = None
    """A request's tokens do not depend on what else is in the batch. On by default on the CPU."""
    threads: int | None = None
    """CPU threads of a rank; the machine's cores shared out when None."""
    overlap: bool | None = None
    """Plan a step while the one before it runs, before its tokens are known. None: on CUDA."""
    collectives: str = "auto"
    """auto: on CUDA NCCL, and symmetric memory for small tensors; shared memory between CPU ranks. torch: NCCL or gloo
    for everything.
    """
    cuda_graphs: bool = True
    """On CUDA, record steps of decoding once and replay them, where the model can be recorded."""
    label: str = "w0"
    """Names the processes: `lockstep: rank <label>/<rank>`."""
    start_timeout_s: float = 600.0
    decode_deadline_s: float = 5.0
    """A step of decoding that takes longer has hung."""
    prefill_deadline_s: float = 15.0
    """The same for a step with prompt tokens in it."""

    def __post_init__(self) -> None:
        checks = (
            ("tp", self.tp >= 1, "must be at least 1"),
            ("device", self.device in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda"),
            (
                "dtype",
                self.dtype in ("auto", "float32", "bfloat16", "float16"),
                "must be auto, float32, bfloat16 or float16",
            ),
            ("collectives", self.collectives in ("auto", "torch"), "must be auto or torch"),
            ("max_seqs", 1 <= self.max_seqs <= 4096, "must be between 1 and 4096"),
            ("max_batch_tokens", self.max_batch_tokens >= self.max_seqs, "must be at least max_seqs"),
            ("max_queue", self.max_queue >= 1, "must be at least 1"),
            ("max_context", self.max_context is None or self.max_context >= 2, "must be at least 2"),
            ("kv_memory_bytes", self.kv_memory_bytes is None or self.kv_memory_bytes > 0, "must be positive"),
            (
                "kv_compression",
                self.kv_compression in ("lazy", "immediate", "per_layer", "none"),
                "must be lazy, immediate, per_layer or none",
            ),
            ("kv_hot_window", self.kv_hot_window >= BLOCK_SIZE, f"must be at least a block of {BLOCK_SIZE}"),
            (
                "kv_compressed_layers",
                bool(self.kv_compressed_layers) == (self.kv_compression == "per_layer"),
                "must name layers for per_layer, and for nothing else",
            ),
            (
                "kv_compressed_layers",
                min(self.kv_compressed_layers, default=0) >= 0
                and len(set(self.kv_compressed_layers)) == len(self.kv_compressed_layers),
                "must be different numbers from 0",
            ),
            ("kv_tenant_share", 0 < self.kv_tenant_share <= 1, "must be above 0 and at most 1"),
            ("threads", self.threads is None or self.threads >= 1, "must be at least 1"),
        )
        for field, holds, sentence in checks:
            if not holds:
                raise LockstepError(
                    ErrorCode.INVALID_REQUEST, f"{field} {sentence} (given: {getattr(self, field)})", field=field
                )

    @property
    def hot_window(self) -> HotWindow | None:
        """Which blocks stay hot; None: all."""
        if self.kv_compression == "none":
            return None
        if self.kv_compression == "immediate":
            return HotWindow(sink=0, size=0)
        return HotWindow(sink=1, size=-(-self.kv_hot_window // BLOCK_SIZE))
