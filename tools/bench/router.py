"""What the router costs: its CPU time for each streamed token and each request, in this checkout and in an older one.

The router serves a scripted worker that gives all streams a token in each step. The two checkouts take turns, so that a
noisy machine slows both alike; read the ratio. CPU time is the process's own, so what the worker and the clients need
does not count, and neither does waiting for a core.

A stream's cost is that of its request plus that of its tokens: the first is measured with requests of one token.

`router.py --before CHECKOUT --save`. The checkout needs no build.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from measure import ROOT, machine, save, table

sys.path.insert(0, str(ROOT / "tests/hostile"))

from target import Target

_WORKER = Path(__file__).with_name("router_worker.py")
_STREAMS = 64
_TOKENS = 128
_STEP_S = 0.01
"""Of the worker: 64 streams at 100 tokens a second, as of a small model on a GPU."""
_REQUESTS = 16
"""Connections that send requests of one token."""


class Load:
    """Connections that send the same request again and again."""

    def __init__(self, port: int, connections: int, *, stream: bool, tokens: int) -> None:
        self._port = port
        self._connections = connections
        body = {"model": "reference", "prompt": "It was a dark night, and", "max_tokens": tokens, "stream": stream}
        content = json.dumps(body | {"ignore_eos": True}).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
        )
        self._last_id = b":%d\ndata: " % tokens
        self.answered = 0
        """Complete answers since the start."""

    async def run(self) -> None:
        """Send requests until this is cancelled."""
        await asyncio.gather(*(self._repeat() for _ in range(self._connections)))

    async def _repeat(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            while True:
                writer.write(self._request)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                if b"content-length" in head.lower():
                    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                    await reader.readexactly(length)
                else:
                    data = await reader.readuntil(b"\r\n0\r\n\r\n")
                    assert self._last_id in data, data[-400:]
                    assert b"[DONE]" in data, data[-200:]
                self.answered += 1
        finally:
            writer.close()


async def spent(target: Target, load: Load, seconds: float) -> tuple[float, int]:
    """The router's CPU seconds, and the answers, during a stretch of the load."""
    running = asyncio.create_task(load.run())
    try:
        await asyncio.wait({running}, timeout=1.0)  # warm
        cpu_s, answered = target.cpu_s(), load.answered
        await asyncio.wait({running}, timeout=seconds)
        assert not running.done(), running.exception()
        return target.cpu_s() - cpu_s, load.answered - answered
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def measure(tree: Path, seconds: float) -> dict[str, float]:
    """The costs in one checkout, in microseconds of CPU time."""
    with Target(tree, token_every_s=_STEP_S, script=_WORKER, workers=1) as target:
        _, port = target.address
        cpu_s, requests = await spent(target, Load(port, _REQUESTS, stream=False, tokens=1), seconds)
        request_s = cpu_s / requests
        cpu_s, streams = await spent(target, Load(port, _STREAMS, stream=True, tokens=_TOKENS), seconds)
        token_s = (cpu_s / streams - request_s) / _TOKENS
    return {"request_us": 1e6 * request_s, "token_us": 1e6 * token_s}


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--rounds", type=int, default=5, help="of each checkout (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "after": ROOT} if arguments.before else {"after": ROOT}
    about = machine() | {"streams": _STREAMS, "tokens": _TOKENS, "requests_at_once": _REQUESTS}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
    for _ in range(arguments.rounds):
        for side, tree in trees.items():
            rounds[side].append(asyncio.run(measure(tree, arguments.seconds)))
            print(side, {name: round(value, 1) for name, value in rounds[side][-1].items()}, flush=True)
    median: dict[str, dict[str, float]] = {
        side: {name: statistics.median(each[name] for each in results) for name in ("token_us", "request_us")}
        for side, results in rounds.items()
    }
    header: list[Any] = ["CPU time of the router, µs", *trees, *(["ratio"] if len(trees) > 1 else [])]
    rows = []
    for name, title in (("token_us", "a streamed token"), ("request_us", "a request of one token")):
        values = [median[side][name] for side in trees]
        rows.append(
            [title, *(f"{value:.1f}" for value in values), *([f"{values[0] / values[-1]:.2f}"] * (len(values) > 1))]
        )
    text = table(header, rows)
    print(f"\n{text}")
    if arguments.save:
        save("router", {"machine": about, "rounds": rounds}, text)


if __name__ == "__main__":
    main()
