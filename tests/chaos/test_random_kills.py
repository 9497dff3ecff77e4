"""SIGKILL on random ranks and workers under load from eight clients: nobody notices anything but time.

`--kills 200` makes it as long as you like, `--chaos-seed` makes the same choices again.
"""

import secrets
import time
from collections.abc import Callable

import pytest
from killing import RANK, WORKER, Kill, Killer, percentile
from lockstep_tools.endpoint import Endpoint
from lockstep_tools.loadgen import Traffic
from lockstep_tools.mix import mixed_requests, with_sessions
from lockstep_tools.stack import Stack, StackSettings
from lockstep_tools.verdict import Verdict, in_peace, judge
from machine import left_since, port_is_free, traces
from system import MODEL, REFERENCE, System

CLIENTS = 8

_WORST_GAP_S = 15.0  # a rank that is found dead at once and a worker that is started anew on a busy machine


def summary(kills: list[Kill], verdict: Verdict, run: Traffic, *, seed: int, seconds: float) -> str:
    """One line for each thing to know."""
    went = f"{len(kills)} kills in {seconds:.0f} s (seed {seed}), {verdict.streams} streams of {CLIENTS} clients"
    wrong = f"{verdict.failed} failed, {verdict.lost_tokens} tokens lost, {verdict.doubled_tokens} doubled"
    lines = [f"chaos: {went}: {wrong}, {len(verdict.problems)} other problems"]
    for kind in (RANK, WORKER):
        gaps_ms = [1e3 * run.gap_s(kill.mark) for kill in kills if kill.kind == kind]
        hit = sum(kill.streams > 0 for kill in kills if kill.kind == kind)
        lines.append(
            f"  {len(gaps_ms)} {kind}s, {hit} of them with streams: longest silence of any client "
            f"p50 {percentile(gaps_ms, 0.5):.0f} ms, p99 {percentile(gaps_ms, 0.99):.0f} ms, "
            f"max {max(gaps_ms, default=0):.0f} ms"
        )
    return "\n".join(lines)


async def test_no_stream_is_changed_by_random_kills(
    pytestconfig: pytest.Config, private_tmp: object, summarize: Callable[[str], None]
) -> None:
    count = pytestconfig.getoption("kills")
    seed = pytestconfig.getoption("chaos_seed")
    seed = secrets.randbelow(10**6) if seed is None else seed
    before = traces()
    with Stack(StackSettings(str(REFERENCE), workers=2, tp=2, threads=1, device="cpu")) as stack:
        stack.wait_ready(60)
        system, endpoint = System(stack.url), Endpoint(f"{stack.url}/v1")
        requests = mixed_requests(MODEL)
        calm = await in_peace(endpoint, requests)
        began_s = time.monotonic()
        async with Traffic(endpoint, with_sessions(requests), clients=CLIENTS) as run:
            await run.streaming()
            killer = Killer(system, run, seed, log=print)
            await killer.run(count)
            await run.finish()
        verdict = judge(run.histories, calm)
        text = summary(killer.kills, verdict, run, seed=seed, seconds=time.monotonic() - began_s)
        summarize(text)
        assert verdict.problems == [], text
        assert verdict.holds, text
        assert max(run.gap_s(kill.mark) for kill in killer.kills) < _WORST_GAP_S
        system.until_whole()
        system.until_idle(within_s=10)
    assert left_since(before) == []
    assert port_is_free(stack.port)
