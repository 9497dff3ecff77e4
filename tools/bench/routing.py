"""The routing policies over simulated workers: how evenly they spread load, what they reuse, how long clients wait.

The policies are the router's own; workers, clients and time are simulated, from a seed, so the same command gives the
same figures on every machine. Two routers share the traffic. Each knows a worker's load from a report that is up to
0.1 s old, and what it has sent itself since then, as in a real router.

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
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_router.policies import Policy, RequestFacts, WorkerFacts, imbalance, make_policy
from lockstep_router.policies.prefix_aware import BLOCK_TOKENS
from lockstep_router.settings import RouterSettings
from measure import ROOT, fill, machine, save, table
from xxhash import xxh64_intdigest

POLICIES = ("sticky", "hybrid", "stateless", "round_robin", "weighted", "least_loaded", "prefix_aware")
BOUNDS = (1.05, 1.25, 1.5)
"""Other values of `load_bound` than the default."""
_PAGE = ROOT / "docs/adr/0003-routing.md"
_WORKERS = 5
_ROUTERS = 2
_REPORT_S = 0.1
_LOAD = 0.8
"""Share of all seats that are taken on average."""
_SEED = 1


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
    first_token_s: float = math.nan
    cached: int = 0


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
        self._stay_s = 1.0
        """Mean time that a request holds its seat, over the last ones."""

    @property
    def requests(self) -> int:
        """Requests in its seats and in its queue."""
        return self.running + len(self.queue)

    def report(self) -> None:
        """Tell the routers."""
        ahead = len(self.queue) + 1 - (self.seats - self.running)
        self.seen = WorkerFacts(
            self.id,
            queued=len(self.queue),
            running=self.running,
            queue_wait_s=max(0, ahead) * self._stay_s / self.seats,
            capacity=self._cache_blocks,
        )

    def begin(self, ask: Ask, now: float) -> float:
        """Give a request a seat; returns when it ends."""
        self.running += 1
        ask.cached = self._use(ask.tokens)
        begin = max(now, self._prefill_free_at)
        self._prefill_free_at = begin + (len(ask.tokens) - ask.cached) * ask.prefill_s
        ask.first_token_s = self._prefill_free_at - ask.at
        end = self._prefill_free_at + ask.decode_s
        self._stay_s += 0.02 * (end - now - self._stay_s)
        return end

    def _use(self, tokens: Sequence[int]) -> int:
        """Cached tokens at the beginning of a prompt, all of which is cached afterwards."""
        keys = list(itertools.accumulate(tokens[::BLOCK_TOKENS], _chained, initial=0))[1:]
        found = next((count for count, key in enumerate(keys) if key not in self._cache), len(keys))
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)
        return min(found * BLOCK_TOKENS, len(tokens) - 1) if tokens else 0


def _chained(last: int, token: int) -> int:
    # All tokens of a simulated block are equal, so the first one stands for it.
    return xxh64_intdigest(token.to_bytes(4, "little"), seed=last)


@dataclass
class Outcome:
    """What a simulation measured."""

    workers: list[SimulatedWorker]
    seconds: float
    asks: list[Ask] = field(default_factory=list)
    momentary: list[float] = field(default_factory=list)

    @property
    def imbalance(self) -> float:
        """Of requests for each seat, averaged over time: the most over the average, minus 1."""
        loads = [worker.load_seconds / worker.seats for worker in self.workers]
        return max(loads) * len(loads) / sum(loads) - 1

    def figures(self) -> dict[str, float]:
        """Shares and seconds."""
        first = sorted(ask.first_token_s for ask in self.asks)
        prompts = sum(len(ask.tokens) for ask in self.asks)
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
            "ttft_p50_s": round(first[len(first) // 2], 4),
            "ttft_p99_s": round(first[len(first) * 99 // 100], 4),
        }


class Simulation:
    """Routers, workers and their events in order of time."""

    def __init__(self, policy: str, seats: Sequence[int], cache_blocks: int, load_bound: float, seed: int) -> None:
        settings = RouterSettings(workers=("simulated:1",), load_bound=load_bound)
        self.random = random.Random(seed)
        self._choices = random.Random(f"routers {seed}")
        self.workers = [SimulatedWorker(n, each, cache_blocks * each // seats[0]) for n, each in enumerate(seats)]
        self._by_id = {worker.id: worker for worker in self.workers}
        self._routers: list[tuple[Policy, dict[str, int]]] = [
            (make_policy(policy, settings), dict.fromkeys(self._by_id, 0)) for _ in range(_ROUTERS)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, do: Callable[[float], None]) -> None:
        """Call `do` with the time when it has come."""
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def run(self, warm_up_s: float, seconds: float) -> Outcome:
        """Run for both times and measure the second."""
        self._outcome = Outcome(self.workers, seconds)
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
        policy, sent = self._choices.choice(self._routers)
        workers = [_with_sent(worker.seen, sent[worker.id]) for worker in self.workers]
        request = RequestFacts(ask.session, f"stream {next(self._numbers)}", prompt_ids=ask.tokens)
        chosen = policy.choose(request, workers)
        policy.note_sent(request, next(worker for worker in workers if worker.worker_id == chosen))
        sent[chosen] += 1
        worker = self._by_id[chosen]
        worker.queue.append(ask)
        self._fill(worker, ask.at)

    def _fill(self, worker: SimulatedWorker, now: float) -> None:
        while worker.queue and worker.running < worker.seats:
            ask = worker.queue.popleft()
            self.at(worker.begin(ask, now), lambda when, ask=ask: self._end(worker, ask, when))
            if ask.at >= self._measures_from:
                self._outcome.asks.append(ask)

    def _end(self, worker: SimulatedWorker, ask: Ask, now: float) -> None:
        worker.running -= 1
        self._fill(worker, now)
        ask.on_end(now)

    def _report(self, now: float) -> None:
        for worker in self.workers:
            worker.report()
        for _, sent in self._routers:
            sent.update(dict.fromkeys(sent, 0))
        if now >= self._measures_from:
            self._outcome.momentary.append(imbalance([worker.requests for worker in self.workers]))
        self.at(now + _REPORT_S, self._report)


def _with_sent(facts: WorkerFacts, sent: int) -> WorkerFacts:
    return WorkerFacts(
        facts.worker_id,
        queued=facts.queued,
        running=facts.running,
        sent=sent,
        queue_wait_s=facts.queue_wait_s,
        capacity=facts.capacity,
    )


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
) -> Outcome:
    """Conversations of six turns on average, at 80 % of the seats if nothing waits for a prefill.

    Each conversation is a session if `named`, else each turn: as of clients that send no session, user or key.

    A prompt is one of 20 system prompts of 512 tokens (Zipf 1.1), and the turns so far: 128 tokens of the user, 128 of
    the answer. A turn comes 5 s after the last answer, on average. Prefill runs at 10,000 tokens/s, decoding takes
    20 ms a token; the cache of a worker holds 131,072 tokens.
    """
    simulation = Simulation(policy, (seats,) * _WORKERS, 8192, load_bound, seed)
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


def measured() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """All figures, side by side."""
    sides = [(policy, policy, 1.1) for policy in POLICIES]
    sides += [(f"hybrid, {bound}", "hybrid", bound) for bound in BOUNDS]
    sides += [(f"prefix_aware, {bound}", "prefix_aware", bound) for bound in BOUNDS]
    uneven = (32, 32, 64, 64, 128)
    for side, policy, bound in sides:
        yield (
            side,
            {
                "uniform": spread(policy, 0.0, load_bound=bound).figures(),
                "zipf": spread(policy, 1.1, load_bound=bound).figures(),
                "uneven": spread(policy, 0.0, seats=uneven, load_bound=bound).figures(),
                "conversations": conversations(policy, load_bound=bound).figures(),
                "unnamed": conversations(policy, named=False, load_bound=bound).figures(),
            },
        )


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


def main() -> None:
    """Simulate and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="into docs/bench and docs/adr/0003-routing.md")
    arguments = parser.parse_args()
    about: dict[str, Any] = machine()
    sides = dict(measured())
    spreads = table(SPREAD, [spread_row(*side) for side in sides.items()])
    turns = table(TURNS, [turns_row(*side) for side in sides.items()])
    text = f"Requests of 1,000 sessions:\n\n{spreads}\n\nConversations:\n\n{turns}"
    print(text)
    if arguments.save:
        save("routing", {"machine": about, "seed": _SEED, "sides": sides}, text)
        fill(_PAGE, "spread", spreads)
        fill(_PAGE, "turns", turns)


if __name__ == "__main__":
    main()
