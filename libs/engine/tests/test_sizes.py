"""How a rank's memory is divided between the pools, and how much of it a sequence needs."""

import pytest
from lockstep_common.errors import LockstepError
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow, SlidingWindow, WindowedLayers
from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.sizes import canary_tokens, kv_memory_bytes, pool_sizes
from specs import rank_spec

LAZY = HotWindow(sink=1, size=4)
HOT, COLD = 4096, 1088  # bytes of a token and head of width 64 in float32 and compressed, times whatever


def spec(hot_window=LAZY, **changes):
    values = {"max_seqs": 8, "max_batch_tokens": 128, "context_length": 2048, **changes}
    if hot_window is None:
        values["kv_compression"] = "none"
    elif hot_window.sink == 0:
        values["kv_compression"] = "immediate"
    else:
        values["kv_hot_window"] = hot_window.size * BLOCK_SIZE
    made = rank_spec(**values)
    assert made.config.hot_window == hot_window
    return made


class TestPoolSizes:
    def test_without_compression_there_is_one_pool(self):
        assert pool_sizes(spec(None), 100 * HOT + 5, HOT, COLD) == PoolSizes(100, 0)
        assert pool_sizes(spec(None), 10**9, HOT, COLD) == PoolSizes(8 * 128, 0)

    def test_a_context_within_the_window_needs_no_cold_blocks(self):
        assert pool_sizes(spec(context_length=96), 10**9, HOT, COLD) == PoolSizes(8 * 6, 0)

    def test_no_more_blocks_are_allocated_than_can_be_used(self):
        running = 8 * 6 + 8
        assert pool_sizes(spec(), 10**9, HOT, COLD) == PoolSizes(running * 5 // 4, 8 * 122)

    @pytest.mark.parametrize(("max_seqs", "max_batch_tokens"), [(1, 16), (8, 128), (64, 512), (128, 8192)])
    def test_a_tenth_of_the_hot_pool_or_more_is_left_for_cached_texts(self, max_seqs, max_batch_tokens):
        sizes = pool_sizes(spec(max_seqs=max_seqs, max_batch_tokens=max_batch_tokens), 10**12, HOT, COLD)
        running = max_seqs * LAZY.blocks + -(-max_batch_tokens // BLOCK_SIZE)
        assert (sizes.hot - running) / sizes.hot >= 0.1

    @pytest.mark.parametrize("memory", [HOT, 6 * HOT, 10 * HOT, 50 * HOT, 300 * HOT, 10**6])
    @pytest.mark.parametrize("hot_window", [LAZY, HotWindow(0, 0), HotWindow(1, 64)], ids=str)
    @pytest.mark.parametrize("context", [128, 1100, 2048])
    def test_memory_is_used_and_not_exceeded(self, memory, hot_window, context):
        sizes = pool_sizes(spec(hot_window, context_length=context), memory, HOT, COLD)
        most = pool_sizes(spec(hot_window, context_length=context), 10**12, HOT, COLD)
        used = sizes.hot * HOT + sizes.cold * COLD
        assert sizes.hot >= 1
        assert used <= memory
        assert used > memory - HOT - COLD or sizes.hot == most.hot or sizes.cold == most.cold

    def test_as_many_full_contexts_fit_as_memory_allows(self):
        """A window of 64 of 69 blocks: hot blocks are scarce."""
        sizes = pool_sizes(spec(HotWindow(1, 64), context_length=1104), 200 * HOT, HOT, COLD)
        assert sizes.hot >= 2 * 66
        assert sizes.cold >= 2 * 3

    def test_one_full_context_fits_if_memory_allows(self):
        """A window of 64 of 1024 blocks: half of the memory has more hot blocks than can be spared."""
        memory = 66 * HOT + 958 * COLD + 10 * HOT
        assert pool_sizes(spec(HotWindow(1, 64), context_length=2**14), memory, HOT, COLD) == PoolSizes(76, 958)

    def test_the_pools_of_a_model_with_a_window_have_room_for_as_many_windows_as_memory_allows(self):
        """A window of 16 blocks in a context of 128; four of them are hot."""
        made, memory = spec(window=SlidingWindow(257)), 60 * HOT
        sizes = pool_sizes(made, memory, HOT, COLD)
        contexts = memory // (6 * HOT + 13 * COLD)
        assert contexts == 6
        assert sizes.hot >= contexts * 6
        assert sizes.cold >= contexts * 13
        assert pool_sizes(made, 10**9, HOT, COLD) == pool_sizes(spec(), 10**9, HOT, COLD)

    @pytest.mark.parametrize("kind", ["none", "lazy"])
    def test_layers_with_a_window_take_hot_blocks_alone(self, kind):
        """A window of 64 of 1024 blocks. Hot blocks are those of all layers."""
        windowed = WindowedLayers(SlidingWindow(1024), tuple(range(5)), 6)
        made = spec(None if kind == "none" else LAZY, context_length=2**14, windowed=windowed)
        hot, cold = (65, 1024 - 65) if kind == "none" else (66, 1024 - 66)
        assert made.hot_window.blocks == hot
        assert (made.compressed is None) == (kind == "none")
        assert pool_sizes(made, 10**9, HOT, COLD) == PoolSizes((8 * hot + 8) * 5 // 4, 8 * cold)

    def test_little_memory_still_holds_the_hot_blocks_of_one_sequence(self):
        sizes = pool_sizes(spec(), 8 * HOT, HOT, COLD)
        assert sizes == PoolSizes(6, 7)


class TestMemory:
    def test_on_a_gpu_most_of_the_free_memory_is_used(self):
        config = rank_spec().config
        assert kv_memory_bytes(config, 1000, 0) == 900
        assert kv_memory_bytes(config, 1000, 300) == 600
        assert kv_memory_bytes(config, 1000, 2000) == 0

    def test_on_the_cpu_it_has_a_fixed_size(self):
        assert kv_memory_bytes(rank_spec().config, None, 0) == 512 * 2**20

    @pytest.mark.parametrize("free", [None, 12645, 20000])
    def test_a_size_that_is_set_is_used(self, free):
        assert kv_memory_bytes(rank_spec(kv_memory_bytes=12345).config, free, 300) == 12345

    def test_a_size_that_does_not_fit_beside_the_steps_is_refused(self):
        with pytest.raises(LockstepError, match="is 12345; a GPU has 12644 bytes free, and 300 of them"):
            kv_memory_bytes(rank_spec(kv_memory_bytes=12345).config, 12644, 300)


class TestSequences:
    @pytest.mark.parametrize(("memory", "tokens"), [(2**22, 1024), (2**22, 2048)])
    def test_pools_of_equal_memory_hold_more_of_them(self, memory, tokens):
        def capacity(hot_window):
            sizes = pool_sizes(spec(hot_window, max_seqs=64, context_length=tokens), memory, HOT, COLD)
            blocks = tokens // BLOCK_SIZE
            if hot_window is None:
                return sizes.hot // blocks
            return min(sizes.hot // hot_window.blocks, sizes.cold // (blocks - hot_window.blocks))

        assert capacity(LAZY) >= capacity(None) / 0.6


@pytest.mark.parametrize(
    ("hot_window", "changes", "expected"),
    [
        (None, {}, 40),
        (LAZY, {}, 120),
        (LAZY, {"max_batch_tokens": 64}, 120),
        (HotWindow(1, 500), {}, 504),
        (HotWindow(0, 0), {}, 40),
    ],
)
def test_the_canary_is_longer_than_the_hot_window_if_possible(hot_window, changes, expected):
    assert canary_tokens(spec(hot_window, **changes)) == expected


def test_the_exact_modes_canary_reaches_the_tile_for_most_rows_on_a_gpu():
    assert canary_tokens(spec(None), exact_gpu=True) > PRODUCT_ROWS[-1]
    assert canary_tokens(spec(HotWindow(1, 500)), exact_gpu=True) == 504
