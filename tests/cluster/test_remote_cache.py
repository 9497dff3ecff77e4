"""A rolling update of workers that keep cold blocks in the state server: their successors find sessions' prefixes."""

from collections.abc import Iterator

import pytest
import state_release
from helm import SMALL_QUEUES, Installation, install
from kube import Json, Namespaces, Report, Visitor, image_of
from lockstep_tools.chaos.release import ROUTER, WORKER, of

HTTP = 8000
MODEL = "reference"
_TRIES, _READERS = 3, 3
_STORY = "The rain fell on the house by the sea, and nobody came to the door that night. " * 72
"""So long that fetching it takes less time than computing it."""
_CACHE = {
    "worker": {"remoteCache": {"enabled": True}},
    "modelDefaults": {"settings": {**SMALL_QUEUES["modelDefaults"]["settings"], "host_cache_bytes": "64Mi"}},
}


@pytest.fixture(scope="module")
def caching(namespaces: Namespaces, registry: str, report: Report) -> Iterator[Installation]:
    """Two routers, two workers, and a state server in memory that has their blocks, too."""
    with install(namespaces.new("remote-cache"), registry, state_release.in_memory() | _CACHE) as installation:
        report["remote_cache_install_to_ready_s"] = installation.ready_s
        yield installation


def test_the_next_turn_after_a_rolling_update_finds_its_prefix(
    caching: Installation, namespaces: Namespaces, report: Report
) -> None:
    """All workers are new by then. A successor may estimate that a fetch takes longer than computing, so there are
    several conversations, of which one has to find its prefix.
    """
    image = image_of(caching.kubectl, of(caching.release.pods(), ROUTER)[0].name)
    visitor = Visitor(namespaces.new("reader"), image)
    for number in range(_TRIES):
        readers = range(number * _READERS, (number + 1) * _READERS)
        firsts = {reader: f"Chapter {reader}. {_STORY}" for reader in readers}
        begun = {reader: ask(caching, visitor, reader, first) for reader, first in firsts.items()}
        assert all(each["cached_tokens"] < 0.2 * each["prompt_tokens"] for each in begun.values())
        before = uids(caching)
        caching.upgrade({"modelDefaults": {"settings": {"max_queue": 17 + number}}})
        assert not before & uids(caching)
        for reader, first in firsts.items():
            found = ask(caching, visitor, reader, f"{first}{begun[reader]['text']} And then, in the morning,")
            if found["cached_tokens"] > 0.8 * begun[reader]["prompt_tokens"]:
                hits = state_release.metric(caching, "lockstep_state_blocks_total", {"outcome": "hit"})
                report["remote_cache_after_update"] = {**found, "updates": number + 1, "blocks": hits}
                assert hits > 0
                return
    raise AssertionError("each successor has computed the prefix, or most of it")


def uids(caching: Installation) -> set[str]:
    return {pod.uid for pod in of(caching.release.pods(), WORKER)}


def ask(caching: Installation, visitor: Visitor, number: int, prompt: str) -> Json:
    router = next(iter(caching.addresses(ROUTER).values()))
    found: Json = visitor.runs("ask", router=f"{router}:{HTTP}", model=MODEL, session=f"reader {number}", prompt=prompt)
    return found
