"""What traces of all requests and a scraped `/metrics` cost a router: tokens a second, and CPU time for a token.

Two routers of this checkout, each before the scripted worker of `router.py`, take turns: in each round off, on, on,
off, so that a machine whose speed drifts slows both alike. `on` sends the spans of every request to a collector, which
is a process that takes and drops them, and is scraped as by Prometheus, in OpenMetrics. CPU time is the router's own,
with the threads that export. Read the ratios; the collector, the load and the worker use the same cores, so tokens a
second need a quiet machine with free ones.

    python tools/bench/telemetry.py --save

Goals: at most 1 % fewer tokens a second, and at most 3 % more CPU time for a token.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
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
ROUND = ("off", "on", "on", "off")
"""The order of stretches: a machine whose speed drifts slows both sides alike."""
_TRIES = 3
"""To measure a stretch."""
LOADS = {"paced": STEP_S, "full": FULL_STEP_S}
"""The worker's steps: paced to measure CPU time, full to measure tokens a second."""


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
    """Read a router's metrics as Prometheus does.

    Raises:
        RuntimeError: they could not be read.
    """
    end, failures = threading.Event(), []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": _ACCEPT})

    def scrape() -> None:
        while not end.is_set():
            try:
                with opener.open(request, timeout=10) as answer:
                    answer.read()
            except OSError as error:
                failures.append(str(error))
            end.wait(every_s)

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(15)
    if failures:
        raise RuntimeError(f"/metrics was not answered: {failures[0]}")


def measured(step_s: float, rounds: int, extent: Extent, scrape_s: float) -> dict[str, list[dict[str, float]]]:
    """Figures of each stretch, by `off` and `on`."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(collector())
        sides = {}
        for name, flags in {"off": [], "on": ["--otlp-endpoint", address, "--trace-ratio", "1"]}.items():
            target = stack.enter_context(
                Target(token_every_s=step_s, script=_HERE / "router_worker.py", workers=1, flags=flags)
            )
            sides[name] = (Side(target.address[1], target.router_pid), _management_port(target))
        for side, _ in sides.values():
            _measure(side, extent)
        for _ in range(rounds):
            for name in ROUND:
                side, management = sides[name]
                with scraping(management, scrape_s) if name == "on" else contextlib.nullcontext():
                    figures = figures_of(partial(_measure, side, extent))
                print(name, {key: round(value, 2) for key, value in figures.items()}, flush=True)
                found[name].append(figures)
    return found


def figures_of(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What is compared of a stretch. One in which no token came shows nothing, and is measured again.

    Raises:
        RuntimeError: no token came in any of them.
    """
    for _ in range(_TRIES):
        each = measure()
        if each["events"]:
            return {"per_s": each["per_s"], "token_us": 1e6 * each["cpu_s"] / each["events"]}
        print("no token came in a stretch: once more", flush=True)
    raise RuntimeError(f"no token came in {_TRIES} stretches: the machine is too busy, or --seconds too short")


def _measure(side: Side, extent: Extent) -> dict[str, float]:
    return uvloop.run(stretch(side, Load(side.port, MANY, tokens=TOKENS, stream=True), extent))


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
    parser.add_argument("--seconds", type=float, default=4.0, help="of a stretch (default: %(default)s)")
    parser.add_argument("--scrape-s", type=float, default=2.0, help="between two scrapes (default: %(default)s)")
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
    found = {load: measured(step_s, rounds, extent, arguments.scrape_s) for load, step_s in LOADS.items()}
    text = summary(found)
    print(f"\n{text}")
    if arguments.save:
        about = machine() | {"seconds": extent.seconds, "rounds": rounds, "scrape_s": arguments.scrape_s}
        save("telemetry", {"machine": about, "found": found}, text)


if __name__ == "__main__":
    main()
