"""The time of a decode step on n GPUs: bytes to read, kernels to start, sums to wait for.

Every constant is either measured by this repository's benchmarks or quoted, and says which. The same arithmetic is
compared with published measurements (`check`) before anything is predicted with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

KERNELS_A_LAYER = 12
"""Kernels a layer, with merged projections and fused norms; an unfused Llama has 35 to 40."""
KERNEL_S = 1.3e-6
"""Time lost at the ends of each kernel even in a CUDA graph (Hazy Research, 2025-05); more GPUs do not shorten it."""
_WIDTH = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Model:
    """A Llama's dimensions."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def layer_bytes(self) -> int:
        """Weights of all layers."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * _WIDTH * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_bytes(self) -> int:
        """Weights of the output head; the embedding is a lookup."""
        return _WIDTH * self.vocab * self.hidden

    def kv_bytes(self, gpus: int) -> float:
        """Keys and values of a token on one GPU; heads are repeated when there are fewer than GPUs."""
        return _WIDTH * 2 * self.layers * max(1, self.kv_heads / gpus) * (self.hidden // self.heads)

    @property
    def sums(self) -> int:
        """Collectives in a step: two a layer, the embedding's, and the gathering of logits."""
        return 2 * self.layers + 2


LLAMA_2_7B = Model("Llama-2-7B", 4096, 11008, 32, 32, 32, 32000)
LLAMA_3_8B = Model("Llama-3-8B", 4096, 14336, 32, 32, 8, 128256)
LLAMA_2_70B = Model("Llama-2-70B", 8192, 28672, 80, 64, 8, 32000)
LLAMA_3_70B = Model("Llama-3-70B", 8192, 28672, 80, 64, 8, 128256)
MODELS = (LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B)


@dataclass(frozen=True)
class Latency:
    """The latency of a sum over GPUs: for each number of GPUs a curve by message size, straight between its points in
    the logarithm of the size.
    """

    name: str
    source: str
    points_us: Mapping[int, Mapping[int, float]]
    """GPUs -> bytes -> microseconds."""
    most_bytes: int
    """The largest message size for which the curve is known."""

    def seconds(self, gpus: int, size: float) -> float:
        """Seconds of one sum of a message of this size."""
        points = sorted(self.points_us[gpus].items())
        if size <= points[0][0]:
            return points[0][1] * 1e-6
        for (low, first), (high, last) in pairwise(points):
            if size <= high:
                share = math.log(size / low) / math.log(high / low)
                return (first + share * (last - first)) * 1e-6
        return points[-1][1] * 1e-6


_KIB, _MIB = 1024, 1024 * 1024


def _alike(points_us: Mapping[int, float]) -> dict[int, Mapping[int, float]]:
    """A latency that is used for any number of GPUs, where a source has only one."""
    return dict.fromkeys((2, 4, 8), points_us)


QUOTED = (
    Latency(
        "NCCL",
        "sgl-project/sglang#10571 (graph replay, 2 and 4 KiB); vllm-project/vllm#24111 (4 H100s, 0.5 to 4 MiB)",
        _alike({4 * _KIB: 17.0, 512 * _KIB: 17.0, _MIB: 19.0, 4 * _MIB: 37.0}),
        4 * _MIB,
    ),
    Latency(
        "symmetric memory, one-shot",
        "sgl-project/sglang#10571 (graph replay, 2 and 4 KiB); vllm-project/vllm#24111 (one-stage kernel, 4 H100s)",
        _alike({4 * _KIB: 9.0, 512 * _KIB: 10.0, _MIB: 15.0, 4 * _MIB: 38.0}),
        4 * _MIB,
    ),
    Latency(
        "fastest published kernel",
        "sgl-project/sglang#2904 (H100, SGLang's kernel, no graph, size 4096 of an unnamed unit)",
        {2: {8 * _KIB: 3.9}, 4: {8 * _KIB: 3.7}, 8: {8 * _KIB: 5.7}},
        16 * _KIB,
    ),
)


@dataclass(frozen=True)
class Device:
    """A GPU."""

    name: str
    bandwidth: float
    """Bytes a second that reading reaches."""
    memory: float
    source: str


H200 = Device("H200", 4.3e12, 141e9, "quoted: what a device copy reaches, of 4.8 TB/s in the datasheet")


def shard_bytes(model: Model, gpus: int, batch: int, context: int) -> float:
    """Bytes that one GPU reads in a step: its weights, and the cache of `batch` sequences of `context` tokens."""
    return (model.layer_bytes + model.head_bytes) / gpus + batch * context * model.kv_bytes(gpus)


def shard_s(model: Model, device: Device, gpus: int, batch: int, context: int) -> float:
    """Seconds that one GPU computes its part of a decode step, without collectives."""
    return shard_bytes(model, gpus, batch, context) / device.bandwidth + model.layers * KERNELS_A_LAYER * KERNEL_S


def message_bytes(model: Model, batch: int) -> int:
    """Bytes of one sum: the hidden states of the step's tokens."""
    return batch * model.hidden * _WIDTH


def predict(
    model: Model,
    device: Device,
    latency: Latency,
    gpus: int,
    batch: int = 1,
    context: int = 1024,
    measured: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The speed-up on `gpus` GPUs over one, and where the time goes.

    Args:
        model, device, latency, gpus, batch, context: what to predict.
        measured: seconds of a shard's step alone on a GPU, by the number of GPUs, where they were measured.
    """
    known = measured or {}
    one, shard = (known.get(n, shard_s(model, device, n, batch, context)) for n in (1, gpus))
    sums = model.sums * latency.seconds(gpus, message_bytes(model, batch))
    speed_up = one / (shard + sums)
    return {
        "model": model.name,
        "gpus": gpus,
        "batch": batch,
        "context": context,
        "latency": latency.name,
        "one_gpu_ms": round(one * 1e3, 3),
        "fits_one_gpu": shard_bytes(model, 1, batch, context) < device.memory,
        "shard_ms": round(shard * 1e3, 3),
        "shard": "measured" if gpus in known and 1 in known else "computed",
        "sums_ms": round(sums * 1e3, 3),
        "speed_up": round(speed_up, 2),
        "efficiency": round(speed_up / gpus, 3),
        "communication": round(sums / (shard + sums), 3),
    }


def affordable_us(
    model: Model, device: Device, gpus: int, speed_up: float, batch: int = 1, context: int = 1024
) -> float:
    """Microseconds that one sum may take for the speed-up; negative: the speed-up cannot be reached."""
    one, shard = (shard_s(model, device, n, batch, context) for n in (1, gpus))
    return (one / speed_up - shard) / model.sums * 1e6


GPT_FAST = {  # tokens/s by GPUs: README, 8 A100-80GB limited to 330 W, batch 1, bf16
    LLAMA_2_7B: {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4},
    LLAMA_3_8B: {1: 93.8, 2: 149.1, 4: 217.2, 8: 276.0},
    LLAMA_2_70B: {2: 21.3, 4: 38.0, 8: 62.5},
}


def check() -> list[dict[str, Any]]:
    """The arithmetic against published measurements: one latency for each number of GPUs is read off Llama-2-7B, then
    the other models' steps are predicted with it.

    gpt-fast splits its layers, not the head; its kernels' time is contained in the bandwidth that it reaches on one
    GPU.
    """
    rows: list[dict[str, Any]] = []
    implied: dict[int, float] = {}
    for model, measured in GPT_FAST.items():
        fewest = min(measured)
        fixed = model.layers * KERNELS_A_LAYER * KERNEL_S
        weights = model.layer_bytes / fewest + model.head_bytes
        sums = 2 * model.layers
        reading = 1 / measured[fewest] - fixed - (sums * implied[fewest] if fewest > 1 else 0.0)
        bandwidth = weights / reading
        for gpus, speed in measured.items():
            if gpus == fewest:
                continue
            shard = (model.layer_bytes / gpus + model.head_bytes) / bandwidth + fixed
            if gpus not in implied:
                implied[gpus] = (1 / speed - shard) / sums
            predicted = 1 / (shard + sums * implied[gpus])
            rows.append(
                {
                    "model": model.name,
                    "gpus": gpus,
                    "measured_tokens_per_s": speed,
                    "predicted_tokens_per_s": round(predicted, 1),
                    "error": round(predicted / speed - 1, 3),
                    "latency_us": round(implied[gpus] * 1e6, 1),
                    "fitted": model is LLAMA_2_7B,
                }
            )
    return rows


def predictions(
    latencies: Sequence[Latency] = QUOTED, measured: Mapping[str, Mapping[int, float]] | None = None
) -> list[dict[str, Any]]:
    """Predictions for all models at 2, 4 and 8 GPUs: one stream of 1,024 tokens, and 64 of 4,096.

    Args:
        latencies: the latencies of sums.
        measured: model -> GPUs -> seconds of a shard's step alone on a GPU with the one stream.
    """
    return [
        predict(model, H200, latency, gpus, batch, context, (measured or {}).get(model.name) if batch == 1 else None)
        for batch, context in ((1, 1024), (64, 4096))
        for model in MODELS
        for latency in latencies
        for gpus in (2, 4, 8)
        if gpus in latency.points_us and message_bytes(model, batch) <= latency.most_bytes
    ]
