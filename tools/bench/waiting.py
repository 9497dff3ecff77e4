"""Requests that wait in line for a busy worker, with this checkout and with an older one.

One worker with `max_seqs` 1 gets 24 requests at once, each of about half a second, and all deadlines are a tenth of
their defaults. `--scale 1` makes them all ten times as long. Three sides: an older checkout (`--before`), this one, and
this one with a `max_queue_wait_s` that is shorter than the line, so that late requests are refused.

`waiting.py --before CHECKOUT --save`. The checkout needs no build.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from measure import ROOT, machine, save, table

_REQUESTS = 24
_SECONDS_EACH = 5.0
_APART_S = 0.01
_MODEL = ROOT / "models/reference"
_PARTS = (
    "tools",
    "services/router",
    "services/inference-worker",
    "libs/engine",
    "libs/client",
    "libs/common",
    "libs/api",
)
_DEADLINES_S = {
    "LOCKSTEP_FIRST_TOKEN_DEADLINE_S": 30.0,
    "LOCKSTEP_RESUME_DEADLINE_S": 60.0,  # of older checkouts
    "LOCKSTEP_MAX_QUEUE_WAIT_S": 300.0,
}
_SHORT_WAIT_S = 60.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/v1")


@dataclass
class Answer:
    """The answer that a client got. Times are in seconds from its request."""

    status: int
    first_token_s: float | None
    ended_s: float
    retry_after_s: float | None
    message: str


async def ask(client: httpx.AsyncClient, number: int, tokens: int) -> Answer:
    """A streamed completion."""
    body: dict[str, Any] = {"model": _MODEL.name, "prompt": f"Chapter {number}. It was", "max_tokens": tokens}
    began = time.monotonic()
    first = None
    async with client.stream("POST", "/completions", json=body | {"ignore_eos": True, "stream": True}) as response:
        text = ""
        async for line in response.aiter_lines():
            text = line if line and line != "data: [DONE]" else text
            if first is None and '"choices"' in line:
                first = time.monotonic() - began
        retry_after = response.headers.get("retry-after")
        error = json.loads(text.removeprefix("data: ")).get("error")
        ended = time.monotonic() - began
        # An error in a stream that has begun to answer has no status of its own.
        status = 503 if error is not None and response.status_code == 200 else response.status_code
        return Answer(
            status, first, ended, float(retry_after) if retry_after else None, (error or {}).get("message", "")
        )


def measure(tree: Path, deadlines_s: dict[str, float], scale: float) -> dict[str, Any]:
    """All requests on one `lockstep serve` of a checkout; requests and deadlines are `scale` times as long."""
    settings = {"LOCKSTEP_MAX_SEQS": "1"} | {name: f"{scale * value:g}" for name, value in deadlines_s.items()}
    sources = os.pathsep.join(str(tree / part / "src") for part in _PARTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "serve", str(_MODEL), "--port", "0", "--device", "cpu"],
        env=os.environ | settings | {"PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        found = next(filter(None, map(_ADDRESS.search, process.stdout)))
        return asyncio.run(crowd(found[0], scale * _SECONDS_EACH))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


async def crowd(api: str, seconds_each: float) -> dict[str, Any]:
    """The figures of a line of requests, after one request alone."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api, timeout=600, trust_env=False, limits=limits) as client:
        await ask(client, 0, 50)
        alone = await ask(client, 0, 200)
        assert alone.status == 200, alone
        tokens = min(1900, int(200 * seconds_each / alone.ended_s))

        async def later(number: int) -> Answer:
            await asyncio.sleep(number * _APART_S)
            return await ask(client, number, tokens)

        answers = await asyncio.gather(*map(later, range(_REQUESTS)))
    starts = [n * _APART_S + answer.first_token_s for n, answer in enumerate(answers) if answer.first_token_s]
    return {
        "tokens_each": tokens,
        "answered": sum(answer.status == 200 for answer in answers),
        "overtaken": sum(later < earlier for earlier, later in itertools.pairwise(starts)),
        "longest_s": round(max(answer.ended_s for answer in answers), 3),
        "answers": [asdict(answer) for answer in answers],
    }


def row(side: str, result: dict[str, Any]) -> list[str]:
    """A line of the table."""
    others = [Answer(**answer) for answer in result["answers"] if answer["status"] != 200]
    after = statistics.median(answer.ended_s for answer in others) if others else None
    promised = [answer.retry_after_s for answer in others if answer.retry_after_s is not None]
    return [
        side,
        f"{result['answered']} of {_REQUESTS}",
        str(result["overtaken"]),
        f"{result['longest_s']:.1f}",
        "" if after is None else f"{1000 * after:.0f}",
        f"{min(promised):.0f} to {max(promised):.0f}" if promised else "",
        others[0].message if others else "",
    ]


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--scale", type=float, default=0.1, help="of all times (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about = machine()
    sides = {"before": (arguments.before, _DEADLINES_S)} if arguments.before else {}
    short = f"after, max_queue_wait_s = {arguments.scale * _SHORT_WAIT_S:g}"
    sides |= {
        "after": (ROOT, _DEADLINES_S),
        short: (ROOT, _DEADLINES_S | {"LOCKSTEP_MAX_QUEUE_WAIT_S": _SHORT_WAIT_S}),
    }
    results = {side: measure(*what, arguments.scale) for side, what in sides.items()}
    header = ["side", "answered", "overtaken", "longest, s", "error after, ms (p50)", "Retry-After, s", "first error"]
    text = table(header, [row(side, result) for side, result in results.items()])
    print(text)
    if arguments.save:
        save("waiting", {"machine": about | {"scale": arguments.scale}, "sides": results}, text)


if __name__ == "__main__":
    main()
