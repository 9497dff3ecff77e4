"""What traces of all requests and a scraped `/metrics` cost a router: tokens a second, and CPU time for a token.

Two routers of this checkout, each before the scripted worker of `router.py`. While the machine has cores to spare they
run at the same time, under equal loads, so that whatever else it does slows both alike. With all it can give they take
turns: in each round off, on, on, off. Each round starts them anew: where a process has its code and data in memory can
make it some percent faster or slower for all its life.

`on` sends the spans of every request to a collector, which is a process that takes and drops them, and is scraped in
OpenMetrics, as often as the chart says. CPU time is the router's own, with the threads that export. Read the ratios;
the collector, the load and the worker use the same cores, so tokens a second need a quiet machine with free ones.

    python tools/bench/telemetry.py --save

Goals: at most 1 % fewer tokens a second, and at most 3 % more CPU time for a token.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvloop
from measure import machine, save, table
from router_load import Load
from router_measure import FULL_STEP_S, MANY, STEP_S, TOKENS, Extent, raise_file_limit, stretch
from router_sides import Side, Target

_HERE = Path(__file__).parent
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_ACCEPT = "application/openmetrics-text;version=1.0.0"
_WARM_S = 3.0
"""Of both sides, after their start."""
_TRIES = 3
"""To measure a stretch."""
LOADS = {"paced": STEP_S, "full": FULL_STEP_S}
"""The worker's steps: paced to measure CPU time, full to measure tokens a second."""
ROUND = ("off", "on", "on", "off")
"""The order of stretches, one at a time: a machine whose speed drifts slows both sides alike."""
TURNS = {"paced": (("off", "on"), ("on", "off")), "full": tuple((name,) for name in ROUND)}
"""The stretches of a round, and which sides are in each at the same time."""


def collect() -> None:
    """Take and drop spans over gRPC until stdin ends; the first line of the output is the port, the last the number of
    messages.
    """
    messages = 0

    def export(_: bytes, __: grpc.ServicerContext) -> bytes:
        nonlocal messages
        messages += 1
        return b""

    handler = grpc.method_handlers_generic_handler(
        _EXPORT[1:].rpartition("/")[0], {"Export": grpc.unary_unary_rpc_method_handler(export)}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(1).wait()
    print(messages, flush=True)


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector's address.

    Raises:
        RuntimeError: when it ends, nothing has been sent to it: nothing was measured.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, "--collector"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    except BaseException:
        process.kill()
        raise
    finally:
        output, _ = process.communicate(timeout=30)
    if int(output or 0) == 0:
        raise RuntimeError("no span has come")


@contextlib.contextmanager
def scraping(port: int, every_s: float) -> Iterator[None]:
    """Read a router's metrics as Prometheus does: first after half of the interval, so that a stretch of one interval
    has one scrape in it.

    Raises:
        RuntimeError: they could not be read.
    """
    end, failures = threading.Event(), []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": _ACCEPT})

    def scrape() -> None:
        wait_s = every_s / 2
        while not end.wait(wait_s):
            wait_s = every_s
            try:
                with opener.open(request, timeout=10) as answer:
                    answer.read()
            except OSError as error:
                failures.append(str(error))

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(15)
    if failures:
        raise RuntimeError(f"/metrics was not answered: {failures[0]}")


def measured(load: str, rounds: int, extent: Extent, scrape_s: float) -> dict[str, list[dict[str, float]]]:
    """Figures of each stretch, by `off` and `on`: two of each in a round, which starts both routers anew."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with collector() as address:
        for _ in range(rounds):
            with contextlib.ExitStack() as stack:
                targets = {
                    name: stack.enter_context(
                        Target(token_every_s=LOADS[load], script=_HERE / "router_worker.py", workers=1, flags=flags)
                    )
                    for name, flags in {"off": [], "on": ["--otlp-endpoint", address, "--trace-ratio", "1"]}.items()
                }
                sides = {name: Side(target.address[1], target.router_pid) for name, target in targets.items()}
                management = _management_port(targets["on"])
                _measure(list(sides.values()), Extent(seconds=min(extent.seconds, _WARM_S)))
                for names in TURNS[load]:
                    with scraping(management, scrape_s) if "on" in names else contextlib.nullcontext():
                        each = figures_of(partial(_measure, [sides[name] for name in names], extent))
                    for name, figures in zip(names, each, strict=True):
                        print(name, {key: round(value, 2) for key, value in figures.items()}, flush=True)
                        found[name].append(figures)
    return found


def figures_of(measure: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]]:
    """What is compared of stretches at the same time. If no token came in one, all are measured again.

    Raises:
        RuntimeError: no token came in any of them.
    """
    for _ in range(_TRIES):
        found = measure()
        if all(each["events"] for each in found):
            return [{"per_s": each["per_s"], "token_us": 1e6 * each["cpu_s"] / each["events"]} for each in found]
        print("no token came in a stretch: once more", flush=True)
    raise RuntimeError(f"no token came in {_TRIES} stretches: the machine is too busy, or --seconds too short")


def _measure(sides: Sequence[Side], extent: Extent) -> list[dict[str, float]]:
    """A stretch of each side, at the same time."""

    async def together() -> list[dict[str, float]]:
        loads = [Load(side.port, MANY, tokens=TOKENS, stream=True) for side in sides]
        return await asyncio.gather(*(stretch(side, load, extent) for side, load in zip(sides, loads, strict=True)))

    return uvloop.run(together())


def _management_port(target: Target) -> int:
    (line,) = [line for line in target.log() if line["message"] == "listening"]
    return int(line["management_port"])


def changes(found: dict[str, list[dict[str, float]]], figure: str) -> list[float]:
    """What `on` has more than `off`, as a part of it, in each round: the means of two stretches."""
    sums = {
        name: [a[figure] + b[figure] for a, b in zip(each[::2], each[1::2], strict=True)]
        for name, each in found.items()
    }
    return [on / off - 1 for off, on in zip(sums["off"], sums["on"], strict=True)]


def summary(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The table of all loads."""
    rows: list[list[Any]] = []
    for load, figure, title, goal in (
        ("full", "per_s", "tokens a second, a token each ms", "-1 %"),
        ("full", "token_us", "CPU time of a token, a token each ms, µs", "+3 %"),
        ("paced", "token_us", f"CPU time of a token, {MANY} streams at {1 / STEP_S:.0f} tokens/s, µs", "+3 %"),
    ):
        medians = [statistics.median(each[figure] for each in found[load][name]) for name in ("off", "on")]
        parts = sorted(changes(found[load], figure))
        spread = f"{statistics.median(parts):+.1%} ({parts[0]:+.1%} to {parts[-1]:+.1%})"
        rows.append([title, *(f"{each:,.1f}" for each in medians), spread, goal])
    return table(["", "off", "on", "change, median (least to most)", "goal"], rows)


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of two stretches each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a stretch (default: %(default)s)")
    parser.add_argument("--scrape-s", type=float, default=15.0, help="between two scrapes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collector:
        collect()
        return
    raise_file_limit()
    extent = Extent(seconds=0.5, warm_s=0.2) if arguments.quick else Extent(seconds=arguments.seconds)
    rounds = 1 if arguments.quick else arguments.rounds
    found = {load: measured(load, rounds, extent, arguments.scrape_s) for load in LOADS}
    text = summary(found)
    print(f"\n{text}")
    if arguments.save:
        about = machine() | {"seconds": extent.seconds, "rounds": rounds, "scrape_s": arguments.scrape_s}
        save("telemetry", {"machine": about, "found": found}, text)


if __name__ == "__main__":
    main()
