"""What the GPU's benchmark measures of an engine at which prompts arrive while streams run."""

import asyncio
import itertools
import random
import time
from contextlib import suppress
from pathlib import Path

from gpu_run import Bench
from gpu_settings import DEVICE
from gpu_whole import engine_model
from lockstep_common.errors import LockstepError
from lockstep_engine import AsyncEngine, EngineConfig, Output, Request, SamplingParams

_VOCABULARY = 4000
_ARRIVAL_TOKENS = 8
"""New tokens of a request that arrives."""


def measure_arrivals(bench: Bench) -> None:
    """The time between two tokens of a running stream, and that of a prompt to its first token, while prompts arrive at
    random times: at several rates of arrival.
    """
    path = engine_model(bench)
    for rate in bench.settings.arrivals_per_s:
        traffic = Traffic(bench.settings.batches[-1] // 2 or 1)
        about = {"model": path.name, "streams": len(traffic.running), "prompt": bench.settings.arriving,
                 "arrivals_per_s": rate}  # fmt: skip
        asyncio.run(serve(bench, path, rate, traffic))
        for share in (0.5, 0.99):
            bench.add("arrivals", f"between tokens, p{share * 100:g}", quantile(traffic.gaps_s, share) * 1e3, "ms",
                      **about)  # fmt: skip
        if traffic.firsts_s:
            bench.add("arrivals", "to the first token, p50", quantile(traffic.firsts_s, 0.5) * 1e3, "ms", **about)
        bench.add("arrivals", "without a first token at the end", len(traffic.arrived_at), "", **about)


class Traffic:
    """Streams that run from the beginning, requests that arrive meanwhile, and the times of their tokens."""

    def __init__(self, streams: int) -> None:
        self.running = {f"stream-{each}" for each in range(streams)}
        self.gaps_s: list[float] = []
        """Between two tokens of a stream."""
        self.firsts_s: list[float] = []
        """From an arrival to its first token."""
        self.ended = asyncio.Event()
        """A stream has ended: from then on fewer run."""
        self.arrived_at: dict[str, float] = {}
        """Requests that have arrived and have no token yet."""
        self.error: LockstepError | None = None
        """Of a request that has failed: the times mean nothing."""
        self._last: dict[str, float] = {}

    def arrive(self, name: str) -> None:
        """A request arrives now."""
        self.arrived_at[name] = time.perf_counter()

    def take(self, _step: int, outputs: list[Output]) -> None:
        """Note the tokens of a step."""
        now = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if output.error is not None:
                self.error = output.error
                self.ended.set()
            if not output.ids:
                continue
            if name in self.running:
                if name in self._last:
                    self.gaps_s.append(now - self._last[name])
                self._last[name] = now
            elif name in self.arrived_at:
                self.firsts_s.append(now - self.arrived_at.pop(name))
            if output.finish is not None and name in self.running:
                self.ended.set()


async def serve(bench: Bench, path: Path, rate: float, traffic: Traffic) -> None:
    """Run an engine until a stream of the traffic ends; `rate`: arrivals a second, 0: none."""
    settings = bench.settings
    tokens = settings.new_tokens * 8
    config = EngineConfig(
        str(path), device=DEVICE.type, max_context=settings.arriving + tokens + 64, prefix_cache=False,
        max_seqs=2 * len(traffic.running) + 8, deterministic=bench.exact,
    )  # fmt: skip
    engine = AsyncEngine(config, on_outputs=traffic.take, on_change=lambda: None)
    chooser = random.Random(5)

    def submit(name: str, prompt_tokens: int, new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        engine.submit(Request(name, tuple(chooser.choices(range(2, _VOCABULARY), k=prompt_tokens)), params))

    try:
        await engine.start()
        for name in sorted(traffic.running):
            submit(name, 32, tokens)
        for number in itertools.count():
            with suppress(TimeoutError):
                await asyncio.wait_for(traffic.ended.wait(), chooser.expovariate(rate) if rate else None)
            if traffic.error is not None:
                raise traffic.error
            if traffic.ended.is_set():
                break
            traffic.arrive(f"arrival-{number}")
            submit(f"arrival-{number}", settings.arriving, _ARRIVAL_TOKENS)
    finally:
        await engine.close()


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
