"""Each built-in policy on two workers of different size: the worker that it chooses is the one that it should choose.

One small release whose router is replaced for each policy. The worker `small` has two seats in its batch, and an
eighth of the memory for its KV cache.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helm import CHART, NAME, Installation, app_version, helm, install
from kube import Insider, Json, Namespaces, Report, await_pods, ended
from lockstep_router.policies import rank
from lockstep_tools.chaos.release import ROUTER, of
from machine import wait_for
from slow_workers import LONG, slow_workers

MODEL = "reference"
SMALL, LARGE = (f"{NAME}-worker-{name}-0" for name in ("small", "large"))
SEATS = 2
"""Of the small worker."""
_SOURCE = {"path": "/models/reference"}
VALUES = {
    "models": [
        {
            "name": "small",
            "servedName": MODEL,
            "source": _SOURCE,
            "settings": {"max_seqs": SEATS, "kv_memory": "64Mi"},
        },
        {"name": "large", "servedName": MODEL, "source": _SOURCE, "settings": {"max_seqs": 16, "kv_memory": "512Mi"}},
    ],
    "modelDefaults": {"replicas": 1, "tp": 1},
    "router": {
        "replicas": 1,
        # No client uses these routers while they end.
        "preStopSleepSeconds": 0,
        "settings": {
            "policy": "sticky",
            "lame_duck_s": 0,
            "drain_timeout_s": 1,
            # A busy machine must not look like a worker that new streams avoid.
            "suspicion_phi": 0,
            "eject_after": 0,
            "slow_factor": 0,
        },
    },
}

SESSIONS = [f"session {number}" for number in range(24)]
READERS = [f"reader {number}" for number in range(6)]
_SENTENCE = "The rain fell on the house by the sea, and nobody came to the door that night. "

Seen = dict[str, list[Any]]
"""Workers of the requests by stage, as `inside/route.py` prints them."""


def preferred(session: str) -> str:
    """The worker that a session prefers."""
    return rank(f"session:{session}", (SMALL, LARGE))[0]


def follows_its_session(seen: Seen) -> None:
    """One worker for a session, and half of the sessions for each worker."""
    assert set(seen["same"]) == {LARGE}
    assert seen["spread"] == [preferred(session) for session in SESSIONS]
    assert 8 <= Counter(seen["spread"])[SMALL] <= 16


def sticky(seen: Seen) -> None:
    """Also when the preferred worker has all the load."""
    follows_its_session(seen)
    assert set(seen["together"] + seen["freed"]) == {LARGE}
    assert set(seen["document"]) == {SMALL, LARGE}


def weighted(seen: Seen) -> None:
    """As `sticky`, but the small worker has fewer sessions."""
    assert set(seen["same"] + seen["together"] + seen["freed"]) == {LARGE}
    assert 0 < Counter(seen["spread"])[SMALL] < 8


def hybrid(seen: Seen) -> None:
    """As `sticky` until the worker has more than its share, which is four requests here."""
    follows_its_session(seen)
    assert seen["together"] == [LARGE] * 4 + [SMALL] * 2
    assert set(seen["freed"]) == {LARGE}
    assert set(seen["document"]) == {SMALL, LARGE}


def round_robin(seen: Seen) -> None:
    """Each stage goes on where the one before it has ended."""
    chosen = [worker for stage in ("spread", "same", "together", "freed", "document") for worker in seen[stage]]
    assert set(chosen[:2]) == {SMALL, LARGE}
    assert chosen == (chosen[:2] * len(chosen))[: len(chosen)]


def stateless(seen: Seen) -> None:
    """The fewest requests, though the small worker has no seat for the third."""
    ignores_sessions(seen)
    assert Counter(seen["together"]) == {SMALL: 3, LARGE: 3}


def least_loaded(seen: Seen) -> None:
    """The shortest wait: requests would wait at the small worker once its seats are taken."""
    ignores_sessions(seen)
    assert Counter(seen["together"]) == {SMALL: SEATS, LARGE: 6 - SEATS}


def ignores_sessions(seen: Seen) -> None:
    """Both workers have requests of one session, in no fixed order; and new ones go where others have ended."""
    assert set(seen["same"]) == {SMALL, LARGE}
    assert set(seen["freed"]) == {LARGE}


def prefix_aware(seen: Seen) -> None:
    """As `hybrid` for short prompts. A request about a document goes where it is cached, whatever the session."""
    follows_its_session(seen)
    assert seen["together"] == [LARGE] * 4 + [SMALL] * 2
    assert len(set(seen["document"])) == 1
    first, *others = seen["cached"]
    assert first < 0.1
    assert min(others) > 0.9


@pytest.fixture(scope="module")
def routed(namespaces: Namespaces, registry: str, report: Report) -> Iterator[Installation]:
    """A router and the two workers."""
    kubectl = namespaces.new("routing")
    values = VALUES | {"modelDefaults": VALUES["modelDefaults"] | slow_workers(kubectl)}
    with install(kubectl, registry, values) as installation:
        report["routing_install_to_ready_s"] = installation.ready_s
        yield installation


@pytest.mark.parametrize(
    "keeps_its_word",
    [
        sticky,
        least_loaded,
        prefix_aware,
        *(pytest.param(policy, marks=pytest.mark.exhaustive) for policy in (weighted, hybrid, round_robin, stateless)),
    ],
)
def test_requests_go_where_the_policy_says(routed: Installation, keeps_its_word: Callable[[Seen], None]) -> None:
    policy = keeps_its_word.__name__
    routed.upgrade({"router": {"settings": {"policy": policy}}})
    (router,) = of(routed.release.pods(), ROUTER)

    def is_ready() -> bool:
        (model,) = routed.status(router.name)["models"]
        assert model["policy"] == policy
        return bool(model["ready_workers"] == 2)

    wait_for(is_ready, "the router is connected with both workers", 30.0, every_s=0.5)
    seen = Insider(routed.kubectl, router.name, "router").runs(
        "route",
        model=MODEL,
        sessions=SESSIONS,
        session=next(session for session in SESSIONS if preferred(session) == LARGE),
        large=LARGE,
        readers=READERS,
        long=LONG,
        document=f"Number {secrets.token_hex(8)}: {_SENTENCE * 20}",
    )
    keeps_its_word(seen)


def test_a_router_without_the_policy_ends_and_says_so_and_the_old_one_stays(routed: Installation) -> None:
    """The chart cannot know which policies an image with a tag of its own has, so that this upgrade is accepted."""
    (before,) = of(routed.release.pods(), ROUTER)
    values = {"router": {"image": {"tag": app_version()}, "settings": {"policy": "stickey"}}}
    notes = helm(
        "upgrade", NAME, str(CHART), "-n", routed.namespace, "--reuse-values", "-f", "-", stdin=json.dumps(values)
    )
    assert "router.settings.policy: stickey" in notes

    def has_ended(pods: list[Json]) -> bool:
        return any(ended(pod) for pod in pods)

    pods = await_pods(routed.kubectl, f"app.kubernetes.io/component={ROUTER}", has_ended, "the new router has ended")
    (end,) = (ended(pod) for pod in pods if ended(pod))
    assert end["exitCode"] == 2
    assert "setting policy: is none of sticky," in end["message"]
    assert "(given: 'stickey')" in end["message"]
    (stays,) = (pod for pod in of(routed.release.pods(), ROUTER) if pod.ready)
    assert stays.uid == before.uid
