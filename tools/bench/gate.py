"""How often the cost gate takes the faster way: models, networks and lengths of prefixes, each way really taken.

An engine with real ranks, and a state server process behind a proxy with a bandwidth and a delay. Each case is a model,
a network and a prefix whose blocks the state server has. In each round its first token is timed three times: with the
prefix computed, with it fetched whatever that costs, and with what the gate decides, which knows the network only from
its own probes and fetches, and the pace of computing only from the engine's steps. Each network begins with a new
connection and no estimate.

A case in which one way took longer in some round than the other one did in some other has no faster way that these
rounds can tell: it counts as right whatever the gate did, and the report says how many there are. All others count by
the faster median, also those within the gate's own margin, in which it computes what a fetch would bring
a little sooner.

`gate.py --save`.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from lockstep_common.grpc_tls import dial_plain
from lockstep_common.ports import free_port
from lockstep_engine import AsyncEngine, EngineConfig, Output, Request, SamplingParams, remote_keys
from lockstep_engine.remote_store import BlockForm, FetchResult, HeadRange, StoredBlock
from lockstep_worker.kv_store import KvStore, StoreOptions
from measure import ROOT, machine, save, table
from state import state_server
from synthetic import SHAPES, write_random

sys.path.insert(0, str(ROOT / "tests/doubles"))

from tcp_proxy import TcpProxy

_REFERENCE = ROOT / "models/reference"
_LOOPBACK = "127.0.0.1"
_TENANT = "bench"
_QUESTION = 12
"""Tokens after the prefix."""
_VOCABULARY = 4096
_PATIENCE_S = 120.0
_TIMEOUT_S = 0.25
"""The default of `state_timeout_s`."""
_MEMORY_BYTES = 1 << 26
COMPUTED, FETCHED, GATED = "computed", "fetched", "gated"
WAYS = (COMPUTED, FETCHED, GATED)

LENGTHS = {"reference": (128, 256, 512, 1024, 1536), "0.1b": (32, 64, 128, 256, 512)}
MB_PER_S = (1.0, 4.0, 16.0, 64.0, 256.0)
DELAYS_MS = (0.0, 2.0, 10.0, 40.0)


@dataclass(frozen=True)
class Network:
    """The way to the state server, in each direction."""

    mb_per_s: float
    delay_ms: float


@dataclass
class Run:
    """One first token."""

    ms: float
    outcomes: list[str] = field(default_factory=list)
    """Of the fetches."""
    fetched_blocks: int = 0
    estimated_fetch_ms: float | None = None
    estimated_compute_ms: float | None = None


@dataclass
class Case:
    """A model, a network and a prefix."""

    model: str
    network: Network
    tokens: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def times(self, way: str) -> list[float]:
        """The times of a way, in milliseconds."""
        return [run.ms for run in self.runs[way]]

    def median(self, way: str) -> float:
        """The median time of a way, in milliseconds."""
        return statistics.median(self.times(way))

    @property
    def faster(self) -> str | None:
        """The way that was faster in all rounds; None: neither was."""
        one, other = sorted((COMPUTED, FETCHED), key=self.median)
        return one if max(self.times(one)) < min(self.times(other)) else None

    @property
    def chosen(self) -> str:
        """The way that the gate took in most rounds."""
        fetches = [bool(set(run.outcomes) - {"gate", "unmeasured", "unavailable"}) for run in self.runs[GATED]]
        return FETCHED if 2 * sum(fetches) > len(fetches) else COMPUTED

    @property
    def is_right(self) -> bool:
        """Whether no other way was faster than the one that the gate took."""
        return self.faster in (None, self.chosen)

    @property
    def regret(self) -> float:
        """How much longer the gated first token took than that of the faster way, as a part of the latter."""
        return self.median(GATED) / min(self.median(COMPUTED), self.median(FETCHED)) - 1


class Door:
    """The engine's store, which takes the way that the bench asks for. It is a RemoteStore."""

    fetch_timeout_s = _PATIENCE_S
    is_away = False

    def __init__(self) -> None:
        self.way = COMPUTED
        self.run = Run(0.0)
        self.stores: dict[str, KvStore] = {}
        """By way. What is fetched whatever it costs must not count in what the gate knows of the network."""
        self.writer: KvStore | None = None
        """While there are blocks to store."""

    def offer(self, _tenant: str, blocks: Sequence[StoredBlock]) -> int:
        """Take all blocks; those of repeated runs are in the store."""
        return len(blocks) if self.writer is None else self.writer.offer(_TENANT, blocks)

    def is_kept(self, _offered_at: float) -> bool:
        """Never offer a block again."""
        return True

    async def fetch(
        self,
        _tenant: str,
        hashes: Sequence[bytes],
        heads: Sequence[HeadRange],
        form: BlockForm,
        recompute_s: Callable[[int], float],
        into: Callable[[int, int], memoryview],
        further_bytes: int,
    ) -> FetchResult:
        """Fetch in the present way."""
        if self.way == COMPUTED:
            return FetchResult(0, "gate")
        store = self.stores[self.way]
        if self.way == GATED and self.run.estimated_compute_ms is None:
            link = store.link.estimate()
            assert link is not None
            size = len(hashes) * form.length * len(heads)
            self.run.estimated_compute_ms = 1000 * recompute_s(len(hashes))
            self.run.estimated_fetch_ms = 1000 * link.of_fetch(2, further_bytes).fetch_s(size)
        pace = recompute_s if self.way == GATED else lambda count: _PATIENCE_S * count
        result = await store.fetch(_TENANT, hashes, heads, form, pace, into, further_bytes)
        self.run.outcomes.append(result.outcome)
        self.run.fetched_blocks += result.blocks
        return result


class Timed:
    """An engine, and the time to its first tokens."""

    def __init__(self, model: Path, door: Door) -> None:
        self._door = door
        self._numbers = itertools.count()
        self._outputs: asyncio.Queue[tuple[float, Output]] = asyncio.Queue()
        config = EngineConfig(
            model=str(model),
            device="cpu",
            threads=1,
            max_seqs=4,
            kv_memory_bytes=_MEMORY_BYTES,
            host_cache_bytes=_MEMORY_BYTES,
        )
        self.engine = AsyncEngine(config, on_outputs=self._note, on_change=lambda: None, remote_store=door)

    def _note(self, _step: int, outputs: Sequence[Output]) -> None:
        for each in outputs:
            self._outputs.put_nowait((time.perf_counter(), each))

    async def first_token(self, prompt: tuple[int, ...]) -> Run:
        """Ask for one token. Each request is a new tenant's, so nothing of it is in this worker's own caches."""
        number = next(self._numbers)
        run = self._door.run = Run(0.0)
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        began_s = time.perf_counter()
        self.engine.submit(Request(f"r{number}", prompt, sampling, tenant=f"tenant-{number}"))
        async with asyncio.timeout(_PATIENCE_S):
            at_s, output = await self._outputs.get()
            run.ms = 1000 * (at_s - began_s)
            while output.finish is None:
                _, output = await self._outputs.get()
        if output.error is not None:
            raise SystemExit(f"a request has failed: {output.error}")
        return run


@contextlib.contextmanager
def proxied(port: int) -> Iterator[TcpProxy]:
    """A proxy to a port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_PATIENCE_S)

    proxy = TcpProxy(port)
    try:
        run(proxy.__aenter__())
        yield proxy
        run(proxy.__aexit__())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.asynccontextmanager
async def opened(target: str, name: str, timeout_s: float) -> AsyncIterator[KvStore]:
    """A store as a worker has it, once it has measured the way. Its calls without content have so much time."""
    options = StoreOptions(
        target, timeout_s=timeout_s, fetch_timeout_s=60.0, queue_bytes=1 << 28, ttl_s=3600, name=name
    )
    async with KvStore(options, dial_plain) as store:
        async with asyncio.timeout(_PATIENCE_S):
            while store.link.estimate() is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        yield store


async def measure_network(
    timed: Timed,
    door: Door,
    target: str,
    prompts: Sequence[tuple[int, ...]],
    cases: Sequence[Case],
    rounds: int,
    timeout_s: float,
) -> None:
    """All cases of one network."""
    async with opened(target, FETCHED, 10.0) as fetched, opened(target, GATED, timeout_s) as gated:
        door.stores = {FETCHED: fetched, GATED: gated}
        for number in range(rounds):
            for case in cases:
                for each in range(len(WAYS)):
                    door.way = WAYS[(number + each) % len(WAYS)]
                    prompt = (*prompts[cases.index(case)], *Random(number).choices(range(10, 200), k=_QUESTION))
                    case.runs[door.way].append(await timed.first_token(prompt))


def check(case: Case) -> None:
    """Exit if what should have been fetched was not."""
    for run in case.runs[FETCHED]:
        if set(run.outcomes) != {"fetched"} or run.fetched_blocks < (case.tokens - _QUESTION) // 16:
            raise SystemExit(f"{case.model}, {case.network}, {case.tokens} tokens: not fetched, but {run.outcomes}")


async def measure_model(
    name: str,
    path: Path,
    networks: Sequence[Network],
    lengths: Sequence[int],
    rounds: int,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> list[Case]:
    """The cases of one model. Where the gate decides, calls without content have `timeout_s`."""
    choose = Random(name)
    prompts = [tuple(choose.choices(range(10, _VOCABULARY), k=length)) for length in lengths]
    port, door, cases = free_port(_LOOPBACK), Door(), []
    async with contextlib.AsyncExitStack() as entered:
        directory = Path(entered.enter_context(tempfile.TemporaryDirectory(prefix="ls-")))
        address = f"{_LOOPBACK}:{port}"
        await entered.enter_async_context(state_server("state", directory, listen=address))
        proxy = entered.enter_context(proxied(port))
        # Tenants are there to have nothing cached; what the state server has is for all of them.
        seed = remote_keys.seed

        def seed_of_all(*given: Any, **more: Any) -> bytes:
            return seed(*given[:3], _TENANT, **more)

        entered.enter_context(mock.patch.object(remote_keys, "seed", seed_of_all))
        timed = Timed(path, door)
        await timed.engine.start()
        entered.push_async_callback(timed.engine.close)
        async with opened(address, "writer", 10.0) as door.writer:
            for prompt in prompts:
                await timed.first_token(prompt)
            if not await timed.engine.store_prefixes(_PATIENCE_S):
                raise SystemExit("blocks were not stored")
            await door.writer.flush(_PATIENCE_S)
        door.writer = None
        for network in networks:
            proxy.bytes_per_s = 1e6 * network.mb_per_s
            proxy.delay_s = (network.delay_ms / 1000,) * 2
            here = [Case(name, network, length) for length in lengths]
            await measure_network(timed, door, f"{_LOOPBACK}:{proxy.port}", prompts, here, rounds, timeout_s)
            for case in here:
                check(case)
            cases += here
            print(text_of(here), flush=True)
    return cases


def summary(cases: Sequence[Case]) -> dict[str, float]:
    """Shares of cases, and times of all of them together."""
    faster = {way: [case for case in cases if case.faster == way] for way in (COMPUTED, FETCHED)}
    alike = sum(case.faster is None for case in cases)
    right = sum(case.is_right for case in cases)
    best = sum(min(case.median(COMPUTED), case.median(FETCHED)) for case in cases)
    return {
        "cases": len(cases),
        "right": right,
        "share": right / len(cases),
        "alike": alike,
        "share_of_different": (right - alike) / max(1, len(cases) - alike),
        **{f"{way}_is_faster": len(each) for way, each in faster.items()},
        **{f"{way}_right": sum(case.is_right for case in each) for way, each in faster.items()},
        "median_regret": statistics.median(case.regret for case in cases),
        **{f"{way}_over_best": sum(case.median(way) for case in cases) / best for way in WAYS},
    }


def row(case: Case) -> list[str]:
    """A case in the table."""
    estimates = [
        statistics.median(each)
        for each in zip(*((run.estimated_fetch_ms, run.estimated_compute_ms) for run in case.runs[GATED]), strict=True)
    ]
    times = [f"{case.median(way):.0f}" for way in WAYS]
    verdict = "alike" if case.faster is None else "right" if case.is_right else "WRONG"
    network = f"{case.network.mb_per_s:g} MB/s, {case.network.delay_ms:g} ms"
    expected = " / ".join(f"{each:.0f}" for each in estimates)
    return [case.model, network, str(case.tokens), *times, expected, case.chosen, verdict, f"{case.regret:.0%}"]


def text_of(cases: Sequence[Case]) -> str:
    """The table of cases."""
    header = (
        "model", "network: each way", "tokens", "computed, ms", "fetched, ms", "gated, ms",
        "the gate's estimates: fetch / compute, ms", "its choice", "verdict", "regret",
    )  # fmt: skip
    return table(header, [row(case) for case in cases])


def text_of_summary(each: Mapping[str, float]) -> str:
    """The figures in sentences."""
    return (
        f"{each['cases']} cases: the gate took the faster way, or no slower one, in {each['right']} "
        f"({each['share']:.1%}). In {each['alike']} of them neither way was faster in all rounds, so that both are "
        f"right; of the others {each['share_of_different']:.1%} are right: {each['fetched_right']} of "
        f"{each['fetched_is_faster']} in which fetching was faster, and {each['computed_right']} of "
        f"{each['computed_is_faster']} in which computing was.\n\n"
        "First tokens of all cases together, over those with the faster way always: gated "
        f"{each['gated_over_best']:.2f}, always computed {each['computed_over_best']:.2f}, always fetched "
        f"{each['fetched_over_best']:.2f}. Median of the gate's regret: {each['median_regret']:.1%}."
    )


def networks_of(rates: Sequence[float], delays: Sequence[float]) -> list[Network]:
    """All networks, in an order that is not that of their speed."""
    networks = [Network(*each) for each in itertools.product(rates, delays)]
    Random(1).shuffle(networks)
    return networks


def main() -> None:
    """Measure and print; `--save` into docs/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="(%(default)s)")
    parser.add_argument("--mb-per-s", nargs="+", type=float, default=MB_PER_S, help="(default: %(default)s)")
    parser.add_argument("--delays-ms", nargs="+", type=float, default=DELAYS_MS, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--note", help="how the run differs from a quiet one")
    parser.add_argument("--save", action="store_true", help="into docs/bench")
    arguments = parser.parse_args()
    about = machine() | {"rounds": arguments.rounds} | ({"note": arguments.note} if arguments.note else {})
    networks, cases = networks_of(arguments.mb_per_s, arguments.delays_ms), []
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        for model in arguments.models:
            path = _REFERENCE if model == "reference" else write_random(SHAPES[model], Path(name) / model)
            cases += asyncio.run(measure_model(model, path, networks, LENGTHS[model], arguments.rounds))
    about["load_at_end"] = round(os.getloadavg()[0], 1)
    result = summary(cases)
    text = f"{text_of_summary(result)}\n\n{text_of(cases)}"
    print(f"\n{text}")
    if arguments.save:
        save("gate", {"machine": about, "summary": result, "cases": [asdict(case) for case in cases]}, text)


if __name__ == "__main__":
    main()
