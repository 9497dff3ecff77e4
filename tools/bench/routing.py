"""The routing policies over simulated workers: how evenly they spread load, what they reuse, how long clients wait.

The policies are the router's own; workers, clients and time are simulated, from a seed, so the same command gives the
same figures on every machine. Two routers share the traffic. Each knows a worker's load from a report that is up to
0.1 s old, and what it has sent itself since then, as in a real router. The blocks in its cache are known in the same
way (the router's own index takes the reports), or guessed from what the router has sent.

A worker has seats, a queue in order of arrival, one prefill at a time at a fixed speed, a fixed time for each further
token, and a prefix cache of blocks from which the least recently used one is evicted. Real workers share their steps
between prefills and all streams, so that times here compare policies and predict no machine.

Imbalance has two definitions. `imbalance` is the requests on the most loaded worker over the average, minus 1, each
averaged over the time of the run: what a fleet has to be larger by. `momentary` is the same ratio at one moment, as the
median over the moments of the reports; it includes the randomness of arrivals, which no policy removes at once.

`routing.py --save`.
"""

import argparse
import bisect
import heapq
import itertools
import json
import math
import os
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import BLOCK_TOKENS
from lockstep_router.policies import Policy, RequestFacts, WorkerFacts, imbalance, make_policy
from lockstep_router.settings import RouterSettings
from lockstep_router.workers.prefix_index import PrefixIndex
from measure import RESULTS, ROOT, fill, machine, save, table
from xxhash import xxh64_intdigest

POLICIES = ("sticky", "hybrid", "stateless", "round_robin", "weighted", "least_loaded", "prefix_aware")
GUESSED = "prefix_aware, guessed"
"""Workers do not report their blocks."""
BOUNDS = (1.05, 1.25, 1.5)
"""Other values of `load_bound` than the default."""
_PAGE = ROOT / "docs/adr/0003-routing.md"
_WORKERS = 5
_ROUTERS = 2
_REPORT_S = 0.1
_LOAD = 0.8
"""Share of all seats that are taken on average."""
_SEED = 1
_MAX_BLOCKS = 256
"""Blocks of a prompt that policies look at."""


@dataclass
class Ask:
    """One request of a simulation."""

    at: float
    session: str
    tokens: Sequence[int]
    prefill_s: float
    """Time to prefill one token that is not cached."""
    decode_s: float
    """From the first token to the last one."""
    on_end: Callable[[float], None] = lambda _: None
    on_first_token: Callable[[], None] | None = None
    first_token_s: float = math.nan
    cached: int = 0

    @cached_property
    def keys(self) -> list[int]:
        """A key for each whole block of the prompt, of all tokens to its end."""
        return list(itertools.accumulate(self.tokens[::BLOCK_TOKENS], _chained, initial=0))[1:]


@dataclass
class SimulatedRequest(RequestFacts):
    """A request whose keys are those of the simulation."""

    keys: Sequence[int] = ()

    @cached_property
    def prefix_keys(self) -> Sequence[int]:
        """Keys of the blocks that policies look at."""
        return self.keys[: min(_MAX_BLOCKS, max(0, len(self.prompt_ids) - 1) // BLOCK_TOKENS)]


class SimulatedWorker:
    """A worker of the simulation, and what it last reported."""

    def __init__(self, number: int, seats: int, cache_blocks: int) -> None:
        self.id = f"worker-{number}"
        self.seats = seats
        self.running = 0
        self.queue: deque[Ask] = deque()
        self.load_seconds = 0.0
        self.seen = WorkerFacts(self.id)
        self._prefill_free_at = 0.0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cache_blocks = cache_blocks
        self._touched: dict[int, None] = {}
        """Keys of blocks that have come or gone since the last report."""
        self._reports = 0
        self._stay_s = 1.0
        """Mean time that a request holds its seat, over the last ones."""

    @property
    def requests(self) -> int:
        """Requests in its seats and in its queue."""
        return self.running + len(self.queue)

    def report(self) -> None:
        """Report it to the routers."""
        ahead = len(self.queue) + 1 - (self.seats - self.running)
        self.seen = WorkerFacts(
            self.id,
            queued=len(self.queue),
            running=self.running,
            queue_wait_s=max(0, ahead) * self._stay_s / self.seats,
            capacity=self._cache_blocks,
        )

    def report_blocks(self) -> worker_pb2.PrefixReport:
        """What has come and gone in the cache since the last report."""
        self._reports += 1
        touched, self._touched = self._touched, {}
        return worker_pb2.PrefixReport(
            number=self._reports,
            snapshot=self._reports == 1,
            added=[key for key in touched if key in self._cache],
            removed=[key for key in touched if key not in self._cache],
        )

    def begin(self, ask: Ask, now: float) -> float:
        """Give a request a seat; returns when it ends."""
        self.running += 1
        ask.cached = self._use(ask)
        begin = max(now, self._prefill_free_at)
        self._prefill_free_at = begin + (len(ask.tokens) - ask.cached) * ask.prefill_s
        ask.first_token_s = self._prefill_free_at - ask.at
        end = self._prefill_free_at + ask.decode_s
        self._stay_s += 0.02 * (end - now - self._stay_s)
        return end

    def _use(self, ask: Ask) -> int:
        """Cached tokens at the beginning of a prompt, all of which is cached afterwards."""
        keys, tokens = ask.keys, ask.tokens
        found = next((count for count, key in enumerate(keys) if key not in self._cache), len(keys))
        self._touched |= dict.fromkeys(keys[found:])
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_blocks:
            self._touched[self._cache.popitem(last=False)[0]] = None
        return min(found * BLOCK_TOKENS, len(tokens) - 1) if tokens else 0


def _chained(last: int, token: int) -> int:
    # All tokens of a simulated block are equal, so the first one stands for it.
    return xxh64_intdigest(token.to_bytes(4, "little"), seed=last)


class SimulatedRouter:
    """A router: its policy, and what it knows of the workers besides their reports of load."""

    def __init__(self, policy: Policy, worker_ids: Sequence[str], index_blocks: int) -> None:
        self.policy = policy
        self.sent = dict.fromkeys(worker_ids, 0)
        self.indexes = {worker_id: PrefixIndex() for worker_id in worker_ids}
        for index in self.indexes.values():
            index.resize(index_blocks // len(worker_ids))

    def choose(self, request: RequestFacts, workers: Sequence["SimulatedWorker"]) -> str:
        """The id of the worker for a request, which is sent there."""
        facts = [replace(each.seen, sent=self.sent[each.id], blocks=self.indexes[each.id]) for each in workers]
        chosen = self.policy.choose(request, facts)
        self.policy.note_sent(request, next(worker for worker in facts if worker.worker_id == chosen))
        self.sent[chosen] += 1
        if self.policy.uses_prefixes:
            self.indexes[chosen].note_sent(request.stream_id, request.prefix_keys)
        return chosen


@dataclass
class Outcome:
    """What a simulation measured."""

    workers: list[SimulatedWorker]
    seconds: float
    asks: list[Ask] = field(default_factory=list)
    momentary: list[float] = field(default_factory=list)
    indexes: list[PrefixIndex] = field(default_factory=list)

    @property
    def imbalance(self) -> float:
        """Of requests for each seat, averaged over time: the most over the average, minus 1."""
        loads = [worker.load_seconds / worker.seats for worker in self.workers]
        return max(loads) * len(loads) / sum(loads) - 1

    def figures(self) -> dict[str, float]:
        """Shares and seconds."""
        first = sorted(ask.first_token_s for ask in self.asks)
        prompts = sum(len(ask.tokens) for ask in self.asks)
        expected = {
            name: sum(index.describe()[name] for index in self.indexes)
            for name in ("cached_tokens", "predicted_tokens", "wrong_tokens")
        }
        return {
            "requests": len(self.asks),
            "imbalance": round(self.imbalance, 4),
            "momentary": round(statistics.median(self.momentary) - 1, 4),
            "taken": round(
                sum(worker.load_seconds for worker in self.workers)
                / self.seconds
                / sum(worker.seats for worker in self.workers),
                3,
            ),
            "hit_rate": round(sum(ask.cached for ask in self.asks) / prompts, 4) if prompts else 0.0,
            "wrong_share": round(expected["wrong_tokens"] / max(1, expected["predicted_tokens"]), 4),
            "ttft_p50_s": round(first[len(first) // 2], 4),
            "ttft_p99_s": round(first[len(first) * 99 // 100], 4),
        }


class Simulation:
    """Routers, workers and their events in order of time."""

    def __init__(
        self,
        policy: str,
        seats: Sequence[int],
        cache_blocks: int,
        load_bound: float,
        seed: int,
        *,
        reports_blocks: bool = True,
    ) -> None:
        settings = RouterSettings(workers=("simulated:1",), load_bound=load_bound)
        self.random = random.Random(seed)
        self._choices = random.Random(f"routers {seed}")
        self.workers = [SimulatedWorker(n, each, cache_blocks * each // seats[0]) for n, each in enumerate(seats)]
        self._by_id = {worker.id: worker for worker in self.workers}
        self._routers = [
            SimulatedRouter(make_policy(policy, settings), list(self._by_id), settings.prefix_index_blocks)
            for _ in range(_ROUTERS)
        ]
        self._reports_blocks = reports_blocks and self._routers[0].policy.uses_prefixes
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, do: Callable[[float], None]) -> None:
        """Call `do` with the time when it has come."""
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def run(self, warm_up_s: float, seconds: float) -> Outcome:
        """Run for both times and measure the second."""
        indexes = [index for router in self._routers for index in router.indexes.values()]
        self._outcome = Outcome(self.workers, seconds, indexes=indexes)
        self._measures_from = warm_up_s
        self.at(0.0, self._report)
        last = 0.0
        while self._events[0][0] < warm_up_s + seconds:
            when, _, do = heapq.heappop(self._events)
            measured = max(0.0, when - max(last, warm_up_s))
            for worker in self.workers:
                worker.load_seconds += measured * worker.requests
            last = when
            do(when)
        return self._outcome

    def ask(self, ask: Ask) -> None:
        """Route a request now."""
        router = self._choices.choice(self._routers)
        request = SimulatedRequest(ask.session, f"stream {next(self._numbers)}", prompt_ids=ask.tokens, keys=ask.keys)
        chosen = router.choose(request, self.workers)
        if router.policy.uses_prefixes:
            index, stream_id = router.indexes[chosen], request.stream_id
            ask.on_first_token = lambda: index.note_first_token(stream_id, ask.cached)
        worker = self._by_id[chosen]
        worker.queue.append(ask)
        self._fill(worker, ask.at)

    def _fill(self, worker: SimulatedWorker, now: float) -> None:
        while worker.queue and worker.running < worker.seats:
            ask = worker.queue.popleft()
            self.at(worker.begin(ask, now), lambda when, ask=ask: self._end(worker, ask, when))
            if ask.on_first_token is not None:
                self.at(ask.at + ask.first_token_s, lambda _, first=ask.on_first_token: first())
            if ask.at >= self._measures_from:
                self._outcome.asks.append(ask)

    def _end(self, worker: SimulatedWorker, ask: Ask, now: float) -> None:
        worker.running -= 1
        self._fill(worker, now)
        ask.on_end(now)

    def _report(self, now: float) -> None:
        for worker in self.workers:
            worker.report()
            blocks = worker.report_blocks() if self._reports_blocks else None
            for router in self._routers:
                router.sent[worker.id] = 0
                router.indexes[worker.id].note_status()
                if blocks is not None:
                    router.indexes[worker.id].take(blocks)
        if now >= self._measures_from:
            self._outcome.momentary.append(imbalance([worker.requests for worker in self.workers]))
        self.at(now + _REPORT_S, self._report)


def spread(
    policy: str,
    exponent: float,
    *,
    seats: Sequence[int] = (64,) * _WORKERS,
    load_bound: float = 1.1,
    seconds: float = 120.0,
    seed: int = _SEED,
) -> Outcome:
    """Requests of 1,000 sessions without prompts, each of 2 s on average, at 80 % of the seats.

    Args:
        policy: its name.
        exponent: session number r asks with a weight of 1 / r^exponent; 0: all alike.
        seats: of each worker.
        load_bound: for the policies that have one.
        seconds: simulated time, after 20 s that are not measured.
        seed: of arrivals and durations.
    """
    simulation = Simulation(policy, seats, 10_000, load_bound, seed)
    mean_s = 2.0
    rate = _LOAD * sum(seats) / mean_s
    weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(1000)))
    draw = simulation.random

    def arrive(now: float) -> None:
        session = bisect.bisect(weights, draw.random() * weights[-1])
        duration_s = draw.expovariate(1 / mean_s)
        simulation.at(now + draw.expovariate(rate), arrive)
        simulation.ask(Ask(now, f"session:{session}", (), 0.0, duration_s))

    simulation.at(0.0, arrive)
    return simulation.run(20.0, seconds)


def conversations(
    policy: str,
    *,
    named: bool = True,
    load_bound: float = 1.1,
    seats: int = 32,
    seconds: float = 90.0,
    seed: int = _SEED,
    reports_blocks: bool = True,
) -> Outcome:
    """Conversations of six turns on average, at 80 % of the seats if nothing waits for a prefill.

    Each conversation is a session if `named`, else each turn: as of clients that send no session, user or key.

    A prompt is one of 20 system prompts of 512 tokens (Zipf 1.1), and the turns so far: 128 tokens of the user, 128 of
    the answer. A turn comes 5 s after the last answer, on average. Prefill runs at 10,000 tokens/s, decoding takes
    20 ms a token; the cache of a worker holds 131,072 tokens. Workers report their blocks, if `reports_blocks`.
    """
    simulation = Simulation(policy, (seats,) * _WORKERS, 8192, load_bound, seed, reports_blocks=reports_blocks)
    draw = simulation.random
    mean_turns, answer = 6, 128
    decode_s = answer * 0.02
    rate = _LOAD * seats * _WORKERS / decode_s / mean_turns
    weights = list(itertools.accumulate((rank + 1) ** -1.1 for rank in range(20)))
    numbers = itertools.count(1000)

    def text(tokens: int) -> list[int]:
        return [token for _ in range(tokens // BLOCK_TOKENS) for token in [next(numbers)] * BLOCK_TOKENS]

    systems = [text(512) for _ in weights]

    def turn(session: str, history: list[int], now: float) -> None:
        prompt = history + text(128)

        def answered(end: float) -> None:
            if draw.random() < 1 - 1 / mean_turns:
                simulation.at(end + draw.expovariate(1 / 5.0), lambda when: turn(session, prompt + text(answer), when))

        own = session if named else f"request:{next(numbers)}"
        simulation.ask(Ask(now, own, prompt, 1e-4, decode_s, answered))

    def arrive(now: float) -> None:
        simulation.at(now + draw.expovariate(rate), arrive)
        system = systems[bisect.bisect(weights, draw.random() * weights[-1])]
        turn(f"session:{next(numbers)}", system, now)

    simulation.at(0.0, arrive)
    return simulation.run(60.0, seconds)


Side = tuple[str, str, float]
"""Its name in the tables, the policy, and `load_bound`."""

PARTS = ("uniform", "zipf", "uneven", "conversations", "unnamed")


def measured_part(side: Side, part: str) -> dict[str, float]:
    """The figures of one side in one simulation."""
    name, policy, bound = side
    match part:
        case "uniform" | "zipf":
            return spread(policy, 1.1 if part == "zipf" else 0.0, load_bound=bound).figures()
        case "uneven":
            return spread(policy, 0.0, seats=(32, 32, 64, 64, 128), load_bound=bound).figures()
        case _:
            named, reports = part == "conversations", name != GUESSED
            return conversations(policy, named=named, load_bound=bound, reports_blocks=reports).figures()


def sides() -> list[Side]:
    """What is compared."""
    compared = [(policy, policy, 1.1) for policy in POLICIES]
    if "prefix_aware" in POLICIES:
        compared.append((GUESSED, "prefix_aware", 1.1))
    for policy in ("hybrid", "prefix_aware"):
        compared += [(f"{policy}, {bound}", policy, bound) for bound in BOUNDS]
    return compared


SPREAD = (
    "policy", "uniform: imbalance", "momentary", "Zipf 1.1: imbalance", "momentary", "uneven workers: imbalance"
)  # fmt: skip
TURNS = (
    "policy", "sessions: prefix hits", "first token, ms: p50 / p99", "imbalance",
    "no sessions: prefix hits", "first token, ms: p50 / p99", "imbalance",
)  # fmt: skip


def spread_row(side: str, results: dict[str, dict[str, float]]) -> list[str]:
    """How evenly a policy spreads requests."""
    even = [f"{results[kind][what]:.1%}" for kind in ("uniform", "zipf") for what in ("imbalance", "momentary")]
    return [side, *even, f"{results['uneven']['imbalance']:.1%}"]


def turns_row(side: str, results: dict[str, dict[str, float]]) -> list[str]:
    """What conversations reuse with a policy, and how long they wait."""
    cells = [side]
    for talk in (results["conversations"], results["unnamed"]):
        first = f"{1000 * talk['ttft_p50_s']:.0f} / {1000 * talk['ttft_p99_s']:.0f}"
        cells += [f"{talk['hit_rate']:.1%}", first, f"{talk['imbalance']:.1%}"]
    return cells


def measured(pool: Executor, parts: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of all sides: of these parts of these sides measured now, the others as saved before.

    A seed gives the same figures on every machine, so what a change of code does not touch need not be measured again.
    """
    saved = json.loads((RESULTS / "routing.json").read_text())["sides"]
    wanted = {
        (side[0], part): pool.submit(measured_part, side, part)
        for side in sides()
        for part in parts
        if side[0] in names or not names
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, policy, _ in sides():
        before = saved.get(name) or saved[policy]
        results[name] = {
            part: wanted[name, part].result() if (name, part) in wanted else before[part] for part in PARTS
        }
    return results


def main() -> None:
    """Simulate and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="into docs/bench and docs/adr/0003-routing.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="the figures do not depend on it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others are kept as saved")
    parser.add_argument("--sides", nargs="+", default=(), help="those that begin so; the others are kept as saved")
    arguments = parser.parse_args()
    about: dict[str, Any] = machine()
    names = [side[0] for side in sides() if side[0].startswith(tuple(arguments.sides))]
    with ProcessPoolExecutor(arguments.processes) as pool:
        results = measured(pool, arguments.parts, names)
    spreads = table(SPREAD, [spread_row(*side) for side in results.items()])
    turns = table(TURNS, [turns_row(*side) for side in results.items()])
    text = f"Requests of 1,000 sessions:\n\n{spreads}\n\nConversations:\n\n{turns}"
    print(text)
    if arguments.save:
        save("routing", {"machine": about, "seed": _SEED, "sides": results}, text)
        fill(_PAGE, "spread", spreads)
        fill(_PAGE, "turns", turns)


if __name__ == "__main__":
    main()
