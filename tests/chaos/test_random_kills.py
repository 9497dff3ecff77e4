"""SIGKILL on random ranks and workers under load from eight clients: clients see nothing but delays.

`--kills 200` makes it as long as you like, `--chaos-seed` makes the same choices again.
"""

import secrets
import time
from collections.abc import Callable

import pytest
from killing import RANK, WORKER, Kill, Killer, percentile
from lockstep_tools.load.comparison import Comparison, compare, run_undisturbed
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import Traffic
from lockstep_tools.load.mix import mixed_requests, with_sessions
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import left_since, port_is_free, traces
from system import MODEL, REFERENCE, System

CLIENTS = 8

_WORST_GAP_S = 15.0  # a dead rank is found at once, but a worker may start again on a busy machine


def summary(kills: list[Kill], comparison: Comparison, run: Traffic, *, seed: int, seconds: float) -> str:
    """The summary, in lines."""
    went = f"{len(kills)} kills in {seconds:.0f} s (seed {seed}), {comparison.streams} streams of {CLIENTS} clients"
    wrong = f"{comparison.failed} failed, {comparison.lost_tokens} tokens lost, {comparison.doubled_tokens} doubled"
    lines = [f"chaos: {went}: {wrong}, {len(comparison.problems)} other problems"]
    for kind in (RANK, WORKER):
        gaps_ms = [1e3 * run.gap_s(kill.at) for kill in kills if kill.kind == kind]
        hit = sum(kill.streams > 0 for kill in kills if kill.kind == kind)
        lines.append(
            f"  {len(gaps_ms)} {kind}s, {hit} of them with streams: longest silence of any client "
            f"p50 {percentile(gaps_ms, 0.5):.0f} ms, p99 {percentile(gaps_ms, 0.99):.0f} ms, "
            f"max {max(gaps_ms, default=0):.0f} ms"
        )
    return "\n".join(lines)


@pytest.mark.slow
async def test_no_stream_is_changed_by_random_kills(
    pytestconfig: pytest.Config, private_tmp: object, summarize: Callable[[str], None]
) -> None:
    count = pytestconfig.getoption("kills")
    seed = pytestconfig.getoption("chaos_seed")
    seed = secrets.randbelow(10**6) if seed is None else seed
    before = traces()
    with Stack(StackSettings(str(REFERENCE), workers=2, tp=2, threads=1, device="cpu")) as stack:
        stack.wait_ready(60)
        system, endpoint = System(stack.url, stack.management_url), Endpoint(f"{stack.url}/v1")
        requests = mixed_requests(MODEL)
        undisturbed = await run_undisturbed(endpoint, requests)
        began_s = time.monotonic()
        async with Traffic(endpoint, with_sessions(requests), clients=CLIENTS) as run:
            await run.streaming()
            killer = Killer(system, run, seed, log=print)
            await killer.run(count)
            await run.finish()
        comparison = compare(run.histories, undisturbed)
        text = summary(killer.kills, comparison, run, seed=seed, seconds=time.monotonic() - began_s)
        summarize(text)
        assert comparison.problems == [], text
        assert comparison.holds, text
        assert max(run.gap_s(kill.at) for kill in killer.kills) < _WORST_GAP_S
        system.until_ready()
        system.until_idle(within_s=10)
    assert left_since(before) == []
    assert port_is_free(stack.port)
