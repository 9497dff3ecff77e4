"""What a user sets about an engine. Plain data; nothing here imports torch."""

from dataclasses import dataclass

from lockstep_common.errors import ErrorCode, LockstepError

BLOCK_SIZE = 16
"""Tokens in a block of KV cache."""


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
    prefix_cache: bool = True
    deterministic: bool | None = None
    """A request's tokens do not depend on what else is in the batch. On by default on the CPU."""
    threads: int | None = None
    """CPU threads of a rank; the machine's cores shared out when None."""
    collectives: str = "auto"
    """auto: NCCL on CUDA, shared memory between CPU ranks; torch: torch.distributed everywhere (gloo on the CPU)."""
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
            ("threads", self.threads is None or self.threads >= 1, "must be at least 1"),
        )
        for field, holds, sentence in checks:
            if not holds:
                raise LockstepError(
                    ErrorCode.INVALID_REQUEST, f"{field} {sentence} (given: {getattr(self, field)})", field=field
                )
