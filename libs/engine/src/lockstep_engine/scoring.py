"""How attention scores its keys: parameters that a model's layers pass to every implementation. Data only."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scoring:
    """How the scores of queries are made, and what is added to their softmax."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """A query sees this many last keys, itself included; None: all."""
    soft_cap: float | None = None
    """Scores s become c * tanh(s / c) (Gemma 2)."""
    bias: torch.Tensor | None = None
    """[heads, context length]: added to scores by the position of the key (ALiBi)."""
    sinks: torch.Tensor | None = None
    """[heads]: the score of a key without a value that every query sees (GPT-OSS)."""
