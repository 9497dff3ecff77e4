"""Requests that wait in line for a busy worker, with this checkout and with an older one.

One worker with `max_seqs` 1 gets 24 requests at once. All deadlines are a tenth of their defaults, and a request takes
about half a second. Three sides: an older checkout (`--before`), this one, and this one with a
`max_queue_wait_s` that is shorter than the line, so that late requests are refused.

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
_SECONDS_EACH = 0.5
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
_SETTINGS = {
    "LOCKSTEP_MAX_SEQS": "1",
    "LOCKSTEP_FIRST_TOKEN_DEADLINE_S": "3",
    "LOCKSTEP_RESUME_DEADLINE_S": "6",  # of older checkouts
    "LOCKSTEP_MAX_QUEUE_WAIT_S": "30",
}
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


def measure(tree: Path, settings: dict[str, str]) -> dict[str, Any]:
    """All requests on one `lockstep serve` of a checkout."""
    sources = os.pathsep.join(str(tree / part / "src") for part in _PARTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "serve", str(_MODEL), "--port", "0", "--device", "cpu"],
        env=os.environ | _SETTINGS | settings | {"PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        found = next(filter(None, map(_ADDRESS.search, process.stdout)))
        return asyncio.run(crowd(found[0]))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


async def crowd(api: str) -> dict[str, Any]:
    """The figures of a line of requests, after one request alone."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api, timeout=120, trust_env=False, limits=limits) as client:
        await ask(client, 0, 50)
        alone = await ask(client, 0, 200)
        assert alone.status == 200, alone
        tokens = min(1900, int(200 * _SECONDS_EACH / alone.ended_s))

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
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about = machine()
    sides = {"before": (arguments.before, {})} if arguments.before else {}
    sides |= {"after": (ROOT, {}), "after, max_queue_wait_s = 6": (ROOT, {"LOCKSTEP_MAX_QUEUE_WAIT_S": "6"})}
    results = {side: measure(*what) for side, what in sides.items()}
    header = ["side", "answered", "overtaken", "longest, s", "error after, ms (p50)", "Retry-After, s", "first error"]
    text = table(header, [row(side, result) for side, result in results.items()])
    print(text)
    if arguments.save:
        save("waiting", {"machine": about, "sides": results}, text)


if __name__ == "__main__":
    main()
