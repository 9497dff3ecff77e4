"""Routing policies on real workers: what conversations reuse and how long they wait, with each policy of the router.
`stateless` is measured with and without a remote cache: options B and C of ADR 3.

For each side a router, real workers of the reference model on the CPU and, for option C, a state server with the
workers' blocks; all started as `lockstep serve` does it. Clients have the same conversations, from a seed, one after
the other: a system prompt that several share, then turns that begin with all turns before, and pauses between them. In
each round every side is started again, in another order, and has that round's conversations.

Imbalance is that of `routing.py`: requests on the most loaded worker over the average, minus 1, each averaged over the
time.

`routing_real.py --save`.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from lockstep_tools.serving.stack import MEMORY, StackSettings
from measure import ROOT, fill, machine, save, table
from two_turns import ObservedStack, Texts, ask

_REFERENCE = ROOT / "models/reference"
_PAGE = ROOT / "docs/adr/0003-routing.md"
_READY_S = 300.0
_REQUEST_S = 120.0
_SYSTEMS = 3
"""System prompts; a conversation has the first one most often."""
_SYSTEM_TOKENS = 384
_TURN_TOKENS = 96
_ANSWER_TOKENS = 24
_MOST_TURNS = 8
_PAUSE_S = 0.3
"""Between an answer and the next turn, on average."""
_SAMPLE_S = 0.1
_BLOCK_TOKENS = 16
_OUTCOMES = ("fetched", "gate", "unmeasured", "absent", "deadline", "unavailable")
_METRICS = {"blocks": "remote_cache_fetched_blocks_total"} | {
    outcome: f'remote_cache_fetches_total{{outcome="{outcome}"' for outcome in _OUTCOMES
}


@dataclass(frozen=True)
class Option:
    """A side."""

    name: str
    policy: str
    remote_cache: bool = False


OPTIONS = (
    Option("A: sticky", "sticky"),
    Option("B: stateless", "stateless"),
    Option("C: stateless, shared KV", "stateless", remote_cache=True),
    Option("D: hybrid", "hybrid"),
    Option("prefix_aware", "prefix_aware"),
    Option("round_robin", "round_robin"),
    Option("weighted", "weighted"),
    Option("least_loaded", "least_loaded"),
)


class PolicyStack(ObservedStack):
    """A stack whose router has a policy."""

    def __init__(self, settings: StackSettings, policy: str) -> None:
        super().__init__(settings)
        self._policy = policy

    def _stages(self, directory: str) -> list[dict[str, list[str]]]:
        routers, others = super()._stages(directory)
        return [{name: [*command, f"--policy={self._policy}"] for name, command in routers.items()}, others]


@dataclass
class Answer:
    """One turn."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    is_first: bool
    """Of its conversation."""


@dataclass
class Measured:
    """What was measured of a side, over all rounds."""

    answers: list[Answer] = field(default_factory=list)
    loads: list[dict[str, int]] = field(default_factory=list)
    """By worker, at one moment."""
    counts: dict[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Shares and milliseconds."""
        prompts = sum(each.prompt_tokens for each in self.answers)
        cached = sum(each.cached_tokens for each in self.answers)
        fetched = _BLOCK_TOKENS * self.counts["blocks"]
        first, later = (
            sorted(1000 * each.ttft_s for each in self.answers if each.is_first is is_first)
            for is_first in (True, False)
        )
        every = sorted(first + later)
        means = [statistics.mean(each[worker] for each in self.loads) for worker in self.loads[0]]
        return {
            "requests": len(every),
            "prompt_tokens": prompts,
            "computed_share": 1 - cached / prompts,
            "cached_share": (cached - fetched) / prompts,
            "fetched_share": fetched / prompts,
            **{f"fetches_{outcome}": self.counts[outcome] for outcome in _OUTCOMES},
            "ttft_p50_ms": every[len(every) // 2],
            "ttft_p99_ms": every[len(every) * 99 // 100],
            "later_turns_p50_ms": later[len(later) // 2],
            "imbalance": max(means) / statistics.mean(means) - 1,
        }


@dataclass
class Conversation:
    """What a client says."""

    session: str
    system: str
    turns: list[str]
    pauses_s: list[float]


def conversations(count: int, seed: str) -> list[Conversation]:
    """The conversations of a round: four turns on average."""
    choose = random.Random(seed)
    system, turn = Texts(_SYSTEM_TOKENS, f"system {seed}"), Texts(_TURN_TOKENS, f"turns {seed}")
    systems = [system() for _ in range(_SYSTEMS)]
    weights = [1 / rank for rank in range(1, _SYSTEMS + 1)]
    made = []
    for number in range(count):
        turns = 1
        while turns < _MOST_TURNS and choose.random() < 0.75:
            turns += 1
        pauses = [choose.expovariate(1 / _PAUSE_S) for _ in range(turns)]
        own = choose.choices(systems, weights)[0]
        made.append(Conversation(f"{seed}/{number}", own, [turn() for _ in range(turns)], pauses))
    return made


async def talk(
    say: Callable[[Conversation, str], tuple[float, str, dict[str, Any]]], conversation: Conversation
) -> list[Answer]:
    """Have a conversation."""
    answers, history = [], conversation.system
    for number, (turn, pause_s) in enumerate(zip(conversation.turns, conversation.pauses_s, strict=True)):
        history += f"\n{turn}\n"
        ttft_s, text, usage = await asyncio.to_thread(say, conversation, history)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        answers.append(Answer(ttft_s, usage["prompt_tokens"], cached, not number))
        history += text
        await asyncio.sleep(pause_s)
    return answers


async def watch(stack: PolicyStack, loads: list[dict[str, int]]) -> None:
    """Note each worker's requests, ten times a second."""
    while True:
        status = await asyncio.to_thread(stack.status)
        if status is not None:
            loads.append({each["id"]: each["running"] + each["queued"] for each in status["workers"]})
        await asyncio.sleep(_SAMPLE_S)


async def have(stack: PolicyStack, client: httpx.Client, all_of_them: Sequence[Conversation], clients: int) -> Measured:
    """Have conversations, so many at a time."""
    measured, left = Measured(), iter(all_of_them)

    def say(conversation: Conversation, prompt: str) -> tuple[float, str, dict[str, Any]]:
        return ask(client, stack, prompt, _ANSWER_TOKENS, {"X-Session-ID": conversation.session})

    async def be_a_client() -> None:
        for conversation in left:
            measured.answers += await talk(say, conversation)

    watching = asyncio.create_task(watch(stack, measured.loads))
    try:
        await asyncio.gather(*(be_a_client() for _ in range(clients)))
    finally:
        watching.cancel()
    return measured


def run_side(option: Option, workers: int, clients: int, all_of_them: Sequence[Conversation], warm: str) -> Measured:
    """One round of a side."""
    settings = StackSettings(
        str(_REFERENCE),
        workers=workers,
        state=MEMORY if option.remote_cache else None,
        name="bench",
        device="cpu",
        threads=1,
        kv_memory="128Mi",
        host_cache="128Mi" if option.remote_cache else None,
        remote_cache=option.remote_cache,
    )
    with (
        PolicyStack(settings, option.policy) as stack,
        httpx.Client(timeout=_REQUEST_S, trust_env=False, verify=False) as client,
    ):
        stack.wait_ready(_READY_S)
        # Each worker has computed a prompt before, so that it knows its pace.
        asyncio.run(have(stack, client, conversations(4 * workers, warm), clients))
        before = counted(stack, client)
        measured = asyncio.run(have(stack, client, all_of_them, clients))
        measured.counts = {name: count - before[name] for name, count in counted(stack, client).items()}
    return measured


def counted(stack: PolicyStack, client: httpx.Client) -> dict[str, float]:
    """What the workers' metrics say, summed up."""
    return {
        name: sum(stack.counted(client, worker, metric) for worker in stack.worker_ids)
        for name, metric in _METRICS.items()
    }


def measure(
    options: Sequence[Option], rounds: int, count: int, workers: int, clients: int, seed: int
) -> dict[str, Measured]:
    """All sides, in each round in another order."""
    results = {option.name: Measured(counts=dict.fromkeys(_METRICS, 0.0)) for option in options}
    for number in range(rounds):
        began_s = time.monotonic()
        said = conversations(count, f"seed {seed}, round {number}")
        for each in range(len(options)):
            option = options[(number + each) % len(options)]
            found = run_side(option, workers, clients, said, f"seed {seed}, warm-up {number}")
            result = results[option.name]
            result.answers += found.answers
            result.loads += found.loads
            result.counts = {name: value + found.counts[name] for name, value in result.counts.items()}
        print(f"round {number}: {time.monotonic() - began_s:.0f} s", flush=True)
    return results


def text_of(figures: dict[str, dict[str, float]]) -> str:
    """The table."""
    header = (
        "option", "tokens of prompts: computed", "in the worker's cache", "fetched",
        "first token, ms: p50 / p99", "of later turns: p50", "imbalance",
    )  # fmt: skip
    rows = [
        [
            name,
            *(f"{each[share]:.1%}" for share in ("computed_share", "cached_share", "fetched_share")),
            f"{each['ttft_p50_ms']:.0f} / {each['ttft_p99_ms']:.0f}",
            f"{each['later_turns_p50_ms']:.0f}",
            f"{each['imbalance']:.1%}",
        ]
        for name, each in figures.items()
    ]
    return table(header, rows)


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=30, help="of a round (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="that talk at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--note", help="how the run differs from a quiet one")
    parser.add_argument("--save", action="store_true", help="into docs/bench and docs/adr/0003-routing.md")
    given = parser.parse_args()
    about = machine() | {key: vars(given)[key] for key in ("rounds", "conversations", "workers", "clients", "seed")}
    if given.note:
        about["note"] = given.note
    results = measure(OPTIONS, given.rounds, given.conversations, given.workers, given.clients, given.seed)
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    figures = {name: each.figures() for name, each in results.items()}
    text = text_of(figures)
    print(text)
    if given.save:
        answers = {name: [asdict(answer) for answer in each.answers] for name, each in results.items()}
        save("routing-real", {"machine": about, "sides": figures, "answers": answers}, text)
        fill(_PAGE, "real", text)


if __name__ == "__main__":
    main()
