"""What traces of all requests cost a worker with two ranks: tokens a second, and CPU time of its driver for a token.

Two systems of this checkout, each a router and a worker on the reference model, take turns: in each round off, on, on,
off, so that a machine whose speed drifts slows both alike. `on` sends the spans of every request, with one of each rank
for each phase, to the collector of `telemetry.py`. A stretch is one request for several answers. CPU time is that of
the worker's driver, which makes the spans and exports them; ranks only count. Read the ratios.

    python tools/bench/worker_telemetry.py --save

Goals: at most 1 % fewer tokens a second, and at most 3 % more CPU time for a token.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import psutil
from lockstep_tools.serving.stack import Stack, StackSettings
from lockstep_tools.serving.status import fetch
from measure import ROOT, machine, save, table
from telemetry import ROUND, changes, collector

_MODEL = ROOT / "models/reference"
_RANKS = 2
_START_S = 120.0
_FIGURES = {
    "per_s": ("tokens a second", "-1 %"),
    "token_us": ("CPU time of the driver for a token, µs", "+3 %"),
}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started within this block inherit."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def started(stack: contextlib.ExitStack, values: Mapping[str, str]) -> tuple[Stack, psutil.Process]:
    """A running system and its worker's driver."""
    settings = StackSettings(str(_MODEL), tp=_RANKS, device="cpu", threads=1)
    with environment(values):
        system = stack.enter_context(Stack(settings))
        system.wait_ready(_START_S)
    with httpx.Client(trust_env=False) as client:
        (worker,) = fetch(client, system.management_url)["workers"]
    return system, psutil.Process(worker["pid"])


def measured(url: str, driver: psutil.Process, answers: int, tokens: int) -> dict[str, float]:
    """Figures of one request for several answers, of so many tokens each."""
    body = {"model": _MODEL.name, "prompt": "It was", "n": answers, "max_tokens": tokens, "ignore_eos": True}
    before, began_s = driver.cpu_times(), time.monotonic()
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False).raise_for_status()
    took_s, after = time.monotonic() - began_s, driver.cpu_times()
    count = response.json()["usage"]["completion_tokens"]
    cpu_s = after.user + after.system - before.user - before.system
    return {"per_s": count / took_s, "token_us": 1e6 * cpu_s / count}


def compared(rounds: int, answers: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """Figures of each stretch, by `off` and `on`."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(collector())
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}", "OTEL_TRACES_SAMPLER_ARG": "1"}
        sides = {name: started(stack, values) for name, values in {"off": {}, "on": traced}.items()}
        for system, driver in sides.values():
            measured(system.url, driver, answers, tokens)
        for _ in range(rounds):
            for name in ROUND:
                system, driver = sides[name]
                found[name].append(measured(system.url, driver, answers, tokens))
                print(name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    return found


def summary(found: Mapping[str, list[dict[str, float]]]) -> str:
    """The table."""
    rows: list[list[Any]] = []
    for figure, (title, goal) in _FIGURES.items():
        medians = [statistics.median(each[figure] for each in found[name]) for name in ("off", "on")]
        parts = sorted(changes(dict(found), figure))
        spread = f"{statistics.median(parts):+.1%} ({parts[0]:+.1%} to {parts[-1]:+.1%})"
        rows.append([title, *(f"{each:,.1f}" for each in medians), spread, goal])
    return table(["", "off", "on", "change, median (least to most)", "goal"], rows)


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of two stretches each (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="of a request, at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=800, help="of an answer (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    found = compared(arguments.rounds, arguments.answers, arguments.tokens)
    text = summary(found)
    print(f"\n{text}")
    if arguments.save:
        about = machine() | {name: getattr(arguments, name) for name in ("rounds", "answers", "tokens")}
        save("worker-telemetry", {"machine": about, "found": found}, text)


if __name__ == "__main__":
    main()
