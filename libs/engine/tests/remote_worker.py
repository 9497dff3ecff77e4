"""An engine with blocks in a store outside of the machine, without processes, and the turns of a conversation."""

import asyncio
import mmap
import os
from dataclasses import dataclass, replace

import msgspec
import torch
from lockstep_engine import EngineConfig, Request
from lockstep_engine.config import BLOCK_SIZE, HotWindow, SlidingWindow, WindowedLayers
from lockstep_engine.control import Ready
from lockstep_engine.host_memory import HostMemory
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import decode_plan, encode_plan
from lockstep_engine.remote_tier import RemoteTier
from lockstep_engine.scheduler import Scheduler
from test_host_memory import PARAMS, TEXT, Ranks, words

WINDOW = SlidingWindow(37)
"""Of layers that have no cold blocks."""
FULL = (TEXT + PARAMS.max_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
"""Tokens of the blocks that a first turn leaves."""


class Worker(Ranks):
    """An engine with a third tier, without processes: what `AsyncEngine` does with it, step by step."""

    def __init__(self, path, store, tp=1, dtype=torch.float32, recompute_s=lambda tokens: tokens / 1000, **mode):
        super().__init__(path, tp, dtype, **mode)
        self.scheduler = Scheduler(self.limits, [], self.sizes, shares_slots=True)
        config = _Config(model="m", host_cache_bytes=1)
        window, layers = mode.get("hot_window"), mode.get("compressed_layers")
        hot_layers, copies = mode.get("hot_layers", ()), mode.get("copies", False)
        windowed = WindowedLayers(WINDOW, hot_layers, self.group.models[0].layers) if hot_layers else None
        self.config = replace(
            config,
            window=None if copies else window,
            kv_compression="per_layer" if layers else config.kv_compression,
            kv_compressed_layers=layers or (),
        )
        self.changes = 0
        assert self.config.hot_window_with(windowed) == window
        self.tier = RemoteTier(store, self.config, "digest", self.scheduler, recompute_s, self._change, windowed)
        self.outputs = {}
        self.open()

    def open(self):
        """Begin an epoch, with memory of its own."""
        self.views, model, host = [], self.group.models[0], self.sizes.host
        for rank, cache in enumerate(self.group.caches):
            fd = Mailbox.create(host.slots * host.slot_bytes + 5, "test")
            self.views.append(memoryview(mmap.mmap(fd, host.slots * host.slot_bytes + 5)))
            self.memories[rank] = HostMemory(host, cache, fd)
            os.close(fd)
        dtype = str(self.group.caches[0].keys.dtype).removeprefix("torch.")
        ready = Ready(True, "cpu", dtype, "fingerprint", layers=model.layers, head_dim=model.head_dim)
        ranks = [
            msgspec.structs.replace(ready, first_kv_head=each.first_kv_head, kv_heads=each.kv_heads)
            for each in self.group.models
        ]
        self.scheduler.reset(self.sizes)
        self.tier.open(ranks[0], ranks, host, self.views)

    def submit(self, name, prompt, params=PARAMS, tenant=""):
        request = Request(name, tuple(prompt), params, tenant=tenant)
        self.outputs[name] = [], [], []
        assert self.scheduler.submit(request) is None
        self.tier.begin(request)

    async def step(self):
        """One step if there is something to plan; and a turn of the loop."""
        plan = self.scheduler.schedule()
        if plan is not None:
            for output in self.scheduler.update(self.execute(decode_plan(encode_plan(plan)))):
                ids, scores, cached = self.outputs[output.request_id]
                ids.extend(output.ids)
                scores.extend(output.logprobs)
                cached.append(output.cached_tokens)
            self.tier.on_step()
            self.scheduler.blocks.check()
        await asyncio.sleep(0)
        return plan is not None

    async def end(self, name):
        """Ids, log probabilities and the number of cached tokens of a request."""
        async with asyncio.timeout(60):
            while name in self.scheduler.sequences.by_id:
                await self.step()
        ids, scores, cached = self.outputs[name]
        return ids, scores, sum(cached)

    async def ask(self, name, prompt, **options):
        self.submit(name, prompt, **options)
        return await self.end(name)

    async def stored(self):
        """Wait until all blocks were offered."""
        return await self._step_until(self.tier.store_all(60))

    async def settled(self):
        """Wait until all that has been listed was offered or dropped."""
        await self._step_until(self.tier._epoch.writer.wait_idle())

    async def _step_until(self, awaited):
        task = asyncio.ensure_future(awaited)
        async with asyncio.timeout(60):
            while not task.done():
                await self.step()
        return task.result()

    async def close(self):
        self.tier.close()
        await self.tier.wait_closed()
        self.scheduler.blocks.check()

    def _change(self):
        self.changes += 1


@dataclass(frozen=True)
class _Config(EngineConfig):
    """Settings with a hot window that the tests choose."""

    window: HotWindow | None = None

    @property
    def hot_window(self):
        return self.window


async def first_turn(path, store, **options):
    """A worker serves the first turn of a conversation and stores it; the ids of the answer."""
    worker = Worker(path, store, **options)
    ids, _, cached = await worker.ask("first", words(0))
    assert cached == 0
    assert await worker.stored()
    await worker.close()
    return ids


def second_turn(ids):
    return [*words(0), *ids, *words(9, 40)]
