"""Requests that wait in line for a busy worker, with this checkout and with an older one.

One worker with `max_seqs` 1 gets 24 requests at once, each of about half a second, and all deadlines are a tenth of
their defaults. `--scale 1` makes them all ten times as long. Three sides: an older checkout (`--before`), this one, and
this one with a `max_queue_wait_s` that is shorter than the line, so that late requests are refused. There, the line is
kept full for a while, and a further client measures how long refusals take.

`waiting.py --before CHECKOUT --save`. The checkout needs no build.
"""

import argparse
import asyncio
import contextlib
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
_REFUSALS = 200
_REFUSAL_EVERY_S = 0.01
_REFUSALS_TIMEOUT_S = 300.0
_AT_ONCE = b"the queue of "
"""In the error of a request that would have to wait too long; that of one which has waited says something else."""
_REFUSED_IN = "refused in, ms (p50, p99)"
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


async def time_refusals(api: str, tokens: int) -> list[float]:
    """Seconds that refusals take, one after the other on one connection. Requests that get into line do not count."""
    fields = {"model": _MODEL.name, "prompt": "Once more. It was", "max_tokens": tokens, "ignore_eos": True}
    body = json.dumps(fields).encode()
    url = httpx.URL(api)
    head = f"POST {url.path}/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    data = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    taken = []
    reader, writer = await asyncio.open_connection(url.host, url.port)
    with contextlib.closing(writer):
        async with asyncio.timeout(_REFUSALS_TIMEOUT_S):
            while len(taken) < _REFUSALS:
                began = time.perf_counter()
                writer.write(data)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: (\d+)", answer.lower())
                assert length is not None, answer
                text = await reader.readexactly(int(length[1]))
                if answer.startswith(b"HTTP/1.1 503 ") and _AT_ONCE in text:
                    taken.append(time.perf_counter() - began)
                await asyncio.sleep(_REFUSAL_EVERY_S)
    return taken


async def refusals(client: httpx.AsyncClient, api: str, tokens: int, seconds_each: float) -> dict[str, Any]:
    """How long refusals take while the line is full."""

    async def keep_full(number: int) -> None:
        await asyncio.sleep(number * _APART_S)
        while True:
            if (await ask(client, number, tokens)).status != 200:
                await asyncio.sleep(seconds_each)

    fillers = [asyncio.create_task(keep_full(number)) for number in range(_REQUESTS)]
    try:
        await asyncio.sleep(_REQUESTS * _APART_S)
        taken = sorted(await time_refusals(api, tokens))
    finally:
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)
    ms = [round(1000 * each, 2) for each in taken]
    return {"count": len(ms), "p50_ms": statistics.median(ms), "p99_ms": ms[int(0.99 * len(ms))], "longest_ms": ms[-1]}


def measure(tree: Path, deadlines_s: dict[str, float], scale: float, *, refuses: bool = False) -> dict[str, Any]:
    """All requests on one `lockstep serve` of a checkout; requests and deadlines are `scale` times as long.

    Args:
        tree: the checkout.
        deadlines_s: by the name of their setting.
        scale: of all times.
        refuses: the line is longer than a request may wait, so how long refusals take is measured too.
    """
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
        return asyncio.run(crowd(found[0], scale * _SECONDS_EACH, refuses=refuses))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


async def crowd(api: str, seconds_each: float, *, refuses: bool) -> dict[str, Any]:
    """The figures of a line of requests, after one request alone, and of refusals."""
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
        refused = {"refusals": await refusals(client, api, tokens, seconds_each)} if refuses else {}
    starts = [n * _APART_S + answer.first_token_s for n, answer in enumerate(answers) if answer.first_token_s]
    return {
        "tokens_each": tokens,
        "answered": sum(answer.status == 200 for answer in answers),
        "overtaken": sum(later < earlier for earlier, later in itertools.pairwise(starts)),
        "longest_s": round(max(answer.ended_s for answer in answers), 3),
        "answers": [asdict(answer) for answer in answers],
        **refused,
    }


def row(side: str, result: dict[str, Any]) -> list[str]:
    """A line of the table."""
    others = [Answer(**answer) for answer in result["answers"] if answer["status"] != 200]
    after = statistics.median(answer.ended_s for answer in others) if others else None
    timed = result.get("refusals")
    promised = [answer.retry_after_s for answer in others if answer.retry_after_s is not None]
    return [
        side,
        f"{result['answered']} of {_REQUESTS}",
        str(result["overtaken"]),
        f"{result['longest_s']:.1f}",
        "" if after is None else f"{1000 * after:.0f}",
        f"{min(promised):.0f} to {max(promised):.0f}" if promised else "",
        f"{timed['p50_ms']:.1f}, {timed['p99_ms']:.1f} of {timed['count']}" if timed else "",
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
    results = {side: measure(*what, arguments.scale, refuses=side == short) for side, what in sides.items()}
    header = [
        "side",
        "answered",
        "overtaken",
        "longest, s",
        "error after, ms (p50)",
        "Retry-After, s",
        _REFUSED_IN,
        "first error",
    ]
    text = table(header, [row(side, result) for side, result in results.items()])
    print(text)
    if arguments.save:
        save("waiting", {"machine": about | {"scale": arguments.scale}, "sides": results}, text)


if __name__ == "__main__":
    main()
