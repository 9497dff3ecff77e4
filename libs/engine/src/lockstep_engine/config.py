"""The settings of an engine. Plain data; this module does not import torch."""

from dataclasses import dataclass

from lockstep_common.errors import invalid
from lockstep_common.prefix_keys import BLOCK_TOKENS

BLOCK_SIZE = BLOCK_TOKENS
"""Tokens in a block of KV cache."""


RECORDED_TOKENS = 512
"""Most tokens of a step with chunks of prompts that is a CUDA graph; by default also of any step on CUDA, so that
nearly all are one launch. Chosen by arithmetic with what was measured of Llama-3-8B on an H200: running streams wait
some 12 ms for a step of 512 tokens and 45 ms for one of 2048, where products have 1.12 of the pace
(`libs/engine/README.md`, "Steps with prompts")."""
_STEP_TOKENS = 512
"""On the CPU every token takes its time, and running streams wait for the step. Also for `device` auto, which is known
by the ranks alone."""


@dataclass(frozen=True)
class HotWindow:
    """The rule by which a query sees a full block of KV hot (in the model's dtype, of all layers) or cold (compressed;
    of a model with `WindowedLayers`, a copy of the other layers if there is no compression).

    It depends on positions alone. Therefore a token has the same logits, to the bit, whether it is generated, computed
    as part of a prompt in chunks of any size, computed again after a preemption, or computed on another worker.
    """

    sink: int
    """Number of a sequence's first blocks that stay hot."""
    size: int
    """Number of blocks before a query's own block that it sees hot. Earlier ones, except the sink, it sees cold."""

    def first_hot(self, query_block: int) -> int:
        """The first hot block after the sink, for queries in block `query_block`: these see blocks from `sink` up to it
        cold.
        """
        return max(self.sink, query_block - self.size)

    @property
    def blocks(self) -> int:
        """Hot blocks that a sequence needs to continue, its last one included."""
        return self.sink + self.size + 1


@dataclass(frozen=True)
class SlidingWindow:
    """What the queries of a model see that has a window in every layer. Blocks before it are of no use to any later
    query of the sequence.
    """

    tokens: int
    """A query sees at most so many last tokens, its own included, in whichever layer."""

    def first_seen(self, position: int) -> int:
        """The first block that a query at `position`, or a later one, sees."""
        return max(0, position - self.tokens + 1) // BLOCK_SIZE

    @property
    def blocks_before(self) -> int:
        """Most blocks before its own that a query sees."""
        return -(-(self.tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class WindowedLayers:
    """The layers that have a window, in a model whose other layers have none. They have no cold blocks: the hot window
    reaches back as far as theirs does, so that none of their queries sees a cold block.
    """

    window: SlidingWindow
    """What their queries see."""
    numbers: tuple[int, ...]
    """Of these layers, ascending, counted from 0."""
    total: int
    """Layers of the model."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine: one model, split over `tp` ranks."""

    model: str
    """Directory in the Hugging Face layout: config.json, *.safetensors, tokenizer.json."""
    name: str | None = None
    """Name of the model in the API; the directory's base name if None."""
    tp: int = 1
    """Ranks that share the model."""
    tp_shards: int = 1
    """4: on the CPU with the compiled kernels, a tp of 1, 2 and 4 gives the same bits and has one fingerprint. 1: each
    tp has bits of its own. Steps of several sequences, and mixtures of experts, compute a little faster. On any device
    it is also in how many parts, at most, a store outside of the machine gets a block of all ranks.
    """
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is a GPU for each rank."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: float32 on the CPU, the checkpoint's own on CUDA. It is what the engine
    computes in: on the CPU a checkpoint's weights of 16 bits stay so in memory where the kernels were built, with the
    same results.
    """
    max_seqs: int = 64
    """Most requests that run at once."""
    max_batch_tokens: int | None = None
    """Most tokens computed in one step, over all requests. None: 512, and at least `max_seqs`. On CUDA a step of more
    is not a CUDA graph; 2048 compute long prompts faster, and running streams wait longer for each step."""
    max_queue: int = 256
    """Most requests that wait. One more is refused as OVERLOADED."""
    max_context: int | None = None
    """Most tokens of prompt and output together; the model's own limit if None."""
    kv_memory_bytes: int | None = None
    """Size of one rank's KV cache. None: 512 MiB on the CPU; on CUDA 90 % of the free memory, less what recorded steps
    and the largest step take."""
    kv_compression: str = "lazy"
    """lazy: full blocks before the hot window are stored in eight bits; immediate: all full blocks are; per_layer: as
    lazy, but only in `kv_compressed_layers`; none."""
    kv_hot_window: int = 64
    """Size of the hot window in tokens, rounded up to full blocks: this many tokens before a query's own block are kept
    in the model's dtype (lazy and per_layer)."""
    kv_compressed_layers: tuple[int, ...] = ()
    """Layers that per_layer compresses, counted from 0."""
    kv_tenant_share: float = 1.0
    """Largest part of the KV cache that the running requests of one tenant hold."""
    prefix_cache: bool = True
    """Keep the KV of finished requests and reuse it for prompts with the same beginning."""
    host_cache_bytes: int = 0
    """Size of the prefix cache's second tier in host memory, for each rank: blocks that the KV cache has no room for
    any more are kept there. 0: there is none."""
    embeddings: str = "auto"
    """How embeddings are made of hidden states: last (the last token's), mean, none, or auto: as the checkpoint's
    1_Pooling/config.json says, none without that file."""
    deterministic: bool | None = None
    """The tokens of a request do not depend on the other requests of a batch, nor on where its prompt was cut. None: on
    the CPU. On CUDA these kernels are used only where asked for, because their cost on several GPUs was not measured.
    """
    threads: int | None = None
    """CPU threads of a rank. None: the CPUs that the process may use (its container's CPU limit, its affinity), divided
    by the number of ranks and rounded down."""
    overlap: bool | None = None
    """Plan a step while the one before it runs, before that one's tokens are known. None: yes, but on the CPU
    not while a stream with a grammar runs."""
    collectives: str = "auto"
    """auto: NCCL on CUDA, with symmetric memory for small tensors; shared memory between CPU ranks. torch: NCCL or gloo
    for everything.
    """
    cuda_graphs: bool = True
    """On CUDA, record decode steps and steps of up to 512 tokens with chunks of prompts as CUDA graphs and replay them,
    if the model can be recorded."""
    fast_path: str = "required"
    """What a GPU must have, with `device` cuda. required: Triton's kernels, and CUDA graphs unless `cuda_graphs` is
    off; a start fails without them, with the reason. prebuilt: that, and every kernel compiled when the image was
    built; not with `deterministic`, whose kernels are compiled at the start. preferred: nothing; what is missing is
    logged, and attention is computed by torch. Memory that runs out while steps are recorded fails a start in any case:
    a lower `max_seqs` takes less."""
    label: str = "w0"
    """Part of the processes' names: `lockstep: rank <label>/<rank>`."""
    start_timeout_s: float = 600.0
    """Longest time for ranks to become ready."""
    decode_deadline_s: float = 5.0
    """A decode step that takes longer is taken for a hang."""
    prefill_deadline_s: float = 15.0
    """A step with prompt tokens, or with blocks from host memory, that takes longer is taken for a hang. On a CPU one
    with few prompt tokens has less time: `decode_deadline_s` and ten times what so many take at the measured pace."""

    def __post_init__(self) -> None:
        checks = (
            ("tp", self.tp >= 1, "must be at least 1"),
            ("tp_shards", self.tp_shards in (1, 4), "must be 1 or 4"),
            ("device", self.device in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda"),
            (
                "dtype",
                self.dtype in ("auto", "float32", "bfloat16", "float16"),
                "must be auto, float32, bfloat16 or float16",
            ),
            ("collectives", self.collectives in ("auto", "torch"), "must be auto or torch"),
            (
                "fast_path",
                self.fast_path in ("required", "prebuilt", "preferred"),
                "must be required, prebuilt or preferred",
            ),
            (
                "fast_path",
                not (self.fast_path == "prebuilt" and self.deterministic and self.device == "cuda"),
                "cannot be prebuilt with deterministic: the kernels of that mode are compiled at the start",
            ),
            ("max_seqs", 1 <= self.max_seqs <= 4096, "must be between 1 and 4096"),
            ("max_batch_tokens", self.step_tokens >= self.max_seqs, "must be at least max_seqs"),
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
            ("host_cache_bytes", self.host_cache_bytes >= 0, "must be at least 0"),
            ("host_cache_bytes", self.prefix_cache or not self.host_cache_bytes, "must be 0 without prefix_cache"),
            (
                "embeddings",
                self.embeddings in ("auto", "last", "mean", "none"),
                "must be auto, last, mean or none",
            ),
            ("kv_tenant_share", 0 < self.kv_tenant_share <= 1, "must be above 0 and at most 1"),
            ("threads", self.threads is None or self.threads >= 1, "must be at least 1"),
        )
        for field, holds, sentence in checks:
            if not holds:
                raise invalid(field, f"{sentence} (given: {getattr(self, field)})")

    @property
    def step_tokens(self) -> int:
        """`max_batch_tokens`, or what is chosen for the device."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return max(self.max_seqs, RECORDED_TOKENS if self.device == "cuda" else _STEP_TOKENS)

    @property
    def hot_window(self) -> HotWindow | None:
        """Which blocks a query sees hot, and which cold; None: all blocks stay hot."""
        if self.kv_compression == "none":
            return None
        if self.kv_compression == "immediate":
            return HotWindow(sink=0, size=0)
        return HotWindow(sink=1, size=-(-self.kv_hot_window // BLOCK_SIZE))

    def hot_window_with(self, windowed: WindowedLayers | None) -> HotWindow | None:
        """Which blocks the sequences of a model keep hot; None: all.

        Args:
            windowed: its layers with a window, if these have no cold blocks. Then the others have them also without
                compression: as copies of the hot blocks, with the same bits.
        """
        rule = self.hot_window
        if windowed is None:
            return rule
        before = windowed.window.blocks_before
        return HotWindow(0, before) if rule is None else HotWindow(rule.sink, max(rule.size, before))

    def compressed_with(self, windowed: WindowedLayers | None) -> HotWindow | None:
        """Which blocks queries see compressed, by the same rule; None: no block."""
        return None if self.hot_window is None else self.hot_window_with(windowed)
