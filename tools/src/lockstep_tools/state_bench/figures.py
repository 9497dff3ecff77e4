"""When a fetch of KV blocks is faster than computing them: the arithmetic, and figures of others with their sources.

All are of an idle worker: one that is busy gains by every block that it does not compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_engine.config import HotWindow
from lockstep_worker.kv_store.gate import LinkEstimate, break_even_blocks

BLOCK_TOKENS = 16
CALLS = 2
"""Answers that a fetch waits for: which blocks are there, and the first byte of them."""
WINDOW = HotWindow(sink=1, size=4)
"""What `lazy` keeps uncompressed by default."""


@dataclass(frozen=True)
class Model:
    """A model on some hardware."""

    name: str
    kv_bytes_per_token: int
    """Over all ranks."""
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Network:
    """A way to the blocks."""

    name: str
    bytes_per_s: float
    latency_s: float
    """Of one answer."""

    @property
    def link(self) -> LinkEstimate:
        """As the gate takes it."""
        return LinkEstimate(self.latency_s, self.bytes_per_s)


QUOTED_MODELS = (
    Model("Llama-3-8B, 1 H100", 128 << 10, 30_800),
    Model("Llama-3-8B, 4 H100", 128 << 10, 123_000),
    Model("Llama-3-70B, 1 H100 (compute only)", 320 << 10, 3_500),
    Model("Llama-3-70B, 4 H100", 320 << 10, 14_000),
)
QUOTED_NETWORKS = (
    Network("one Redis, 1.9 GB/s", 1.9e9, 0.001),
    Network("host memory, 50 GB/s", 50e9, 0.00005),
    Network("RDMA pool, 87 GB/s", 87e9, 0.0001),
)
SOURCES = (
    "KV bytes of a token in bfloat16: kvcache-ai/Mooncake, docs/source/performance/mooncake/storage-benchmark.md.",
    "Blocks in eight bits: half of that. The first block and the last four, the hot window, are fetched in bfloat16.",
    "Prefill: computed, two operations for each parameter and token at half of an H100's 989 TFLOP/s; 4 times on 4.",
    "Measured for comparison: 15,926 tokens/s, Qwen3-32B on two H100 (llm-d/llm-d PR #2071).",
    "Redis: 14 to 16 Gb/s of one server with values of 32 MiB (LMCache/LMCache PR #1238).",
    "Host memory: about 50 GB/s one way (vLLM's post on its offloading connector, 2025-12-29).",
    "RDMA: 87 GB/s over four links of 200 Gb/s (kvcache-ai/Mooncake, README).",
    "Latencies of the three are assumptions: 1 ms, 0.05 ms, 0.1 ms.",
)


def break_even_tokens(model: Model, network: Network, window: HotWindow | None = None) -> int | None:
    """The shortest prefix, in tokens, that an idle worker fetches; None: it computes prefixes of any length.

    Args:
        model: what computes.
        network: what fetches.
        window: blocks before it are in eight bits, those in it are fetched after them. None: all blocks are in the
            model's precision.
    """
    block_bytes, block_s = BLOCK_TOKENS * model.kv_bytes_per_token, BLOCK_TOKENS / model.prefill_tokens_per_s
    blocks = break_even_blocks(block_bytes, block_s, network.link.of_fetch(CALLS, 0))
    hot = 0 if window is None else window.sink + window.size
    if window is not None and (blocks is None or blocks > hot):
        link = network.link.of_fetch(CALLS, hot * block_bytes)
        cold = break_even_blocks(block_bytes // 2, block_s, link, hot)
        blocks = None if cold is None else hot + cold
    return None if blocks is None else blocks * BLOCK_TOKENS


def needed_bytes_per_s(model: Model) -> float:
    """The bandwidth below which computing is as fast for prefixes of any length."""
    return model.kv_bytes_per_token * model.prefill_tokens_per_s


def table(models: Sequence[Model], networks: Sequence[Network]) -> list[list[str]]:
    """A row for each model: the bandwidth that it needs, then its break-even over each network, in full and in eight
    bits with a hot window.
    """
    return [
        [
            model.name,
            f"{needed_bytes_per_s(model) / 1e6:,.0f} MB/s",
            *(
                " / ".join(_cell(break_even_tokens(model, network, window)) for window in (None, WINDOW))
                for network in networks
            ),
        ]
        for model in models
    ]


def _cell(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"
