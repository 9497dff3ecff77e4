"""Chooses the implementation of attention for a step."""

from lockstep_engine.attention import StepAttention, StepLayout
from lockstep_engine.attention_cpu import CompiledAttention, DecodingAttention
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.kernels import gpu
from lockstep_engine.kv_cache import KvCache


def step_attention(
    cache: KvCache, step: StepLayout, *, deterministic: bool, kept: DecodingAttention | None = None
) -> StepAttention:
    """The best attention for the cache's device and dtype.

    Args:
        deterministic: whether a query's bits must not depend on the other sequences, nor on the step's chunks.
        kept: where the compiled kernel serves, it makes the step's attention, valid until the next step's.
    """
    if gpu.usable(cache.keys.device, cache.keys.dtype, cache.head_dim, cache.latent):
        from lockstep_engine.attention_triton import TritonAttention  # noqa: PLC0415 - loads Triton

        return TritonAttention(cache, step, exact=deterministic)
    if cache.by_cpu_kernel:
        return CompiledAttention(cache, step) if kept is None else kept.of(cache, step)
    return TorchAttention(cache, step, deterministic=deterministic)
