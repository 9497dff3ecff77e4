"""Paced streams through real routers: what the death of a worker or of a router adds, without a model's own times.

Correctness is judged strictly. Times are printed, and judged generously: machines differ. The figures of a calm machine
are in docs/bench/README.md.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from killing import percentile
from lockstep_client import AsyncLockstepClient, Finish, LockstepError, Policy, TextPiece, Usage
from lockstep_tools.load.comparison import compare
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import Traffic, drive
from lockstep_tools.load.history import StreamRequest
from machine import left_since, traces
from paced import Paced
from silences import longest_gap_between_s

pytestmark = pytest.mark.slow

STREAMS = 64
RESUMABLE = 200
TOKEN_EVERY_S = 0.05
TOKENS = 120
_WORST_GAP_S = 15.0
_WHOLE_S = 300.0
POLICY = Policy(retries=30, timeout_s=_WHOLE_S)
NO_REPEAT = Policy(retries=2, timeout_s=_WHOLE_S, on_lost="error")


@pytest.fixture
def paced(private_tmp: object) -> Iterator[Paced]:
    before = traces()
    with Paced(workers=2, routers=2, token_every_s=TOKEN_EVERY_S) as running:
        yield running
    assert left_since(before) == []


def request(number: int) -> StreamRequest:
    body = {
        "model": "reference",
        "prompt": "hello world",
        "seed": number,
        "max_tokens": TOKENS,
        "logprobs": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    return StreamRequest("/completions", body, {"X-Session-ID": f"session {number}"})


@pytest.mark.exhaustive
async def test_64_streams_while_a_worker_is_killed(paced: Paced, summarize: Callable[[str], None]) -> None:
    endpoint = Endpoint(paced.urls[0])
    undisturbed = await drive(endpoint, [request(number) for number in range(STREAMS)], clients=STREAMS)
    assert [history.error for history in undisturbed] == [None] * STREAMS
    async with Traffic(endpoint, request, clients=STREAMS, requests=STREAMS) as run:
        await run.streaming()
        calm = run.note_moment("calm")
        await asyncio.sleep(1.0)
        os.kill(paced.workers[0].pid, signal.SIGKILL)
        killed = run.note_moment("killed")
    comparison = compare(run.histories, undisturbed)
    before = [longest_gap_between_s(history, calm, killed) for history in run.histories]
    after = [history.longest_gap_s(killed.at_s, killed.at_s + 2) for history in run.histories]
    summarize(
        f"paced: {STREAMS} streams, a token each {1e3 * TOKEN_EVERY_S:.0f} ms, one of two workers killed: "
        f"{comparison.failed} failed, {comparison.lost_tokens} tokens lost, {comparison.doubled_tokens} doubled, "
        f"{comparison.changed} changed; longest silence of a stream in ms: {in_ms(after)}; calm before: {in_ms(before)}"
    )
    assert comparison.streams == STREAMS
    assert comparison.holds, comparison.problems[:5]
    assert max(after) < _WORST_GAP_S


def in_ms(seconds: list[float]) -> str:
    """`p50 51, p99 80, max 80`."""
    p50, p99 = (1e3 * percentile(seconds, share) for share in (0.5, 0.99))
    return f"p50 {p50:.0f}, p99 {p99:.0f}, max {1e3 * max(seconds):.0f}"


@dataclass
class Received:
    """What a user of `lockstep_client` got of one stream."""

    text: str = ""
    ends: list[type] = field(default_factory=list)
    error: LockstepError | None = None


async def receive(urls: list[str], seed: int, begun: asyncio.Semaphore, policy: Policy) -> Received:
    """Read a stream of its own client; `begun` is released once text has come."""
    received = Received()
    fields = {"model": "reference", "prompt": "hello world", "seed": seed, "max_tokens": TOKENS, "stream": True}
    async with AsyncLockstepClient(urls, policy=policy) as client:
        try:
            async with await client.complete(**fields) as stream:
                async for event in stream:
                    if not isinstance(event, TextPiece):
                        received.ends.append(type(event))
                        continue
                    if not received.text:
                        begun.release()
                    received.text += event.text
        except LockstepError as error:
            received.error = error
            begun.release()
    return received


async def all_of(
    urls: Callable[[int], list[str]], kill: Callable[[], None] = lambda: None, policy: Policy = POLICY
) -> list[Received]:
    """All resumable streams at once; `kill` is called when each of them has begun."""
    begun = asyncio.Semaphore(0)
    async with asyncio.timeout(_WHOLE_S):
        streams = [asyncio.create_task(receive(urls(seed), seed, begun, policy)) for seed in range(RESUMABLE)]
        for _ in streams:
            await begun.acquire()
        kill()
        return await asyncio.gather(*streams)


_undisturbed: list[Received] = []
"""They depend on their seeds alone, so one run does for all tests."""


async def undisturbed_by(paced: Paced) -> list[Received]:
    if not _undisturbed:
        _undisturbed.extend(await all_of(lambda _: paced.urls[1:]))
    return _undisturbed


async def test_one_of_two_routers_is_killed_under_200_resumable_streams(
    paced: Paced, summarize: Callable[[str], None]
) -> None:
    """Without a shared journal only its own streams break. Users' clients begin these again at the other router."""
    undisturbed = await undisturbed_by(paced)
    assert {(each.error, *each.ends) for each in undisturbed} == {(None, Finish, Usage)}
    assert len({each.text for each in undisturbed}) == RESUMABLE
    doomed, other = paced.urls
    # Even ones have the router that dies, and may not repeat; odd ones have the other router.
    broken = await all_of(lambda seed: [other] if seed % 2 else [doomed], kill=paced.routers[0].kill, policy=NO_REPEAT)
    codes = Counter(each.error.code for each in broken if each.error)
    for seed, (each, whole) in enumerate(zip(broken, undisturbed, strict=True)):
        if each.error is None:  # the other router's, or ended before the last one had begun
            assert (each.text, each.ends) == (whole.text, [Finish, Usage])
            continue
        assert seed % 2 == 0
        assert each.ends != [Finish, Usage]
        assert whole.text.startswith(each.text)
    summarize(
        f"one of two routers killed: {RESUMABLE} streams, {RESUMABLE // 2} of them its own, of which "
        f"{codes.total()} ran and broke, by code: {dict(codes)}; the others are whole"
    )
    assert codes


async def test_clients_get_on_when_one_of_two_routers_is_killed(paced: Paced, summarize: Callable[[str], None]) -> None:
    undisturbed = await undisturbed_by(paced)
    run = await all_of(lambda seed: paced.urls, kill=paced.routers[0].kill)
    changed = sum(each.text != whole.text for each, whole in zip(run, undisturbed, strict=True))
    ends = sum(each.ends != [Finish, Usage] for each in run)
    errors = [each.error for each in run if each.error]
    summarize(
        f"one of two routers killed under {RESUMABLE} streams of lockstep_client: {len(errors)} errors, "
        f"{changed} texts lost, doubled or changed in a part, {ends} without one end and one usage"
    )
    assert (errors, changed, ends) == ([], 0, 0)
