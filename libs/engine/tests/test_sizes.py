"""How a rank's memory is shared out between the pools, and what a sequence takes of it."""

import pytest
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.plan import PoolSizes, RankSpec
from lockstep_engine.sizes import canary_tokens, kv_bytes, pool_sizes

LAZY = HotWindow(sink=1, size=4)
HOT, COLD = 4096, 1088  # bytes of a token and head of width 64 in float32 and compressed, times whatever


def spec(rule=LAZY, **changes):
    values = {
        "rank": 0, "tp": 1, "label": "w0", "epoch": 1, "model": "m", "device": "cpu", "dtype": "float32", "max_seqs": 8,
        "max_batch_tokens": 128, "context_length": 2048, "kv_memory_bytes": None, "deterministic": None, "threads": 1,
        "hidden_size": 64, "vocab_size": 100, "start_timeout_s": 1.0, "hot_window": rule,
    }  # fmt: skip
    return RankSpec(**{**values, **changes})


class TestPoolSizes:
    def test_without_compression_there_is_one_pool(self):
        assert pool_sizes(spec(None), 100 * HOT + 5, HOT, COLD) == PoolSizes(100, 0)
        assert pool_sizes(spec(None), 10**9, HOT, COLD) == PoolSizes(8 * 128, 0)

    def test_a_context_within_the_window_needs_no_cold_blocks(self):
        assert pool_sizes(spec(context_length=96), 10**9, HOT, COLD) == PoolSizes(8 * 6, 0)

    def test_of_plenty_no_more_is_taken_than_can_be_used(self):
        assert pool_sizes(spec(), 10**9, HOT, COLD) == PoolSizes(8 * 6 + 8, 8 * 122)

    @pytest.mark.parametrize("memory", [HOT, 6 * HOT, 10 * HOT, 50 * HOT, 300 * HOT, 10**6])
    @pytest.mark.parametrize("rule", [LAZY, HotWindow(0, 0), HotWindow(1, 64)], ids=str)
    @pytest.mark.parametrize("context", [128, 1100, 2048])
    def test_memory_is_used_and_not_exceeded(self, memory, rule, context):
        sizes = pool_sizes(spec(rule, context_length=context), memory, HOT, COLD)
        most = pool_sizes(spec(rule, context_length=context), 10**12, HOT, COLD)
        used = sizes.hot * HOT + sizes.cold * COLD
        assert sizes.hot >= 1
        assert used <= memory
        assert used > memory - HOT - COLD or sizes.hot == most.hot or sizes.cold == most.cold

    def test_whole_contexts_fit_as_often_as_memory_allows(self):
        """Window 64 of 69 blocks: hot ones are what is short."""
        sizes = pool_sizes(spec(HotWindow(1, 64), context_length=1104), 200 * HOT, HOT, COLD)
        assert sizes.hot >= 2 * 66
        assert sizes.cold >= 2 * 3

    def test_little_memory_still_holds_what_one_sequence_needs_to_go_on(self):
        sizes = pool_sizes(spec(), 8 * HOT, HOT, COLD)
        assert sizes == PoolSizes(6, 7)


class TestSequences:
    def test_short_ones_take_what_they_take_without_compression(self):
        for tokens in range(1, 96):
            assert kv_bytes(tokens, LAZY, HOT, COLD) == kv_bytes(tokens, None, HOT, COLD) == -(-tokens // 16) * HOT

    @pytest.mark.parametrize(("tokens", "most"), [(1024, 0.6), (2048, 0.6)])
    @pytest.mark.parametrize("itemsize", [2, 4])
    @pytest.mark.parametrize("dim", [64, 128])
    def test_long_ones_take_three_fifths_or_less(self, tokens, most, itemsize, dim):
        plain, ours = (kv_bytes(tokens, rule, dim * itemsize, dim + 4) for rule in (None, LAZY))
        assert ours <= most * plain

    @pytest.mark.parametrize(("memory", "tokens"), [(2**22, 1024), (2**22, 2048)])
    def test_pools_of_equal_memory_hold_more_of_them(self, memory, tokens):
        def capacity(rule):
            sizes = pool_sizes(spec(rule, max_seqs=64, context_length=tokens), memory, HOT, COLD)
            blocks = tokens // BLOCK_SIZE
            if rule is None:
                return sizes.hot // blocks
            return min(sizes.hot // rule.blocks, sizes.cold // (blocks - rule.blocks))

        assert capacity(LAZY) >= capacity(None) / 0.6


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [(None, {}, 40), (LAZY, {}, 120), (LAZY, {"max_batch_tokens": 64}, 64), (HotWindow(0, 0), {}, 40)],
)
def test_the_canary_leaves_the_window_where_it_can(rule, changes, expected):
    assert canary_tokens(spec(rule, **changes)) == expected
