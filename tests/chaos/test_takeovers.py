"""Routers that share a state server are killed under resumable streams, which go on at another router.

Clients may not begin a stream again (`on_lost="error"`), so a stream that no router continues is an error. Correctness
is judged strictly; silences are printed, and judged generously.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from killing import percentile
from lockstep_client import AsyncLockstepClient, Finish, LockstepError, Policy, TextPiece, Usage
from machine import left_since, traces
from paced import Paced
from redis_server import RedisServer

_WHOLE_S = 300.0
_WORST_SILENCE_S = 15.0
_MIRRORED_S = 0.3
"""Until this time after its first token a stream may be unknown to the state server on a slow machine."""
POLICY = Policy(retries=40, timeout_s=_WHOLE_S, on_lost="error")


@dataclass
class Received:
    """What a client got of one stream."""

    text: str = ""
    ends: list[type] = field(default_factory=list)
    error: LockstepError | None = None
    times: list[float] = field(default_factory=list)

    def silence_s(self, since: float) -> float:
        """The longest time without an event after a moment; 0 if the stream had ended before."""
        times = [at for at in self.times if at >= since]
        earlier = [at for at in self.times if at < since]
        if not times or not earlier:
            return 0.0
        return max(later - at for at, later in zip([earlier[-1], *times[:-1]], times, strict=True))


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "memory":
        yield "memory"
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.address
    server.kill()


async def receive(urls: list[str], seed: int, tokens: int, begun: asyncio.Semaphore, received: Received) -> None:
    """Read a stream of its own client; `begun` is released once text has come."""
    fields = {"model": "reference", "prompt": "hello world", "seed": seed, "max_tokens": tokens, "stream": True}
    async with AsyncLockstepClient(urls, policy=POLICY) as client:
        try:
            async with await client.complete(**fields) as stream:
                async for event in stream:
                    received.times.append(time.monotonic())
                    if not isinstance(event, TextPiece):
                        received.ends.append(type(event))
                        continue
                    if not received.text:
                        begun.release()
                    received.text += event.text
        except LockstepError as error:
            received.error = error
            begun.release()


async def run_streams(
    urls: list[str], streams: int, tokens: int, kill: Callable[[], None] | None, chance: random.Random
) -> tuple[list[Received], float]:
    """All streams at once; `kill` is called at a random moment after all have begun. When that was."""
    begun, killed_at = asyncio.Semaphore(0), 0.0
    all_received = [Received() for _ in range(streams)]
    try:
        async with asyncio.timeout(_WHOLE_S):
            running = [
                asyncio.create_task(receive(urls, seed, tokens, begun, received))
                for seed, received in enumerate(all_received)
            ]
            for _ in running:
                await begun.acquire()
            if kill is not None:
                await asyncio.sleep(_MIRRORED_S + chance.uniform(0.0, 0.5))
                killed_at = time.monotonic()
                kill()
            await asyncio.gather(*running)
    except TimeoutError:
        now = time.monotonic()
        silent = {
            seed: (len(each.times), round(now - max(each.times, default=now), 1))
            for seed, each in enumerate(all_received)
            if Finish not in each.ends
        }
        raise AssertionError(f"events of the streams that did not end, and seconds since the last: {silent}") from None
    return all_received, killed_at


def takeovers(management_url: str) -> int:
    """Streams of other routers that a router has continued or given again."""
    text = httpx.get(f"{management_url}/metrics", trust_env=False).text
    found = re.findall(r'lockstep_router_takeovers_total\{outcome="(?:continued|finished)"\} ([0-9.]+)', text)
    return int(sum(map(float, found)))


async def check_kills(
    store: str, *, streams: int, tokens: int, token_every_s: float, kills: int, seed: int
) -> tuple[int, list[float]]:
    """Kill one router after the other; the number of streams that were continued, and the silences of those."""
    chance = random.Random(seed)
    with Paced(workers=1, routers=2, token_every_s=token_every_s, store=store) as paced:
        whole, _ = await run_streams(paced.urls[1:], streams, tokens, None, chance)
        assert {(each.error, *each.ends) for each in whole} == {(None, Finish, Usage)}
        total, silences, doomed = 0, [], 0
        for kill in range(kills):
            print(f"kill {kill}")
            if kill:
                await asyncio.to_thread(paced.restart_router, doomed)
            doomed = chance.randrange(2)
            survivor = paced.management_urls[1 - doomed]
            before = takeovers(survivor)
            run, killed_at = await run_streams(paced.urls, streams, tokens, paced.routers[doomed].kill, chance)
            continued = takeovers(survivor) - before
            errors = [each.error for each in run if each.error]
            changed = sum(each.text != other.text for each, other in zip(run, whole, strict=True))
            ends = sum(each.ends != [Finish, Usage] for each in run)
            assert (errors, changed, ends) == ([], 0, 0), f"seed {seed}"
            total += continued
            # The streams that were continued are those with the longest silences.
            silences += sorted(each.silence_s(killed_at) for each in run)[len(run) - continued :]
    return total, silences


def described(streams: int, kills: int, store: str, total: int, silences: list[float]) -> str:
    kind = store.partition(":")[0]
    p50, p99 = (1e3 * percentile(silences, share) for share in (0.5, 0.99))
    return (
        f"{kills} routers killed under {streams} resumable streams each, state server on {kind}: {total} continued on "
        f"the other one, 0 lost, doubled or changed; silence in ms: p50 {p50:.0f}, p99 {p99:.0f}, "
        f"max {1e3 * max(silences):.0f}"
    )


async def test_streams_of_a_killed_router_go_on(
    store: str, private_tmp: object, summarize: Callable[[str], None]
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    before = traces()
    total, silences = await check_kills(store, streams=16, tokens=20, token_every_s=0.1, kills=1, seed=seed)
    summarize(described(16, 1, store, total, silences or [0.0]))
    assert total >= 1
    assert max(silences) < _WORST_SILENCE_S
    assert left_since(before) == []


@pytest.mark.slow
async def test_routers_are_killed_again_and_again_under_200_streams(
    store: str, private_tmp: object, summarize: Callable[[str], None], pytestconfig: pytest.Config
) -> None:
    given = pytestconfig.getoption("--chaos-seed")
    seed = random.randrange(1 << 32) if given is None else given
    print("seed", seed)
    kills = pytestconfig.getoption("--kills")
    before = traces()
    total, silences = await check_kills(store, streams=200, tokens=60, token_every_s=0.2, kills=kills, seed=seed)
    summarize(described(200, kills, store, total, silences) + f"; seed {seed}")
    assert total >= 20 * kills
    assert max(silences) < _WORST_SILENCE_S
    assert left_since(before) == []
