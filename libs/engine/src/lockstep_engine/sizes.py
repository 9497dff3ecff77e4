"""Sizes of the segments that driver and ranks share. Both sides compute them from the same settings."""

import platform

from lockstep_engine.config import BLOCK_SIZE, EngineConfig, HotWindow
from lockstep_engine.plan import PoolSizes, RankSpec

CANARY_ROWS = 9
"""Tokens that a rank computes at its start both in a chunk and one by one, to check itself."""

FLAG_BYTES = 64
"""A cache line for each rank's flag."""


def message_sizes(spec: RankSpec) -> tuple[int, int]:
    """Most bytes of a plan and of a result."""
    blocks = -(-spec.context_length // BLOCK_SIZE)
    tables = 4 * spec.max_seqs * blocks
    if spec.hot_window is not None:  # hot ones, too, and for each block in them and in the step a move
        tables = 2 * tables + 8 * spec.max_seqs * (spec.hot_window.size + 2) + spec.max_batch_tokens
    # A new occupant of a slot brings what penalties need of its past (9 bytes an id at worst, prompt and output),
    # and its bias.
    added = spec.max_seqs * (18 * spec.context_length + 32 * 1024)
    plan = 4096 + 8 * spec.max_batch_tokens + 64 * spec.max_seqs + tables + added
    # A step scores as many prompt tokens as it can sample, for evaluation with all of the vocabulary. Memory that is
    # never written takes no room.
    return plan, 4096 + spec.max_seqs * (1024 + 4 * (2 + spec.vocab_size))


def collective_bytes(spec: RankSpec) -> int:
    """Bytes that a rank can contribute at once: the step's hidden states, or its part of the logits. More goes in
    pieces.
    """
    hidden = max(spec.max_batch_tokens, spec.max_seqs) * spec.hidden_size
    logits = max(spec.max_seqs, CANARY_ROWS) * -(-spec.vocab_size // spec.tp)
    return -(-max(hidden, logits) * 4 // 64) * 64


def canary_tokens(spec: RankSpec) -> int:
    """Length of the text with which a rank checks itself: across the end of a block, and of the hot window."""
    window = spec.hot_window.blocks if spec.hot_window is not None else 1
    return max(2, min(spec.context_length, spec.max_batch_tokens, window * BLOCK_SIZE + 24))


def pool_sizes(spec: RankSpec, memory: int, block_bytes: int, cold_block_bytes: int) -> PoolSizes:
    """Blocks of each pool that a rank has memory for, and use.

    With compression the hot pool is what all slots need to go on and a step fills, so that what is left over is for
    contexts; of little memory it gets half, or more if long contexts need it.
    """
    blocks, rule = -(-spec.context_length // BLOCK_SIZE), spec.hot_window
    if rule is None or rule.blocks >= blocks:
        return PoolSizes(min(memory // block_bytes, spec.max_seqs * blocks))
    cold_each = blocks - rule.blocks
    contexts = memory // (rule.blocks * block_bytes + cold_each * cold_block_bytes)
    useful = spec.max_seqs * rule.blocks + -(-spec.max_batch_tokens // BLOCK_SIZE)
    hot = min(useful, max(memory // 2 // block_bytes, contexts * rule.blocks))
    hot = max(hot, min(rule.blocks, memory // block_bytes))
    return PoolSizes(hot, min((memory - hot * block_bytes) // cold_block_bytes, spec.max_seqs * cold_each))


def kv_bytes(tokens: int, rule: HotWindow | None, block_bytes: int, cold_block_bytes: int) -> int:
    """Memory that a sequence's KV takes between steps when so many of its tokens have been computed."""
    blocks = -(-tokens // BLOCK_SIZE)
    cold = 0 if rule is None else max(0, rule.first_hot(tokens // BLOCK_SIZE) - rule.sink)
    return (blocks - cold) * block_bytes + cold * cold_block_bytes


def segment_bytes(size: int, capacity: int) -> int:
    """Bytes of a segment for collectives of `size` ranks that contribute up to `capacity` bytes each."""
    return size * FLAG_BYTES + 2 * size * capacity


def collectives_segment_bytes(config: EngineConfig, spec: RankSpec) -> int:
    """Bytes of the segment through which CPU ranks exchange tensors; 0 when they shall not.

    Plain loads and stores order it, which holds on x86 alone.
    """
    if config.tp == 1 or config.collectives == "torch" or platform.machine() not in ("x86_64", "AMD64"):
        return 0
    return segment_bytes(config.tp, collective_bytes(spec))
