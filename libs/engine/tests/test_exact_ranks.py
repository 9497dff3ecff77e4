"""The exact mode with a tp of two: a token's logits have the same bits in any chunk, beside others, and where a stream
is continued. Interpreted; the ranks are processes.
"""

import pytest
import torch.multiprocessing as mp
from checkpoints import make
from exact_ranks import SIZE, compute
from fast_cases import further
from triton_device import GPU

pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPU, reason="the ranks are interpreted")]


@pytest.mark.parametrize("seed", [1, *(further(seed) for seed in range(2, 8))])
def test_two_ranks_give_a_token_the_same_bits_in_every_step(seed, tmp_path):
    path, _ = make("qwen3", tmp_path)
    store = tmp_path / "store"
    store.touch()
    mp.spawn(compute, (str(store), str(path), seed), SIZE)
