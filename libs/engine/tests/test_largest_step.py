"""The largest step is run before the KV cache gets its memory. The GPU's memory is a stand-in: what torch's tensors
hold on the CPU, of which there is as much as a test says.
"""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from checkpoints import CASES, make
from in_process_rank import InProcessRank
from lockstep_common.errors import LockstepError
from lockstep_engine import rank as rank_module
from lockstep_engine.distributed import gather_reasons
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.largest_step import SMALLEST_POOLS, largest_plan, measure_largest_step
from lockstep_engine.plan import decode_plan, encode_plan, message_sizes
from specs import rank_spec
from test_distributed import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = 64 * 2**20
CONTEXT = 128
BLOCK_BYTES = KvCache.block_bytes(layers=3, kv_heads=4, head_dim=16, dtype=torch.float32)
HOT_WINDOW = {"kv_hot_window": 16, "max_seqs": 4, "max_batch_tokens": 40, "context_length": CONTEXT}


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations make and that are alive, and the most that there were at once."""

    def __init__(self, most):
        super().__init__()
        self.held = self.peak = 0
        self._most, self._known = most, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self._add(each.untyped_storage())
        return out

    def _add(self, storage):
        if storage in self._known or not storage.nbytes():
            return
        if self.held + storage.nbytes() > self._most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes")
        self._known.add(storage)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, size):
        self.held -= size


class StandInMemory:
    def __init__(self, free):
        self.free, self.peaks = free, []

    def free_bytes(self):
        return self.free

    def peak_bytes(self, work):
        with Allocations(self.free) as allocations:
            work()
        self.peaks.append(allocations.peak)
        return allocations.peak


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a rank with so much free memory; returns its number of blocks, and the peak that it measured."""

    def start(*, free=FREE, vocab_size=2000, **settings):
        memory = StandInMemory(free)
        monkeypatch.setattr(rank_module, "device_memory", lambda device: memory)
        case = CASES["llama"]
        sized = {**case.settings, "vocab_size": vocab_size, "max_position_embeddings": CONTEXT}
        monkeypatch.setitem(CASES, "llama-sized", dataclasses.replace(case, settings=sized))
        path, _ = make("llama-sized", tmp_path / f"{vocab_size}")
        settings = {"max_seqs": 4, "max_batch_tokens": 40, "kv_compression": "none", "threads": 1} | settings
        with InProcessRank(path, device="cpu", **settings) as served:
            (peak,) = memory.peaks
            return served.loaded.blocks.hot, peak

    return start


def test_the_pool_gets_what_the_largest_step_leaves(start):
    blocks, peak = start(free=2**20)
    assert blocks == (int(2**20 * 0.9) - peak) // BLOCK_BYTES
    # At least the logits of sampled and scored rows, and the log probabilities of the scored ones.
    assert peak > 3 * 4 * 2000 * 4


@pytest.mark.parametrize("larger", [{"vocab_size": 6000}, {"max_seqs": 16}, {"max_batch_tokens": 400, "max_seqs": 4}])
def test_a_larger_step_leaves_a_smaller_pool(start, larger):
    _, peak = start()
    start(**larger)  # without the CPU's compiled operations a shape's first product is tried at heights (`rowwise`)
    _, higher = start(**larger)
    assert higher > 1.5 * peak
    free = int((higher + 8.5 * BLOCK_BYTES) / 0.9)
    assert start(free=free, **larger)[0] == 8
    assert start(free=free)[0] > 8


def test_a_step_without_memory_names_the_settings_to_lower(start):
    with pytest.raises(AssertionError) as ended:
        start(free=200_000)
    said = str(ended.value.__cause__)
    assert isinstance(ended.value.__cause__, LockstepError)
    assert said.startswith("max_batch_tokens is 40, and there is no memory beside the weights for a step of 40 tokens")
    assert "4 sequences (max_seqs), each up to 128 tokens long (max_context); lower one of these: " in said
    assert "OutOfMemoryError: CUDA out of memory" in said


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def fails(_plan):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        measure_largest_step(rank_spec(), StandInMemory(FREE), fails, lambda reason: [reason])


def test_one_rank_without_memory_makes_all_refuse():
    def measured(group):
        def run(_plan):
            if group.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(LockstepError) as refused:
            measure_largest_step(
                rank_spec(tp=2), StandInMemory(FREE), run, lambda reason: gather_reasons(group, reason)
            )
        return refused.value.message

    results, _ = run_ranks(2, measured)
    assert results[0] == results[1]
    assert results[0].endswith("lower one of these: rank 1: OutOfMemoryError: CUDA out of memory")


class TestLargestPlan:
    @pytest.mark.parametrize(
        ("settings", "lengths"),
        [
            ({"max_seqs": 4, "max_batch_tokens": 40}, [37, 1, 1, 1]),
            ({"max_seqs": 4, "max_batch_tokens": 4}, [1, 1, 1, 1]),
            ({"max_seqs": 4, "max_batch_tokens": 300}, [128, 128, 43, 1]),
            ({"max_seqs": 2, "max_batch_tokens": 4096}, [128, 128]),
        ],
    )
    def test_it_has_as_many_tokens_as_a_step_can_have(self, settings, lengths):
        plan = largest_plan(rank_spec(context_length=CONTEXT, **settings))
        assert plan.lengths.tolist() == lengths
        assert (plan.starts + plan.lengths == CONTEXT).all()
        assert len(plan.token_ids) == sum(lengths)
        assert (plan.targets >= 0).sum() == settings["max_seqs"]  # a step scores no more

    def test_it_is_a_plan_that_fits_its_message(self):
        spec = rank_spec(**HOT_WINDOW)
        encoded = encode_plan(largest_plan(spec))
        assert len(encoded) <= message_sizes(spec)[0]
        assert decode_plan(encoded).lengths.tolist() == [37, 1, 1, 1]

    def test_queries_see_blocks_in_the_versions_that_the_window_says(self):
        """The context's last block is the eighth; the window has one block before it, and the sink is the first."""
        plan = largest_plan(rank_spec(**HOT_WINDOW))
        cold = SMALLEST_POOLS.hot + 1
        assert np.unique(plan.tables, axis=0).tolist() == [[0, *[cold] * 5, 0, 0]]
        assert not plan.hot_tables.any()
        # The chunk begins in the sixth block: its step makes the blocks cold that its first query sees hot.
        assert plan.starts[0] == 91
        assert len(plan.moves) == 2


@pytest.mark.parametrize(
    "settings", [{"kv_compression": "none"}, {"kv_hot_window": 16}, {"kv_compression": "immediate"}]
)
def test_every_kind_of_cache_can_run_it(start, settings):
    blocks, peak = start(**{"kv_compression": "lazy"} | settings)
    assert blocks > 0
    assert peak > 0
