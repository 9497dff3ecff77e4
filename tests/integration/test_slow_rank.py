"""One rank is slower by 30 %: the profile, the dashboard's query, the alert, the console and the status name it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lockstep_tools.debug.local import from_router
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from scraper import PATIENCE_S, Prometheus, filled, panels
from serving import run
from system import REFERENCE, Json, System
from test_profiling import Load

pytestmark = pytest.mark.slow

RELEASE = "walk"
SLOW, EQUAL = "20 26", "20 20"
"""Times in ms that each rank computes before a collective: longer than what it really does, on a busy machine too."""


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its text is the pace of the ranks."""
    path = tmp_path_factory.mktemp("pace") / "pace"
    path.write_text(EQUAL)
    return path


@pytest.fixture(scope="module")
def system(pace: Path) -> Iterator[System]:
    """A worker with two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK_PACE_FILE", str(pace))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "slow_rank"), prepend=os.pathsep)
        with Stack(StackSettings(str(REFERENCE), tp=2, device="cpu", threads=1, log_level="warning")) as stack:
            stack.wait_ready(PATIENCE_S)
            yield System(stack.url, stack.management_url)


@pytest.fixture(scope="module")
def prometheus(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        worker = next(each for each in from_router(client, system.management_url) if each.name == "worker-w0")
    targets = {
        worker.url.removeprefix("http://"): {"release": RELEASE, "pod": "w0", "model": "reference"},
        system.management_url.removeprefix("http://"): {"release": RELEASE, "pod": "r0"},
    }
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        yield running


def console(system: System) -> Json:
    """The console's state."""
    answer = httpx.get(f"{system.management_url}/console/state", timeout=PATIENCE_S, trust_env=False)
    state: Json = answer.raise_for_status().json()
    return state


def shown(system: System) -> Json:
    """The worker in the console's state."""
    worker: Json = console(system)["workers"][0]
    return worker


def waited_for(system: System) -> Json | None:
    """The ranks' work in the decode of a stream, if most of rank 0's time in collectives was waiting for rank 1."""
    for stream in console(system)["streams"]:
        ranks = stream["attempts"][-1]["ranks"]["decode"] if stream["outcome"] == "finished" else ()
        if ranks and ranks[0]["peer_wait_s"] > ranks[0]["transfer_s"] and ranks[1]["peer_wait_s"] == 0:
            return {"stream": stream, "first": ranks[0], "second": ranks[1]}
    return None


def test_everything_that_tells_of_ranks_names_the_slow_one(
    system: System, prometheus: Prometheus, pace: Path, tmp_path: Path
) -> None:
    (by_rank,) = {query for _, title, query in panels() if title == "Computing, of each rank's step"}
    (skew,) = {query for _, title, query in panels() if title == "Slowest rank over the fastest"}

    def slowest() -> str | None:
        """The rank that the dashboard's graph has on top, if it is as much slower as it was made."""
        samples = prometheus.query(filled(by_rank, RELEASE))
        values = {sample["metric"]["rank"]: float(sample["value"][1]) for sample in samples}
        ratios = [float(each["value"][1]) for each in prometheus.query(filled(skew, RELEASE))]
        return max(values, key=values.__getitem__) if len(values) == 2 and ratios and ratios[0] > 1.2 else None

    def listed() -> str:
        code, output, notes = run("status", "--url", system.management_url, within_s=PATIENCE_S)
        assert code == 0, notes
        return output

    def profiled(words: str) -> str:
        arguments = ("--url", system.management_url, "--steps", "10", "--out", str(tmp_path / "trace"))

        def reported() -> str:
            (tmp_path / "trace").unlink(missing_ok=True)
            code, output, notes = run("profile", *arguments, within_s=PATIENCE_S)
            assert code == 0, notes
            return output if words in output else ""

        return wait_for(reported, words, PATIENCE_S)

    with Load(system, 20):
        wait_for(lambda: shown(system)["ranks"][0]["compute_s"] > 0, "the router has the report", PATIENCE_S)
        pace.write_text(SLOW)
        wait_for(lambda: shown(system)["slow_rank"] == 1, "the console names it", PATIENCE_S)
        found = wait_for(lambda: waited_for(system), "a timeline names it", PATIENCE_S)
        first, second = found["first"], found["second"]
        # The counters are read while the ranks run, and one may have counted a step that the other has not.
        assert abs(first["steps"] - second["steps"]) <= 1
        assert first["steps"] >= found["stream"]["tokens"] - 2
        assert second["compute_s"] > first["compute_s"] >= 0.02 * (first["steps"] - 1)
        wait_for(lambda: slowest() == "1", "the dashboard's query names it", PATIENCE_S)
        prometheus.until_fires(RELEASE, "LockstepSlowRank")
        # It may resolve for a moment while something else has the processor.
        (alert,) = wait_for(lambda: prometheus.firing(RELEASE).get("LockstepSlowRank"), "the alert", PATIENCE_S)
        assert (alert["pod"], alert["rank"]) == ("w0", "1")
        profiled("bottleneck: rank 1: it computes ")
        wait_for(lambda: re.search(r"rank 1 +ready \(slow\)", listed()), "the status names it", PATIENCE_S)
        pace.write_text(EQUAL)
        prometheus.until_resolved(RELEASE, "LockstepSlowRank")
        wait_for(lambda: shown(system)["slow_rank"] is None, "the console does not name it any more", PATIENCE_S)
        profiled("balanced: no rank is clearly slower")
