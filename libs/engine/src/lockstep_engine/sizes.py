"""Sizes of collectives, of KV pools and of the self-test. Driver and ranks compute them from the same settings."""

import platform

from lockstep_common.errors import invalid

from lockstep_engine.blocks import HostSizes, PoolSizes
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, HotWindow
from lockstep_engine.control import RankSpec

CANARY_ROWS = 9
"""Tokens that a rank computes at its start both as a chunk and one by one, as a self-test."""

_CANARY_TOKENS = 504
_EXACT_CANARY_TOKENS = 288
"""At least so many in the exact mode on a GPU: a chunk with more rows than the last of `tiles.PRODUCT_ROWS`."""

FLAG_BYTES = 64
"""Size of each rank's flag: a cache line."""

_CPU_KV_BYTES = 512 * 2**20
_STEP_COPY_BYTES = {"cpu": 8 * 2**20, "cuda": 32 * 2**20}
"""Bytes that a step copies at most from host memory beside other sequences: about a millisecond."""
_RUNNING_PER_CACHED = 4
"""One block of the hot pool for each so many that running sequences need is for the hot windows of cached texts:
without them a full batch leaves none, and a conversation's next turn cannot start after its cold blocks."""
_CUDA_SHARE = 0.9
"""Part of a GPU's free memory that the KV cache, graphs and the largest step take. The rest is for what was not
measured: memory that torch's allocator cannot use because it lies in pieces, and other processes."""


def collective_bytes(spec: RankSpec) -> int:
    """Bytes that a rank can contribute to one collective: the hidden states of a step, or its part of the logits.
    Larger tensors are sent in pieces.
    """
    hidden = max(spec.config.step_tokens, spec.config.max_seqs) * spec.model.hidden_size
    logits = max(spec.config.max_seqs, CANARY_ROWS) * -(-spec.model.vocab_size // spec.config.tp)
    return -(-max(hidden, logits) * 4 // 64) * 64


def canary_tokens(spec: RankSpec, *, exact_gpu: bool = False) -> int:
    """Length of the self-test's text: it crosses the end of a block, and of the hot window unless that is very large.
    It does not depend on how much a step may hold, so that workers with other limits get the same fingerprint.
    """
    hot_blocks = spec.compressed.blocks if spec.compressed is not None else 1
    wanted = max(hot_blocks * BLOCK_SIZE + 24, _EXACT_CANARY_TOKENS if exact_gpu else 0)
    return max(2, min(spec.model.context_length, _CANARY_TOKENS, wanted))


def kv_memory_bytes(config: EngineConfig, free_bytes: int | None, reserved_bytes: int) -> int:
    """Bytes of one rank's KV cache.

    Args:
        config: its `kv_memory_bytes` decides, if set.
        free_bytes: free memory of the rank's GPU; None on the CPU.
        reserved_bytes: what recorded decode steps and the largest step will take of it.

    Raises:
        LockstepError: INVALID_REQUEST: `kv_memory_bytes` is set, and does not fit beside that.
    """
    if config.kv_memory_bytes is not None:
        if free_bytes is not None and config.kv_memory_bytes + reserved_bytes > free_bytes:
            raise invalid(
                "kv_memory_bytes",
                f"is {config.kv_memory_bytes}; a GPU has {free_bytes} bytes free, and {reserved_bytes} of them are for "
                "recorded steps and the largest step (max_batch_tokens, max_seqs)",
            )
        return config.kv_memory_bytes
    if free_bytes is None:
        return _CPU_KV_BYTES
    return max(0, int(free_bytes * _CUDA_SHARE) - reserved_bytes)


def hot_pool_blocks(config: EngineConfig, hot_window: HotWindow) -> int:
    """Hot blocks that can be used: what all sequences need to continue and what one step fills, and beyond that the hot
    windows of cached texts.
    """
    running = config.max_seqs * hot_window.blocks + -(-config.step_tokens // BLOCK_SIZE)
    return running + -(-running // _RUNNING_PER_CACHED)


def pool_sizes(spec: RankSpec, memory: int, block_bytes: int, cold_block_bytes: int) -> PoolSizes:
    """How many blocks of each pool a rank should have: no more than `memory` bytes hold, and no more than it can use.

    With a hot window, the hot pool has what `hot_pool_blocks` says; the rest of the memory is for contexts. If there is
    too little, the hot pool gets half of it, or more if long contexts need it, or less if else not even one fits. Where
    sequences drop what lies before the model's window, the rest of what whole contexts would take is for cached texts.
    """
    blocks, hot_window, window = -(-spec.model.context_length // BLOCK_SIZE), spec.hot_window, spec.model.window
    if hot_window is None or hot_window.blocks >= blocks:
        return PoolSizes(min(memory // block_bytes, spec.config.max_seqs * blocks))
    cold_each = blocks - hot_window.blocks
    held = cold_each if window is None else min(cold_each, window.blocks_before - hot_window.size + 1)
    contexts = memory // (hot_window.blocks * block_bytes + held * cold_block_bytes)
    hot = min(hot_pool_blocks(spec.config, hot_window), max(memory // 2 // block_bytes, contexts * hot_window.blocks))
    if contexts:
        hot = min(hot, (memory - held * cold_block_bytes) // block_bytes)
    hot = max(hot, min(hot_window.blocks, memory // block_bytes))
    return PoolSizes(hot, min((memory - hot * block_bytes) // cold_block_bytes, spec.config.max_seqs * cold_each))


def host_sizes(
    config: EngineConfig, device: str, cold: bool, block_bytes: int, cold_block_bytes: int, units: int = 1
) -> HostSizes:
    """The size of a rank's tier in host memory.

    Args:
        config: its `host_cache_bytes` decides.
        device: cpu or cuda.
        cold: whether there is a cold pool.
        block_bytes, cold_block_bytes: sizes of a hot block and of a cold one.
        units: parts of a rank's block.

    Raises:
        LockstepError: INVALID_REQUEST: it would not hold one block.
    """
    if config.host_cache_bytes == 0:
        return HostSizes()
    slot_bytes = cold_block_bytes if cold else block_bytes
    hot_slots = -(-block_bytes // slot_bytes)
    slots = config.host_cache_bytes // slot_bytes
    if slots < hot_slots:
        raise invalid("host_cache_bytes", f"must be 0 or at least {hot_slots * slot_bytes}, the size of a block")
    step_slots = max(hot_slots, _STEP_COPY_BYTES[device] // slot_bytes)
    return HostSizes(slots, slot_bytes, hot_slots, step_slots, block_bytes, units)


def check_host_memory(config: EngineConfig, usable_bytes: int) -> None:
    """Check that all ranks' tiers in host memory fit into it. An allocation would succeed, and a rank be killed once it
    has filled its tier.

    Args:
        config: its `host_cache_bytes` is what each rank takes.
        usable_bytes: memory that the ranks can have together.

    Raises:
        LockstepError: INVALID_REQUEST: they do not fit.
    """
    size = config.tp * config.host_cache_bytes
    if size > usable_bytes:
        raise invalid(
            "host_cache_bytes", f"is more than there is: {size} bytes for all ranks, of {usable_bytes} available"
        )


def segment_bytes(size: int, capacity: int) -> int:
    """Bytes of a segment for collectives of `size` ranks that contribute up to `capacity` bytes each."""
    return size * FLAG_BYTES + 2 * size * capacity


def collectives_segment_bytes(spec: RankSpec) -> int:
    """Size of the segment through which CPU ranks exchange tensors; 0 where they use torch.distributed instead.

    The ranks synchronize by plain loads and stores, which is correct on x86 only.
    """
    config = spec.config
    if config.tp == 1 or config.collectives == "torch" or platform.machine() not in ("x86_64", "AMD64"):
        return 0
    return segment_bytes(config.tp, collective_bytes(spec))
