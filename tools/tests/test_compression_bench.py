"""What the benchmark of compression says that a sequence's KV takes, and which run made each part of its page."""

import pytest
from compression import kv_bytes, origin
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


def test_a_page_of_several_runs_names_each() -> None:
    one = {"command": "a --save", "cores": 2}
    assert origin({"accuracy": one, "speed": one}) == "Made by `a --save` on: cores 2."
    assert origin({"accuracy": {"cores": 1}, "memory": one, "speed": {"cores": 1}}).split("\n\n") == [
        "Accuracy, speed. Made by another run, whose options were not kept, on: cores 1.",
        "Memory. Made by `a --save` on: cores 2.",
    ]
