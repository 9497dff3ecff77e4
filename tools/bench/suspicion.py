"""How often a healthy worker is suspected under load, and how soon a stopped one is.

A real router and two real workers on this machine serve streaming clients. No worker is stopped in the first two
parts, so every suspicion in them is false: in the first part there is load alone, in the second the router's process
is also stopped now and then for up to three seconds, as a busy node or a debugger does. In the third part a worker's
driver is stopped again and again, and the time until the router suspects it is measured.

A false positive counts against the heartbeats: each one is a chance to suspect wrongly.

`suspicion.py --minutes 10 --save`.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import Prompts, Traffic
from lockstep_tools.serving.stack import Stack, StackSettings
from measure import ROOT, machine, save, table

_SUSPICIONS = 'lockstep_router_impairments_total{problem="suspected"}'
_SILENCES = 'lockstep_router_failovers_total{reason="silent"}'
_WORKERS = 2
_MODEL = ROOT / "models/reference"
_HEARTBEATS_PER_S = 10.0
_POLL_S = 0.1
_STALL_EVERY_S = (4.0, 8.0)
_STALL_S = (0.3, 3.0)
_TRIALS = 20
_STOPPED_S = 1.2
"""Less than `heartbeat_timeout_s`: the worker keeps its streams."""
_REST_S = 6.0
"""Between two trials."""


@dataclass
class Part:
    """What a part of the run has shown."""

    seconds: float = 0.0
    suspicions: int = 0
    silences: int = 0
    """Times that a worker lost its streams by the hard deadline."""
    polls: int = 0
    """Of the status, for each worker."""
    suspected_polls: int = 0
    stalls: int = 0
    """Stops of the router."""
    streams: int = 0
    failed: int = 0
    delays_s: list[float] = field(default_factory=list)
    """From the stop of a worker until it is suspected."""

    @property
    def heartbeats(self) -> float:
        """Heartbeats of all workers, as many as there should be."""
        return self.seconds * _HEARTBEATS_PER_S * _WORKERS


class Bench:
    """A running system under load."""

    def __init__(self, stack: Stack, traffic: Traffic, client: httpx.AsyncClient, rng: random.Random) -> None:
        self._stack = stack
        self._traffic = traffic
        self._client = client
        self._random = rng

    async def quiet(self, seconds: float, *, with_stalls: bool) -> Part:
        """A part in which no worker is stopped."""
        async with self._counted() as part:
            end = time.monotonic() + seconds
            stall_at = time.monotonic() + self._random.uniform(*_STALL_EVERY_S)
            while time.monotonic() < end:
                if with_stalls and time.monotonic() > stall_at:
                    await self._stop(self._stack.router_pid, self._random.uniform(*_STALL_S))
                    part.stalls += 1
                    stall_at = time.monotonic() + self._random.uniform(*_STALL_EVERY_S)
                for worker in (await self._status())["workers"]:
                    part.polls += 1
                    part.suspected_polls += "suspected" in worker["health"]["problems"]
                await asyncio.sleep(_POLL_S)
        return part

    async def trials(self, count: int) -> Part:
        """A part in which workers are stopped one after the other."""
        async with self._counted() as part:
            for number in range(count):
                worker = f"w{number % _WORKERS}"
                stopping = asyncio.create_task(self._stop(self._stack.worker_pids[worker], _STOPPED_S))
                began = time.monotonic()
                while not stopping.done():
                    status = await self._status()
                    named = {each["id"]: each["health"]["problems"] for each in status["workers"]}
                    if "suspected" in named[worker]:
                        part.delays_s.append(time.monotonic() - began)
                        break
                    await asyncio.sleep(0.01)
                await stopping
                await asyncio.sleep(_REST_S)
        return part

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[Part]:
        part = Part()
        suspicions, silences = await self._counter(_SUSPICIONS), await self._counter(_SILENCES)
        began, streams = time.monotonic(), len(self._traffic.histories)
        yield part
        part.seconds = time.monotonic() - began
        part.suspicions = round(await self._counter(_SUSPICIONS) - suspicions)
        part.silences = round(await self._counter(_SILENCES) - silences)
        histories = self._traffic.histories[streams:]
        part.streams, part.failed = len(histories), sum(history.error is not None for history in histories)

    async def _stop(self, pid: int | None, seconds: float) -> None:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _status(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._client.get("/status")).raise_for_status().json()
        return answer

    async def _counter(self, name: str) -> float:
        text = (await self._client.get("/metrics")).raise_for_status().text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(values[0]) if values else 0.0


async def measure(minutes: float, clients: int, seed: int, log: Path) -> dict[str, Part]:
    """The three parts. The log of all processes goes to a file."""
    settings = StackSettings(str(_MODEL), workers=_WORKERS, tp=1, threads=1, device="cpu", log_level="info")
    with log.open("wb") as output, Stack(settings, output=output) as stack:
        await asyncio.to_thread(stack.wait_ready, 120)
        prompts = Prompts(_MODEL.name, prompt_tokens=200, max_tokens=200)
        async with (
            httpx.AsyncClient(base_url=stack.management_url, timeout=30, trust_env=False) as client,
            Traffic(Endpoint(f"{stack.url}/v1"), prompts, clients=clients) as traffic,
        ):
            await traffic.streaming(timeout_s=60)
            bench = Bench(stack, traffic, client, random.Random(seed))
            parts = {
                "load": await bench.quiet(30 * minutes, with_stalls=False),
                "load, router stopped now and then": await bench.quiet(30 * minutes, with_stalls=True),
                f"a worker stopped for {_STOPPED_S:g} s": await bench.trials(_TRIALS),
            }
            traffic.stop()
    return parts


def row(name: str, part: Part) -> list[str]:
    """A line of the table."""
    delays = sorted(part.delays_s)
    spread = f"{statistics.median(delays):.2f} / {delays[-1]:.2f}" if delays else ""
    return [
        name,
        f"{part.seconds:.0f}",
        str(part.stalls) if part.stalls else "",
        f"{part.streams}, {part.failed} failed",
        f"{part.heartbeats:.0f}",
        f"{len(delays)} of {_TRIALS} found" if delays else str(part.suspicions),
        "" if delays else f"{part.suspicions / part.heartbeats:.3%}",
        "" if delays else f"{part.suspected_polls / max(1, part.polls):.2%}",
        str(part.silences),
        spread,
    ]


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the first two parts (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the stops (default: %(default)s)")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the router and the workers")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about = machine() | {"clients": arguments.clients, "seed": arguments.seed}
    parts = asyncio.run(measure(arguments.minutes, arguments.clients, arguments.seed, arguments.log))
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    header = [
        "part",
        "s",
        "router stopped",
        "streams",
        "heartbeats",
        "suspicions",
        "false positives",
        "time suspected",
        "streams lost to silence",
        "delay, s: p50 / max",
    ]
    text = table(header, [row(name, part) for name, part in parts.items()])
    print(text)
    if arguments.save:
        save("suspicion", {"machine": about, "parts": {name: asdict(part) for name, part in parts.items()}}, text)


if __name__ == "__main__":
    main()
