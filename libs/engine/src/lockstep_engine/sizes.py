"""Sizes of the segments that driver and ranks share. Both sides compute them from the same settings."""

import platform

from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.plan import RankSpec

CANARY_TOKENS = 40
"""Tokens that a rank computes at its start to warm up and to check itself."""

FLAG_BYTES = 64
"""A cache line for each rank's flag."""


def message_sizes(spec: RankSpec) -> tuple[int, int]:
    """Most bytes of a plan and of a result."""
    tables = spec.max_seqs * -(-spec.context_length // BLOCK_SIZE) * 4
    # A new occupant of a slot brings what penalties need of its past (9 bytes an id at worst, prompt and output),
    # and its bias.
    added = spec.max_seqs * (18 * spec.context_length + 32 * 1024)
    return 4096 + 4 * spec.max_batch_tokens + 64 * spec.max_seqs + tables + added, 4096 + spec.max_seqs * 1024


def collective_bytes(spec: RankSpec) -> int:
    """Bytes that a rank can contribute at once: the step's hidden states, or its part of the logits. More goes in
    pieces.
    """
    hidden = max(spec.max_batch_tokens, spec.max_seqs) * spec.hidden_size
    logits = max(spec.max_seqs, CANARY_TOKENS) * -(-spec.vocab_size // spec.tp)
    return -(-max(hidden, logits) * 4 // 64) * 64


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
