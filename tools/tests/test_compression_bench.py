"""What the benchmark of compression says that a sequence's KV takes."""

import pytest
from compression import kv_bytes
from lockstep_engine.config import HotWindow

LAZY = HotWindow(sink=1, size=4)


def test_short_sequences_need_as_much_as_without_compression() -> None:
    for tokens in range(1, 96):
        assert kv_bytes(tokens, LAZY, 512, 132) == kv_bytes(tokens, None, 512, 132) == -(-tokens // 16) * 512


@pytest.mark.parametrize("tokens", [1024, 2048])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_sequences_need_three_fifths_or_less(tokens: int, itemsize: int, dim: int) -> None:
    plain, ours = (kv_bytes(tokens, hot_window, dim * itemsize, dim + 4) for hot_window in (None, LAZY))
    assert ours <= 0.6 * plain
