"""A router counts the cached blocks that a worker's engine would use: both have a rule for compressed blocks."""

import random

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import prefix_keys
from lockstep_engine.block_tables import BlockTables
from lockstep_engine.blocks import PoolSizes, extend_keys
from lockstep_engine.config import HotWindow
from lockstep_router.workers.prefix_index import PrefixIndex

BLOCKS = 12
EVERYTHING = 1 << 20


@pytest.mark.parametrize(
    "hot_window", [None, HotWindow(0, 0), HotWindow(1, 1), HotWindow(1, 4), HotWindow(2, 3)], ids=str
)
def test_a_router_counts_the_blocks_that_an_engine_would_use(hot_window: HotWindow | None) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    counts = set()
    for _ in range(400):
        prompt = [rng.randrange(1000) for _ in range(16 * BLOCKS + 1)]
        keys: list = []
        extend_keys(keys, prompt, "t")
        tables = BlockTables(PoolSizes(BLOCKS, BLOCKS), hot_window, 1, 16 * (BLOCKS + 1))
        end = rng.randrange(BLOCKS + 1)
        for index, key in enumerate(keys[:end]):
            is_near_an_edge = hot_window is None or index < hot_window.sink or index >= end - hot_window.size
            for pool, share in ((tables.hot, 0.98 if is_near_an_edge else 0.3), (tables.cold, 0.95)):
                if rng.random() < share and (pool is tables.hot or hot_window is not None):
                    block = pool.allocate()
                    pool.remember(block, key)
                    pool.release([block])
        index = PrefixIndex()
        index.resize(EVERYTHING)
        report = worker_pb2.PrefixReport(number=1, snapshot=True, added=tables.newest((), EVERYTHING))
        if hot_window is not None:
            report.hot_window.CopyFrom(worker_pb2.HotWindow(first=hot_window.sink, last=hot_window.size))
        index.take(report)
        usable = tables.match(keys).usable
        counts.add(usable)
        assert index.known(prefix_keys("t", prompt, BLOCKS)) == usable
    assert len(counts) > BLOCKS / 2
