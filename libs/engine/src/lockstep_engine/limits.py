"""What bounds the scheduler."""

from dataclasses import dataclass

from lockstep_engine.config import HotWindow, SlidingWindow


@dataclass(frozen=True)
class Limits:
    """Limits of what the scheduler runs and queues."""

    max_seqs: int
    max_batch_tokens: int
    max_queue: int
    context_length: int
    prefix_cache: bool
    hot_window: HotWindow | None = None
    window: SlidingWindow | None = None
    """As in `ModelInfo`."""
    copies: bool = False
    """Cold blocks have the bits of the hot ones that they are made of, so that a query may see either."""
    tenant_share: float = 1.0
    mean_pooling: bool = False
    """Embeddings are made of all hidden states of a text, those of cached prefixes included."""
