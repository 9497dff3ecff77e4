"""The second turn of a conversation on another worker: time to its first token with each place for KV blocks.

Three real systems of a router and two workers each, started as `lockstep serve` does it: one whose state server keeps
blocks in memory, one whose state server keeps them in Redis, and one without a remote cache, which computes the prefix.
In each round every system gets the same new conversation, in turns: the first turn on one worker, and, once its blocks
are stored, the second turn on the other. The gate is not forced: what it decided, and both of its estimates, come from
the trace of each second turn.

`two_turns.py --save`. Needs redis-server.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from lockstep_common.ports import free_port
from lockstep_tools.serving.stack import MEMORY, Stack, StackSettings
from measure import ROOT, machine, save, table
from state import redis_server
from synthetic import SHAPES, write_random
from tokenizers import Tokenizer

_REFERENCE = ROOT / "models/reference"
_RECOMPUTE = "recompute"
_READY_S = 900.0
_REQUEST_S = 600.0
_STORED_S = 300.0
_QUIET_S = 0.5
"""Blocks are stored once nothing has been for so long."""
_LAST_SPAN = "prefill"
"""Of a worker that has made a first token."""
_POLL_S = 0.05
_WARM_UP = 2
"""Conversations before those that count: the link and the pace of prefill are measured by then."""
_ANSWER_TOKENS = 16
_FURTHER = " And then, in the morning,"
_PAUSE_S = 5.0
"""For a worker that the router avoids, because the machine is too busy, to be used again."""
_TRIES = 5
"""Further conversations if a turn came to another worker than its session's."""
_LOOPBACK = "127.0.0.1"


class ObservedStack(Stack):
    """A stack whose workers' management ports are known."""

    def __init__(self, settings: StackSettings) -> None:
        super().__init__(settings)
        self.worker_urls: dict[str, str] = {}

    def _worker(self, worker: str, target: str) -> list[str]:
        port = free_port(_LOOPBACK)
        self.worker_urls[worker] = f"http://{_LOOPBACK}:{port}"
        command = [each for each in super()._worker(worker, target) if not each.startswith("--management-port")]
        return [*command, f"--management-port={port}"]

    def counted(self, client: httpx.Client, worker: str, name: str) -> float:
        """The sum of a worker's metrics whose names begin so."""
        lines = client.get(f"{self.worker_urls[worker]}/metrics").raise_for_status().text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"lockstep_worker_{name}"))


@dataclass
class Turn:
    """A second turn."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    outcome: str = ""
    """Of the fetch: `fetched`, `gate` (computing is faster) and so on; empty: there is no remote cache."""
    fetch_s: float | None = None
    recompute_s: float | None = None
    """The gate's estimates."""


def ask(
    client: httpx.Client, stack: Stack, prompt: str, tokens: int, headers: Mapping[str, str]
) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token of an answer of so many tokens, its text, and its usage."""
    body = {
        "model": stack.settings.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, first_s = "", {}, None
    began_s = time.perf_counter()
    with client.stream("POST", f"{stack.url}/v1/completions", json=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            raise SystemExit(f"a request has failed: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
            if chunk["choices"]:
                first_s = time.perf_counter() - began_s if first_s is None else first_s
                text += chunk["choices"][0]["text"]
            usage = chunk.get("usage") or usage
    if first_s is None or not usage:
        raise SystemExit("an answer without tokens")
    return first_s, text, usage


@dataclass
class Side:
    """One of the systems."""

    name: str
    stack: ObservedStack
    client: httpx.Client
    sessions: dict[str, str] = field(default_factory=dict)
    """By worker: a session that comes to it."""
    places: list[str] = field(default_factory=list)
    """The workers of the last conversation's turns; w0 and w1 are wanted."""

    def ask(self, worker: str, prompt: str, tokens: int, trace_id: str) -> tuple[float, str, dict[str, Any]]:
        """Seconds to the first token of an answer, its text, and its usage."""
        headers = {"X-Session-ID": self.sessions[worker], "traceparent": f"00-{trace_id}-{'1' * 16}-01"}
        return ask(self.client, self.stack, prompt, tokens, headers)

    def find_sessions(self) -> None:
        """Find a session for each worker."""
        for number in range(64):
            self.sessions["?"] = session = f"session {number}"
            trace_id = f"{random.getrandbits(128) | 1:032x}"
            self.ask("?", "hello", 1, trace_id)
            self.sessions.setdefault(self._place(trace_id)[0], session)
            if all(worker in self.sessions for worker in self.stack.worker_ids):
                return
        raise SystemExit(f"{self.name}: all sessions come to one worker")

    def conversation(self, first: str, further: str) -> Turn | None:
        """Both turns, on different workers; None: the router has sent one elsewhere, as it does if a worker is slow."""
        one, other = self.stack.worker_ids
        before, trace_id = self._stored(one), f"{random.getrandbits(128) | 1:032x}"
        _, answer, _ = self.ask(one, first, _ANSWER_TOKENS, trace_id)
        self.places = [self._place(trace_id)[0]]
        if self.places != [one]:
            return None
        if self.name != _RECOMPUTE:
            self._wait_stored(one, before)
        trace_id = f"{random.getrandbits(128) | 1:032x}"
        ttft_s, _, usage = self.ask(other, first + answer + further, 1, trace_id)
        place, spans = self._place(trace_id)
        self.places.append(place)
        if place != other:
            return None
        turn = Turn(ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        for span in spans:
            if span["name"] == "kv fetch":
                attributes = span["attributes"]
                turn.outcome = attributes["lockstep.outcome"]
                turn.fetch_s = attributes.get("lockstep.kv.estimated_fetch_s")
                turn.recompute_s = attributes.get("lockstep.kv.estimated_recompute_s")
        return turn

    def _place(self, trace_id: str) -> tuple[str, list[dict[str, Any]]]:
        """The worker that has served a request, and its spans, which end a little after the answer."""
        end_s = time.monotonic() + _STORED_S
        while time.monotonic() < end_s:
            for worker, url in self.stack.worker_urls.items():
                found = self.client.get(f"{url}/debug/trace/{trace_id}").raise_for_status()
                spans: list[dict[str, Any]] = found.json()["spans"]
                if any(span["name"] == _LAST_SPAN for span in spans):
                    return worker, spans
            time.sleep(_POLL_S)
        raise SystemExit(f"{self.name}: no worker has a trace of its request")

    def _stored(self, worker: str) -> float:
        return self.stack.counted(self.client, worker, 'remote_cache_puts_total{outcome="stored"')

    def _wait_stored(self, worker: str, before: float) -> None:
        """Wait until a worker has stored the blocks of what it has just answered."""
        seen, since_s = before, time.monotonic()
        end_s = since_s + _STORED_S
        while seen == before or time.monotonic() - since_s < _QUIET_S:
            if time.monotonic() > end_s:
                raise SystemExit(f"{self.name}: no blocks were stored")
            time.sleep(_POLL_S)
            if (stored := self._stored(worker)) != seen:
                seen, since_s = stored, time.monotonic()


class Texts:
    """New conversations, of so many tokens."""

    def __init__(self, tokens: int, seed: object = 1) -> None:
        self._tokens = tokens
        self._tokenizer = Tokenizer.from_file(str(_REFERENCE / "tokenizer.json"))
        self._choose = random.Random(f"{seed}")
        self._words = ["rain", "house", "sea", "night", "garden", "river", "letter", "window", "stone", "morning"]

    def __call__(self) -> str:
        """The text of a first turn."""
        text = f"Story {self._choose.getrandbits(32)}."
        while len(self._tokenizer.encode(text).ids) < self._tokens:
            text += " " + " ".join(self._choose.choices(self._words, k=16)) + "."
        return text


def sides(model: Path, redis_port: int, entered: ExitStack) -> Iterator[Side]:
    """The systems, ready."""
    client = entered.enter_context(httpx.Client(timeout=_REQUEST_S, trust_env=False, verify=False))
    for name, store in (("memory", MEMORY), ("redis", f"redis://{_LOOPBACK}:{redis_port}/0"), (_RECOMPUTE, None)):
        settings = StackSettings(
            str(model),
            workers=2,
            state=store,
            name="bench",
            device="cpu",
            threads=1,
            kv_memory="256Mi",
            host_cache="256Mi",
            remote_cache=store is not None,
        )
        stack = entered.enter_context(ObservedStack(settings))
        stack.wait_ready(_READY_S)
        side = Side(name, stack, client)
        side.find_sessions()
        yield side


def measure(model: Path, tokens: int, rounds: int) -> dict[str, list[Turn]]:
    """The second turns of each system; in each round in another order."""
    turns: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory(prefix="ls-") as name, ExitStack() as entered:
        port = entered.enter_context(redis_server(Path(name)))
        systems, texts = list(sides(model, port, entered)), Texts(tokens)
        for number in range(-_WARM_UP, rounds):
            first = texts()
            for each in range(len(systems)):
                side = systems[(number + each) % len(systems)]
                turn = side.conversation(first, _FURTHER)
                for _ in range(_TRIES):
                    if turn is None:
                        time.sleep(_PAUSE_S)
                        turn = side.conversation(texts(), _FURTHER)
                if turn is None:
                    places = ", ".join(side.places)
                    raise SystemExit(f"{side.name}: turns have not come to their sessions' workers, but to {places}")
                if number >= 0:
                    turns.setdefault(side.name, []).append(turn)
    return turns


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Quartiles of the times, and what the gate did."""
    low, median, high = statistics.quantiles((turn.ttft_s for turn in turns), n=4, method="inclusive")
    outcomes = [turn.outcome for turn in turns if turn.outcome]

    def middle(values: list[float | None]) -> float | None:
        known = [each for each in values if each is not None]
        return 1000 * statistics.median(known) if known else None

    return {
        "prompt_tokens": statistics.median(turn.prompt_tokens for turn in turns),
        "cached_tokens": statistics.median(turn.cached_tokens for turn in turns),
        "ttft_ms": {"quartile_1": 1000 * low, "median": 1000 * median, "quartile_3": 1000 * high},
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "estimated_fetch_ms": middle([turn.fetch_s for turn in turns]),
        "estimated_recompute_ms": middle([turn.recompute_s for turn in turns]),
        "rounds": [vars(turn) for turn in turns],
    }


def text_of(models: dict[str, dict[str, Any]]) -> str:
    """The table."""
    rows = []
    for model, systems in models.items():
        slowest_ms = systems[_RECOMPUTE]["ttft_ms"]["median"]
        for name, each in systems.items():
            time_ms, estimates = each["ttft_ms"], (each["estimated_fetch_ms"], each["estimated_recompute_ms"])
            rows.append(
                [
                    model,
                    name,
                    f"{time_ms['median']:.0f} ({time_ms['quartile_1']:.0f} to {time_ms['quartile_3']:.0f})",
                    f"{slowest_ms / time_ms['median']:.2f}x",
                    f"{each['cached_tokens']:.0f} of {each['prompt_tokens']:.0f}",
                    ", ".join(f"{count} {outcome}" for outcome, count in each["outcomes"].items()),
                    " / ".join("" if ms is None else f"{ms:.1f}" for ms in estimates).strip(" /"),
                ]
            )
    header = [
        "model",
        "blocks come from",
        "first token, ms: median (quartiles)",
        "sooner than computed",
        "cached tokens",
        "the gate's decisions",
        "its estimates, ms: fetch / compute",
    ]
    return (
        "The second turn of a conversation on another worker. Gate: `fetched` it let blocks come, `gate` it had them "
        f"computed.\n\n{table(header, rows)}"
    )


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = Tokenizer.from_file(str(_REFERENCE / "tokenizer.json")).get_vocab_size()
    known = ["reference", *(name for name, shape in SHAPES.items() if shape.vocab >= words)]
    parser.add_argument("--models", nargs="+", choices=known, default=["reference", "0.1b"], help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=1500, help="of the first turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--note", help="how the run differs from a quiet one")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be 2 or more: there are no quartiles of fewer")
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed")
    about = machine() | {"rounds": arguments.rounds, "tokens": arguments.tokens}
    if arguments.note:
        about["note"] = arguments.note
    # Workers keep the traces that are asked for here, and no others.
    os.environ |= {"OTEL_TRACES_EXPORTER": "memory", "LOCKSTEP_TRACE_RATIO": "0"}
    models = {}
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        for model in arguments.models:
            path = _REFERENCE if model == "reference" else write_random(SHAPES[model], Path(name) / model)
            turns = measure(path, arguments.tokens, arguments.rounds)
            models[model] = {side: summary(each) for side, each in turns.items()}
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    text = text_of(models)
    print(text)
    if arguments.save:
        save("two-turns", {"machine": about, "models": models}, text)


if __name__ == "__main__":
    main()
