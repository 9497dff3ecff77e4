"""KV blocks are shared by workers of another number of ranks: a stream that begins with them has the bits of one that
computed all of its blocks, and every part is stored once.
"""

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import make
from lockstep_engine.blocks import HostSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.control import Ready
from lockstep_engine.host_memory import HostMemory
from lockstep_engine.host_view import HostView
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.remote_store import HeadRange
from lockstep_engine.virtual_shards import held_shards
from remote_double import MemoryStore
from remote_worker import FULL, Worker, first_turn, second_turn
from test_host_memory import MODES, Ranks

KERNELS = pytest.mark.skipif(cpu.build is None, reason="torch's products depend on a matrix's width")
SHARDS = {"shards": 4}


def model(tmp_path, name="llama"):
    return make(name, tmp_path)[0]


@KERNELS
@pytest.mark.bits
@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        (1, 2, "none"),
        (2, 1, "lazy"),
        (1, 2, "per_layer"),
        pytest.param(4, 2, "lazy", marks=pytest.mark.slow),
        pytest.param(1, 4, "per_layer", marks=pytest.mark.slow),
    ],
)
async def test_a_session_goes_on_at_a_worker_of_another_number_of_ranks(tmp_path, first, second, mode):
    path, store, mode = model(tmp_path), MemoryStore(), MODES[mode] | SHARDS
    ids = await first_turn(path, store, tp=first, **mode)
    parts = dict(store.parts)
    assert {heads for *_, heads in parts} == {HeadRange(number, 1) for number in range(4)}
    other = Worker(path, store, second, **mode)
    *found, cached = await other.ask("second", second_turn(ids))
    assert cached == FULL
    assert await other.stored()
    await other.close()
    assert parts.items() <= store.parts.items()  # what is there was not stored again
    assert len(store.offers) == len(set(store.offers))
    *computed, cached = Ranks(path, second, torch.float32, **mode).run(second_turn(ids))
    assert cached == 0
    assert found == computed
    if mode == SHARDS:
        again = MemoryStore()
        assert await first_turn(path, again, tp=second, **mode) == ids
        assert again.parts == parts  # name by name and byte by byte


@KERNELS
async def test_heads_that_several_ranks_have_are_stored_and_fetched_once(tmp_path):
    """The model has one key/value head."""
    path, store = model(tmp_path, "falcon"), MemoryStore()
    ids = await first_turn(path, store, tp=2, **SHARDS)
    assert len(store.parts) == len(store.offers) == FULL // BLOCK_SIZE
    found = []
    for tp in (2, 1):
        other = Worker(path, store, tp, **SHARDS)
        *streams, cached = await other.ask("second", second_turn(ids))
        assert cached == FULL
        assert other.tier._epoch.view.heads == (HeadRange(0, 1),)
        await other.close()
        found.append(streams)
    computed = list(Ranks(path, 1, torch.float32, **SHARDS).run(second_turn(ids))[:2])
    assert found == [computed, computed]


async def test_a_block_counts_only_with_all_its_parts(tmp_path):
    path, store = model(tmp_path), MemoryStore()
    ids = await first_turn(path, store, **SHARDS)
    (tenant, name, _) = store.offers[2 * 4]
    del store.parts[tenant, name, HeadRange(3, 1)]
    worker = Worker(path, store, **SHARDS)
    *found, cached = await worker.ask("second", second_turn(ids))
    assert cached == 2 * BLOCK_SIZE
    assert found == list(Ranks(path, 1, torch.float32, **SHARDS).run(second_turn(ids))[:2])
    await worker.close()


async def test_without_shards_a_rank_stores_a_block_in_one_part(tmp_path):
    path, store = model(tmp_path), MemoryStore()
    await first_turn(path, store, tp=2)
    assert {heads for *_, heads in store.parts} == {HeadRange(0, 2), HeadRange(2, 2)}


LAYERS, DIM, COMPRESSED = 3, 20, (0, 2)


class Blocks:
    """Ranks that share the heads of a cache, with a view of their host memory. They have blocks 0 and 1."""

    def __init__(self, heads: int, tp: int, units: int) -> None:
        self.count = max(1, heads // tp)
        self.firsts = [rank * heads // tp for rank in range(tp)]
        geometry = {"layers": LAYERS, "kv_heads": self.count, "head_dim": DIM, "dtype": torch.float16}
        slot_bytes = KvCache.cold_block_bytes(**geometry, compressed_layers=COMPRESSED)
        hot_bytes = KvCache.block_bytes(**geometry)
        assert slot_bytes < hot_bytes < 2 * slot_bytes
        sizes = HostSizes(6, slot_bytes, 2, 2, hot_bytes, units)
        options = {"cold_blocks": 2, "hot_window": HotWindow(1, 1), "compressed_layers": COMPRESSED}
        self.caches = [KvCache(blocks=2, device=torch.device("cpu"), **geometry, **options) for _ in range(tp)]
        self.memories = [HostMemory(sizes, cache) for cache in self.caches]
        ready = Ready(True, "cpu", "float16", layers=LAYERS, head_dim=DIM)
        ranks = [msgspec.structs.replace(ready, first_kv_head=first, kv_heads=self.count) for first in self.firsts]
        self.view = HostView.of(ranks, sizes, [memoryview(each._memory.numpy()).cast("B") for each in self.memories])

    def fill(self, block: int, contents: list[torch.Tensor], *, cold: bool) -> None:
        """Give a block of all ranks their heads of these tensors."""
        for first, cache in zip(self.firsts, self.caches, strict=True):
            for (tensor, dim), whole in zip(cache.block_tensors(cold=cold), contents, strict=True):
                tensor.select(dim, block).copy_(whole.narrow(dim - 1, first, self.count))

    def copy(self, block: int, slots: tuple[int, ...], *, cold: bool, to_host: bool) -> None:
        """Have a plan copy a block."""
        row = np.array([[block + cold * self.caches[0].first_cold, *slots, -1][:3]], np.int32)
        for memory in self.memories:
            memory.copy(*((row, None) if to_host else (None, row)))

    def read(self, slots: tuple[int, ...], *, cold: bool) -> dict[HeadRange, bytes]:
        """The parts of a block."""
        return {heads: bytes(self.view.read(part, slots, cold=cold)) for part, heads in enumerate(self.view.heads)}


@pytest.mark.parametrize(("heads", "units"), [(1, 1), (2, 2), (4, 4), (6, 2), (7, 1), (12, 4)])
@pytest.mark.parametrize("cold", [False, True])
def test_parts_have_the_same_bytes_however_many_ranks_there_are(heads, units, cold):
    """A hot block does not fill its last slot, its parts lie across slots, and its slots do not follow each other."""
    whole = [
        torch.randint(0, 99, tensor.select(dim, 0).shape, generator=torch.Generator().manual_seed(heads)).to(
            tensor.dtype
        )
        for tensor, dim in Blocks(heads, 1, units).caches[0].block_tensors(cold=cold)
    ]
    source, target = ((4,), (3,)) if cold else ((5, 1), (0, 2))
    found = []
    for tp in (1, 2, 4):
        if heads % tp and tp % heads:
            continue
        blocks = Blocks(heads, tp, held_shards(heads, tp))
        blocks.fill(1, whole, cold=cold)
        blocks.copy(1, source, cold=cold, to_host=True)
        found.append(blocks.read(source, cold=cold))
        for part, content in enumerate(found[0].values()):
            blocks.view.write(part, target, memoryview(content))
        blocks.copy(0, target, cold=cold, to_host=False)
        for cache in blocks.caches:
            for tensor, dim in cache.block_tensors(cold=cold):
                assert torch.equal(tensor.select(dim, 0), tensor.select(dim, 1))
        assert {len(each) for each in found[-1].values()} == {blocks.view.forms[cold].length}
    assert all(each == found[0] for each in found)
    assert len(found[0]) == len(set(found[0].values())) == units
    assert sum(heads_.count for heads_ in found[0]) == heads


def test_a_number_of_ranks_that_does_not_hold_whole_parts_has_parts_of_its_own():
    assert Blocks(6, 3, held_shards(6, 3)).view.heads == (HeadRange(0, 2), HeadRange(2, 2), HeadRange(4, 2))
    assert Blocks(8, 8, held_shards(8, 8)).view.heads == tuple(HeadRange(head, 1) for head in range(8))
