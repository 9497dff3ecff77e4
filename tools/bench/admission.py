"""How soon a router under load refuses a request: without a key, over its tenant's limits, and over its own.

A router with keys serves as many streams as it may have, from a scripted worker; meanwhile other connections ask one
after the other, and each time are refused. Their answers are measured, from the request's last byte written to the
answer's last byte read, and those of requests for the list of models beside them, which the router answers at once:
what the machine and the event loop add without any admission. The clients share the machine's cores.

`admission.py --save`.
"""

import argparse
import asyncio
import hashlib
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from measure import machine, save, table
from router_load import Client, Figures, connect
from router_sides import Target

_HERE = Path(__file__).parent
_KEYS = {"busy": "", "frequent": "requests_per_minute: 1", "wide": "concurrent_streams: 1"}
"""Tenants with a key of their name each, and their limits."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PATIENCE_S = 30.0
_WARM_UP_S = 3.0
_LONG = 15_000
_LIMIT_MS = 10.0


@dataclass(frozen=True)
class Probe:
    """A request that is refused, or answered at once."""

    name: str
    content: bytes
    status: int


def completion(key: str | None, *, tokens: int, stream: bool = True) -> bytes:
    """A request for a completion."""
    body = f'{{"model": "reference", "prompt": "It was", "max_tokens": {tokens}, "stream": {str(stream).lower()}}}'
    return message("POST /v1/completions", key, body.encode())


def message(line: str, key: str | None, body: bytes = b"") -> bytes:
    """A request."""
    head = [f"{line} HTTP/1.1", "host: router", "content-type: application/json", f"content-length: {len(body)}"]
    if key is not None:
        head.append(f"authorization: Bearer {key}")
    return "\r\n".join([*head, "", ""]).encode() + body


PROBES = (
    Probe("the list of models, for comparison: 200", message("GET /v1/models", "busy"), 200),
    Probe("no key: 401", completion(None, tokens=1), 401),
    Probe("a wrong key: 401", completion("wrong", tokens=1), 401),
    Probe("over the tenant's requests a minute: 429", completion("frequent", tokens=1), 429),
    Probe("over the tenant's requests at a time: 429", completion("wide", tokens=1), 429),
    Probe("over the router's streams: 503", completion("busy", tokens=1), 503),
)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, probe: Probe) -> float | None:
    """The milliseconds that one answer takes; None: it came for another reason, as when a new minute has begun."""
    began_s = time.perf_counter()
    writer.write(probe.content)
    async with asyncio.timeout(_PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None, head
        body = await reader.readexactly(int(length[1]))
    took_ms = 1e3 * (time.perf_counter() - began_s)
    if probe.status == 429 and head.startswith(b"HTTP/1.1 503"):
        return None
    assert head.startswith(b"HTTP/1.1 %d" % probe.status), (probe.name, head, body)
    assert probe.status in {200, 401} or b"retry-after" in head.lower(), head
    return took_ms


async def measure(port: int, streams: int, count: int) -> tuple[dict[str, list[float]], float]:
    """The milliseconds of so many answers to each probe while so many streams run, and the streams' tokens a second."""
    figures = Figures()
    # The tenant that may have one request has it; it is one of the router's streams.
    clients = await connect(port, 1, completion("wide", tokens=_LONG), figures, Client.send)
    clients += await connect(port, streams - 1, completion("busy", tokens=_LONG), figures, Client.send)
    for client in clients:
        client.send()
    await asyncio.sleep(_WARM_UP_S)
    errors = [client.error for client in clients if client.error]
    assert not errors, errors[0]
    connections = [(probe, await asyncio.open_connection("127.0.0.1", port)) for probe in PROBES]
    times: dict[str, list[float]] = {probe.name: [] for probe in PROBES}
    before, began_s = figures.events, time.perf_counter()
    for _ in range(count):
        for probe, (reader, writer) in connections:
            took_ms = await ask(reader, writer, probe)
            times[probe.name] += [] if took_ms is None else [took_ms]
            await asyncio.sleep(0.002)
    tokens_per_s = (figures.events - before) / (time.perf_counter() - began_s)
    errors = [client.error for client in clients if client.error]
    assert not errors, errors[0]
    for client in clients:
        client.close()
    return times, tokens_per_s


def keys_file(folder: Path) -> Path:
    """A file with a key for each tenant."""
    lines = ["tenants:"]
    for name, limit in _KEYS.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += [f"- name: {name}", f"  {limit}" if limit else "", "  keys:", f"  - sha256: '{digest}'"]
    path = folder / "keys.yaml"
    path.write_text("\n".join(line for line in lines if line) + "\n")
    return path


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="at a time (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="answers to each request (default: %(default)s)")
    parser.add_argument("--step-s", type=float, default=0.02, help="between two tokens (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about = machine() | {"streams": arguments.streams, "step_s": arguments.step_s, "count": arguments.count}
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        flags = ["--keys-file", str(keys_file(Path(folder))), "--max-streams", str(arguments.streams)]
        script = _HERE / "router_worker.py"
        with Target(token_every_s=arguments.step_s, script=script, workers=1, flags=flags) as target:
            times, tokens_per_s = uvloop.run(measure(target.address[1], arguments.streams, arguments.count))
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    rows = []
    for name, each in times.items():
        p99 = statistics.quantiles(each, n=100, method="inclusive")[98]
        rows.append([name, f"{statistics.median(each):.2f}", f"{p99:.2f}", f"{max(each):.1f}"])
    text = f"{arguments.streams} streams, {tokens_per_s:,.0f} tokens/s; a refusal may take {_LIMIT_MS:g} ms.\n\n"
    text += table(["answer", "p50, ms", "p99, ms", "max, ms"], rows)
    print(text)
    if arguments.save:
        save("admission", {"machine": about, "tokens_per_s": tokens_per_s, "ms": times}, text)


if __name__ == "__main__":
    main()
