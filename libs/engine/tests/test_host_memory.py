"""A stream that begins with blocks from host memory has the bits of one that computed all of them."""

import asyncio
import os
import random
import signal
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCABULARY, make
from in_process import InProcessGroup, on_all
from in_process_rank import InProcessRank
from lockstep_common.errors import LockstepError
from lockstep_engine import AsyncEngine, Request, SamplingParams
from lockstep_engine import engine as engine_module
from lockstep_engine.attention import StepLayout
from lockstep_engine.blocks import HostSizes, PoolSizes, extend_keys
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, HotWindow
from lockstep_engine.host_memory import HostMemory, _pin
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.limits import Limits
from lockstep_engine.plan import LAST_SAMPLED, Result, decode_plan, encode_plan
from lockstep_engine.sampling import Sampler
from lockstep_engine.scheduler import Scheduler
from lockstep_engine.sizes import check_host_memory, host_sizes
from lockstep_engine.virtual_shards import held_shards

MODEL = Path(__file__).parents[3] / "models/reference"
BLOCKS = 16
NARROW = HotWindow(sink=1, size=1)
MODES = {
    "none": {},
    "lazy": {"hot_window": NARROW},
    "immediate": {"hot_window": HotWindow(sink=0, size=0)},
    "per_layer": {"hot_window": NARROW, "compressed_layers": (1,)},
}
PARAMS = SamplingParams(max_tokens=5, temperature=0.9, seed=3, logprobs=3, ignore_eos=True)
TEXT = 150


class Ranks:
    """An engine of `tp` ranks in threads of this process, each with its cache and its host memory."""

    def __init__(
        self,
        path,
        tp,
        dtype,
        *,
        hot_window=None,
        compressed_layers=None,
        host_bytes=2**20,
        shards=1,
        window=None,
        hot_layers=(),
        copies=False,
    ):
        kept = {"hot_window": hot_window, "blocks": BLOCKS, "compressed_layers": compressed_layers}
        kept |= {"hot_layers": hot_layers, "copies": copies}
        self.group = InProcessGroup(path, tp, dtype=dtype, shards=shards, **kept)
        model = self.group.models[0]
        geometry = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "dtype": dtype}
        cold = geometry | {"layers": model.layers - len(hot_layers)}
        sizes = (
            KvCache.block_bytes(**geometry),
            KvCache.cold_block_bytes(**cold, compressed_layers=() if copies else compressed_layers),
        )
        config = EngineConfig(model="m", host_cache_bytes=host_bytes)
        host = host_sizes(config, "cpu", hot_window is not None, *sizes, held_shards(model.total_kv_heads, tp, shards))
        self.memories = [HostMemory(host, cache) for cache in self.group.caches]
        self.limits = Limits(4, 64, 100, 512, prefix_cache=True, hot_window=hot_window, window=window, copies=copies)
        self.sizes = PoolSizes(BLOCKS, 0 if hot_window is None else BLOCKS, host)
        self.scheduler = Scheduler(self.limits, [], self.sizes)
        self._sampler = Sampler(4, model.vocab_size, torch.device("cpu"))
        self._names = iter(range(100))

    def run(self, prompt):
        """Ids, log probabilities and the number of cached tokens of a request that runs alone."""
        self.scheduler.submit(Request(str(next(self._names)), tuple(prompt), PARAMS))
        ids, scores, cached = [], [], 0
        results = deque()
        while (plan := self.scheduler.schedule()) is not None:
            results.append(self.execute(decode_plan(encode_plan(plan))))
            for output in self.scheduler.update(results.popleft()):
                ids += output.ids
                scores += output.logprobs
                cached += output.cached_tokens
            self.scheduler.blocks.check()
        return ids, scores, cached

    def execute(self, plan):
        assert LAST_SAMPLED not in plan.token_ids.tolist()
        if not len(plan.lengths):
            for memory in self.memories:
                memory.copy(plan.spills, plan.loads)
            return Result(plan.step, [], [], 0, 0)
        sampled = plan.samples.nonzero()[0]
        rows = (np.cumsum(plan.lengths) - 1)[sampled]
        layout = StepLayout(plan.starts, plan.lengths, plan.tables, plan.hot_tables, plan.moves)
        ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        logits = {}

        def step(rank):
            self.memories[rank].copy(plan.spills, plan.loads)
            logits[rank] = self.group.forward(rank, ids, layout, rows)
            self.group.caches[rank].compress(plan.late_moves)

        on_all(step, self.group.tp)
        for entry in plan.added:
            self._sampler.add(entry)
        chosen = self._sampler.sample(logits[0], plan.sampling_rows[sampled], plan.emitted[sampled], plan.uniforms)
        return Result(plan.step, *chosen.read(), 0, 0)


def words(seed, count=TEXT):
    return random.Random(seed).choices(range(2, VOCABULARY), k=count)


def check(path, tp, dtype, texts=3, **mode):
    """The second turn of a conversation, the first one of which further texts have evicted, and the same once more."""
    ranks = Ranks(path, tp, dtype, **mode)
    first, *_ = (ranks.run(words(seed))[0] for seed in range(texts))
    turn = [*words(0), *first, *words(9, 40)]
    *found, cached = ranks.run(turn)
    usage = ranks.scheduler.blocks.host.usage
    assert usage.hits == 1
    assert usage.copied_in >= 5
    assert cached == (TEXT + PARAMS.max_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    *computed, cached = Ranks(path, tp, dtype, **mode).run(turn)
    assert cached == 0
    assert found == computed


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "tp"), [*((mode, 1) for mode in MODES), ("none", 2), ("lazy", 2)])
def test_streams_have_the_bits_of_computed_ones(tmp_path, mode, tp, dtype):
    check(make("llama", tmp_path)[0], tp, dtype, **MODES[mode])


@pytest.mark.bits
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "gpt_oss"])
def test_streams_with_windows_latents_and_sinks_have_the_bits_of_computed_ones(tmp_path, name):
    check(make(name, tmp_path)[0], 1, torch.float32, hot_window=NARROW)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize(("kv_heads", "latent"), [(2, 0), (1, 16)])
def test_blocks_lie_in_their_slots_byte_by_byte_and_come_back_elsewhere(device, kv_heads, latent):
    """Also where a hot block does not fill its last slot."""
    geometry = {"layers": 3, "kv_heads": kv_heads, "head_dim": 20, "dtype": torch.float16, "latent": latent}
    cache = KvCache(
        **geometry,
        blocks=4,
        device=torch.device(device),
        cold_blocks=4,
        hot_window=NARROW,
        compressed_layers=(0, 2),
    )
    for cold in (False, True):
        for tensor, _ in cache.block_tensors(cold=cold):
            tensor.view(torch.uint8).random_()
    cold_bytes = KvCache.cold_block_bytes(**geometry, compressed_layers=(0, 2))
    sizes = HostSizes(8, cold_bytes, 2, 2)
    assert cold_bytes < KvCache.block_bytes(**geometry) < 2 * cold_bytes
    memory = HostMemory(sizes, cache)
    first = cache.first_cold

    def blocks(number, *, cold):
        return [tensor.select(dim, number).clone() for tensor, dim in cache.block_tensors(cold=cold)]

    before = [blocks(1, cold=False), blocks(3, cold=False), blocks(2, cold=True)]
    memory.copy(np.array([[1, 5, 0], [3, 7, 2], [first + 2, 4, -1]], np.int32), None)
    memory.copy(None, np.array([[first, 4, -1], [0, 7, 2], [2, 5, 0]], np.int32))
    after = [blocks(2, cold=False), blocks(0, cold=False), blocks(0, cold=True)]
    for each, other in zip(before, after, strict=True):
        assert all(torch.equal(*(part.view(torch.uint8) for part in parts)) for parts in zip(each, other, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_copies_what_plans_order(tmp_path, overlap):
    path, _ = make("llama", tmp_path)
    settings = {"device": "cpu", "threads": 1, "max_seqs": 2, "max_batch_tokens": 64, "kv_hot_window": 16}
    settings["overlap"] = overlap
    prompts = [(words(seed), PARAMS) for seed in (*range(8), 0)]
    with InProcessRank(path, kv_memory_bytes=2**18, host_cache_bytes=2**20, **settings) as rank:
        host = rank.loaded.blocks.host
        assert host.slots * host.slot_bytes <= 2**20 < (host.slots + 1) * host.slot_bytes
        found = [rank.run(prompt) for prompt in prompts]
        assert rank.scheduler.blocks.host.usage.copied_in > 0
    assert found[0] == found[-1]
    with InProcessRank(path, kv_memory_bytes=2**18, **settings) as rank:
        assert rank.loaded.blocks.host == HostSizes()
        assert [rank.run(prompt) for prompt in prompts] == found


def test_a_rank_executes_a_step_that_only_copies(tmp_path):
    path, _ = make("llama", tmp_path)
    settings = {"device": "cpu", "threads": 1, "max_seqs": 2, "max_batch_tokens": 64, "kv_compression": "none"}
    with InProcessRank(path, kv_memory_bytes=2**18, host_cache_bytes=2**20, **settings) as rank:
        rank.scheduler = Scheduler(rank.scheduler._limits, [], rank.loaded.blocks, shares_slots=True)
        first = rank.run((words(0), PARAMS))
        keys, blocks = [], rank.scheduler.blocks
        extend_keys(keys, words(0), "")
        assert blocks.stage(keys[1], cold=False)
        assert blocks.host.slots_of(keys[1], cold=False) == ()
        assert rank.run() == []
        (slot,) = blocks.host.slots_of(keys[1], cold=False)
        block = blocks.hot.find(keys[1])
        parts = [each.select(dim, block).contiguous() for each, dim in rank.rank.cache.block_tensors(cold=False)]
        expected = b"".join(each.view(torch.uint8).numpy().tobytes() for each in parts)
        assert rank.rank.host._memory[slot].numpy().tobytes() == expected
        assert rank.run((words(0), PARAMS)) == first


async def test_a_tier_that_is_larger_than_the_memory_of_the_container_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(engine_module, "usable_memory", lambda: 2**24 - 1)
    config = EngineConfig(model=str(MODEL), tp=2, threads=1, host_cache_bytes=2**23)
    engine = AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None)
    with pytest.raises(LockstepError, match="host_cache_bytes is more than there is: 16777216 bytes for all ranks"):
        await engine.start()
    await engine.close()
    check_host_memory(config, 2**24)


class Runtime:
    """A CUDA runtime that cannot pin memory, and what torch does with its last error when it launches a kernel."""

    def __init__(self):
        self.last = 0

    def cudaHostRegister(self, *_):
        self.last = 304
        return self.last

    def launch(self, *_, device):
        error, self.last = self.last, 0
        if error:
            raise RuntimeError("CUDA error: OS call failed")


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_kernel(monkeypatch, caplog):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    caplog.set_level("WARNING", "lockstep.engine")
    _pin(torch.empty(8, dtype=torch.uint8), torch.device("cuda"))
    assert "not pinned: CUDA error 304" in caplog.text
    assert runtime.last == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_pinned_twice_leaves_no_error_in_the_cuda_runtime():
    memory, device = torch.empty(2**20, dtype=torch.uint8), torch.device("cuda")
    for _ in range(2):  # memory that is pinned already cannot be pinned again
        _pin(memory, device)
    assert int(torch.ones(2, device=device).sum()) == 2
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def test_a_tier_that_would_not_hold_a_block_is_refused(tmp_path):
    with pytest.raises(LockstepError, match="host_cache_bytes must be 0 or at least"):
        host_sizes(EngineConfig(model="m", host_cache_bytes=1000), "cpu", True, 4000, 1100)
    assert host_sizes(EngineConfig(model="m", host_cache_bytes=4400), "cpu", True, 4000, 1100).slots == 4


@pytest.mark.slow
async def test_the_tier_is_empty_after_a_restart_of_the_ranks_and_fills_again():
    outputs, ready = asyncio.Queue(), asyncio.Event()
    engine = AsyncEngine(
        EngineConfig(model=str(MODEL), tp=2, threads=1, max_seqs=4, kv_memory_bytes=2**21, host_cache_bytes=2**24),
        on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
        on_change=lambda: ready.set() if engine.status().state == "ready" else ready.clear(),
    )

    async def ask(name, prompt):
        engine.submit(Request(name, tuple(prompt), PARAMS))
        ids, cached, last = [], 0, None
        async with asyncio.timeout(60):
            while last is None or last.finish is None:
                last = await outputs.get()
                assert last.error is None
                ids += last.ids
                cached += last.cached_tokens
        return ids, cached

    await engine.start()
    try:
        found = []
        for life in range(2):
            async with asyncio.timeout(60):
                await ready.wait()
            assert engine.status().host.blocks == 0
            first, _ = await ask(f"first {life}", words(0, 300))
            for seed in range(1, 8):
                await ask(f"{life} {seed}", words(seed, 300))
            assert engine.status().host.copied_in == 0
            found.append(await ask(f"second {life}", [*words(0, 300), *first, 7]))
            assert found[-1][1] >= 304
            assert engine.status().host.copied_in > 0
            if life == 0:
                os.kill(engine.status().ranks[1].pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while engine.status().state == "ready":
                        await asyncio.sleep(0.01)
        assert found[0] == found[1]
    finally:
        await engine.close()
