"""Sums over input features that have the same bits on 1, 2 and 4 ranks.

Features that ranks share are cut into a fixed number of virtual shards, whatever the number of ranks. Each shard is
summed for itself, and the shards' sums are added in a balanced tree: ((s0 + s1) + (s2 + s3)). A rank has neighbouring
shards and adds them itself; the collectives on the CPU add what the ranks have in the order of the same tree.
"""

import math
from collections.abc import Sequence

import torch

SHARDS = 4
"""Most virtual shards, a power of two: the largest number of ranks that gives the bits of fewer."""


def held_shards(features: int, ranks: int, shards: int = SHARDS) -> int:
    """How many virtual shards of so many features, or heads, each rank has. 1 also where ranks do not hold whole
    shards; their sums then have bits of their own.

    Args:
        features: of all ranks together.
        ranks: that share them.
        shards: most shards, a power of two; 1: each rank's part is one.
    """
    total = math.gcd(shards, features)
    return total // ranks if total % ranks == 0 else 1


def add_in_tree(parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of two or more tensors: neighbours first, then the sums of neighbours.

    Args:
        parts: are only read.
        out: gets the sum, if given.
    """
    pairs = list(zip(parts[::2], parts[1::2], strict=False))
    sums = [torch.add(*pair, out=out if index == 0 else None) for index, pair in enumerate(pairs)]
    sums += parts[2 * len(pairs) :]  # the last one, if their number is odd: it is never added to
    while len(sums) > 1:
        for left, right in zip(sums[::2], sums[1::2], strict=False):
            left.add_(right)
        sums = sums[::2]
    return sums[0]
