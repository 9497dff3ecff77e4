"""An engine and clients that continue their streams after each error, as a router lets them."""

import asyncio

from lockstep_common.errors import LockstepError
from lockstep_engine import AsyncEngine, Request, SamplingParams
from scripted_ranks import words

CLIENTS, TOKENS = 4, 12


class Service:
    """An engine, and clients that continue after an error, as a router lets them."""

    def __init__(self, config, zygote):
        self.on_outputs, self.on_change = self.deliver, self._note_reason
        """What the engine calls; tests set others."""
        self.engine = AsyncEngine(config, on_outputs=self._pass_outputs, on_change=self._pass_change, zygote=zygote)
        self._queues = {}
        self._attempts = 0
        self.errors = []
        """Of all requests since the last `run`."""
        self.reasons = []
        """Why ranks were lost since then."""

    async def run(self):
        """All clients' ids, when the last one has ended."""
        self.errors, self.reasons = [], []
        async with asyncio.timeout(120):
            return await asyncio.gather(*map(self._client, range(CLIENTS)))

    async def settle(self, epoch=0):
        """Wait until the engine is ready, in this epoch or a later one: a failure after the last token may have cost
        the ranks.
        """
        await until(lambda: self.engine.status().epoch >= epoch and self.engine.status().state == "ready")

    def _pass_outputs(self, step, outputs):
        self.on_outputs(step, outputs)

    def _pass_change(self):
        self.on_change()

    def _note_reason(self):
        if self.engine.status().reason:
            self.reasons.append(self.engine.status().reason)

    def deliver(self, _step, outputs):
        """Pass outputs on to their clients."""
        for output in outputs:
            self._queues[output.request_id].put_nowait(output)

    async def _client(self, number):
        ids = []
        while True:
            self._attempts += 1
            name = f"{number}-{self._attempts}"
            queue = self._queues[name] = asyncio.Queue()
            params = SamplingParams(max_tokens=TOKENS, seed=number, logit_bias={number: 0.0})
            try:
                self.engine.submit(Request(name, tuple(prompt(number)), params, tuple(ids)))
                error = await self._read(queue, ids)
            except (LockstepError, MemoryError) as refusal:
                error = refusal
            if error is None:
                return ids
            self.errors.append(error)
            assert isinstance(error, MemoryError) or error.meaning.retryable
            await asyncio.sleep(0.002)

    async def _read(self, queue, ids):
        while True:
            output = await queue.get()
            if output.error is not None:
                return output.error
            assert output.position == len(ids)
            ids.extend(output.ids)
            if output.finish is not None:
                return None


async def until(condition):
    """Wait until the condition holds."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)


def prompt(number):
    return [*words(40, seed=1), *words(10 + 15 * number, seed=number)]
