"""Damaged blocks behind a real engine: each answer is the one that was computed without a store.

A long run by hand, about an hour of one core, which prints how many blocks were damaged:
`.venv/bin/pytest services/inference-worker/tests/test_kv_damage_engine.py -k few --damage-cases 10000 -s`
"""

import asyncio
from pathlib import Path
from random import Random

import pytest
from lockstep_common.grpc_tls import dial_plain
from lockstep_engine import AsyncEngine, EngineConfig, Request, SamplingParams
from lockstep_worker.kv_store import KvStore, StoreOptions
from scripted_kv import ScriptedKv, serving
from test_kv_damage import DAMAGES, parts

MODEL = Path(__file__).parents[3] / "models/reference"
SEED = 20_240_602
PROMPTS = 6
"""Their blocks are more than the engine's own caches have room for: a prompt that comes again is fetched."""
PROMPT_TOKENS = 176
UNDAMAGED_EVERY = 8
PATIENCE_S = 120.0


class EagerStore(KvStore):
    """Fetches whatever is there, as if computing took long; keeps what came of it."""

    def __init__(self, target):
        options = {"timeout_s": 20.0, "fetch_timeout_s": 20.0, "queue_bytes": 64 << 20, "ttl_s": 600.0, "name": "w0"}
        super().__init__(StoreOptions(target=target, **options), dial_plain)
        self.results = []

    async def fetch(self, tenant, hashes, heads, form, recompute_s, into, further_bytes):
        result = await super().fetch(tenant, hashes, heads, form, lambda count: 1000.0 * count, into, 0)
        self.results.append(result)
        return result


class Served:
    """A real engine."""

    def __init__(self, store):
        self._outputs, self._number = asyncio.Queue(), 0
        config = EngineConfig(
            model=str(MODEL), device="cpu", threads=1, max_seqs=1, kv_memory_bytes=2 << 20, host_cache_bytes=1 << 20
        )
        self.engine = AsyncEngine(
            config,
            on_outputs=lambda _step, new: [self._outputs.put_nowait(each) for each in new],
            on_change=lambda: None,
            remote_store=store,
        )

    async def ask(self, prompt):
        """The answer's tokens with their log probabilities, and how many tokens of the prompt were not computed."""
        self._number += 1
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
        assert self.engine.submit(Request(f"r{self._number}", tuple(prompt), params)) is None
        tokens, cached = [], 0
        async with asyncio.timeout(PATIENCE_S):
            while True:
                output = await self._outputs.get()
                assert output.error is None
                tokens += zip(output.ids, output.logprobs, strict=True)
                cached += output.cached_tokens
                if output.finish is not None:
                    return tokens, cached


def damaged(rng, damage, messages):
    """The messages with one part damaged. One with a single message is left as it is: some damages need several."""
    before = [message.SerializeToString() for message in messages]
    grouped = parts(messages)
    if not grouped:
        return messages
    while [message.SerializeToString() for part in grouped for message in part] == before:
        damage(rng, rng.choice(grouped))
    return [message for part in grouped for message in part]


@pytest.mark.parametrize(
    "cases",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.exhaustive)],
    ids=["few", "many"],
)
async def test_no_token_is_different_for_a_damaged_block(socket_path, cases, pytestconfig):
    cases = cases or pytestconfig.getoption("--damage-cases")
    rng = Random(SEED)
    prompts = [[rng.randrange(10, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    target = f"unix:{socket_path}"
    async with serving(ScriptedKv(), target) as kv, EagerStore(target) as store:
        served = Served(store)
        await served.engine.start()
        try:
            computed = [(await served.ask(prompt))[0] for prompt in prompts]
            assert await served.engine.store_prefixes(PATIENCE_S)
            await store.flush(PATIENCE_S)
            store.results.clear()
            hits = fetched = 0
            for number in range(cases):
                is_whole = number % UNDAMAGED_EVERY == UNDAMAGED_EVERY - 1
                damage = DAMAGES[(number - number // UNDAMAGED_EVERY) % len(DAMAGES)]
                kv.mangle = list if is_whole else lambda messages, damage=damage: damaged(rng, damage, messages)
                tokens, cached = await served.ask(prompts[number % PROMPTS])
                assert tokens == computed[number % PROMPTS], f"seed {SEED}, case {number}: {damage.__name__}"
                fetched += is_whole and cached > 0
                hits += any(result.outcome == "damaged" for result in store.results)
                store.results.clear()
        finally:
            await served.engine.close()
    print(f"seed {SEED}: {cases} answers, {hits} with damaged blocks, {fetched} with whole ones, 0 wrong tokens")
    assert fetched > 0
    assert hits > cases / 2
