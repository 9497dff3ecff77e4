"""API keys, limits that routers share, and a model's policy: given by the chart's values and by Secrets.

LOCKSTEP_REDIS_IMAGE names an image with redis-server; without it the tests of shared limits are skipped.
"""

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import redis_pod
from helm import NAME, Installation, helm
from kube import Json, Namespaces, Report, Visitor, apply, image_of
from lockstep_tools.chaos.release import ROUTER, of
from machine import wait_for
from minutes import until_room_s

HTTP, GRPC = 8000, 8002
MODEL = "reference"
KEYS = "lockstep-keys"
_SYNC_S = 180.0
"""The kubelet puts a changed Secret into pods within a minute or so."""
LIMIT, AT_ONCE = 4, 12
"""Requests per minute of the limited tenant, and how many it sends at a time."""
_BURST_S = 20.0
"""Longest time in which those arrive, with the start of the program that sends them."""
_STEADY_S = 8.0

shared = pytest.mark.skipif(not redis_pod.IMAGE, reason="LOCKSTEP_REDIS_IMAGE not set")


class Tenants:
    """The tenants: one whose key changes, one with a small limit, one with a limit out of reach."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self.key, self.limited, self.steady = (secrets.token_urlsafe(32) for _ in range(3))
        self.write()

    def write(self) -> None:
        """Put the keys' hashes into their Secret."""
        tenants = [
            {"name": "first", "keys": entries(self.key)},
            {"name": "limited", "keys": entries(self.limited), "requests_per_minute": LIMIT},
            {"name": "steady", "keys": entries(self.steady), "requests_per_minute": 1_000_000},
        ]
        # JSON is YAML.
        data = {"keys.yaml": json.dumps({"tenants": tenants}), "api-key": self.key}
        apply(
            self._installation.kubectl,
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}, "stringData": data},
        )


def entries(key: str) -> list[Json]:
    return [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]


@pytest.fixture(scope="module")
def policies(served: Installation) -> list[str]:
    """The policy that each router has for the model before the upgrade."""
    return policies_of(served)


@pytest.fixture(scope="module")
def tenants(served: Installation, policies: list[str]) -> Iterator[Tenants]:
    """One upgrade brings keys, shared limits and a policy; afterwards the release is as before."""
    made = Tenants(served)
    values: Json = {
        "router": {
            "keys": {"secretName": KEYS},
            # A slow machine must not look like a Redis that does not answer.
            "settings": {"model_policies": {MODEL: "round_robin"}, "limits_storage_timeout_s": 5},
        },
        "test": {
            "env": [{"name": "LOCKSTEP_API_KEY", "valueFrom": {"secretKeyRef": {"name": KEYS, "key": "api-key"}}}]
        },
    }
    if redis_pod.IMAGE:
        used = redis_pod.start(served.kubectl)
        values = {**values, **used, "router": values["router"] | used["router"]}
    served.upgrade(values)
    yield made
    helm("rollback", NAME, "-n", served.namespace)
    served.await_whole()


@pytest.fixture(scope="module")
def visitor(served: Installation, namespaces: Namespaces, tenants: Tenants) -> Visitor:
    """A pod in another namespace, started when the release has its keys."""
    return Visitor(namespaces.new("tenants"), image_of(served.kubectl, of(served.release.pods(), ROUTER)[0].name))


def policies_of(installation: Installation) -> list[str]:
    routers = of(installation.release.pods(), ROUTER)
    return [model["policy"] for router in routers for model in installation.status(router.name)["models"]]


def routers_of(installation: Installation) -> list[str]:
    return [f"{address}:{HTTP}" for address in installation.addresses(ROUTER).values()]


def test_doors_open_with_a_key_only(served: Installation, visitor: Visitor, tenants: Tenants) -> None:
    asked = {
        "host": f"{NAME}-router.{served.namespace}.svc",
        "http": HTTP,
        "grpc": GRPC,
        "model": MODEL,
        "prompt": "Once",
    }
    nobody = {"rest": 401, "sse": 401, "websocket": 401, "grpc": "UNAUTHENTICATED", "health": "SERVING"}
    assert visitor.runs("doors", **asked) == nobody
    assert visitor.runs("doors", **asked, key="another") == nobody
    said = visitor.runs("doors", **asked, key=tenants.key)
    assert said.pop("health") == "SERVING"
    (text,) = set(said.values())
    assert isinstance(text, str)
    assert len(text) > 24


def test_helm_test_with_a_key_is_green(served: Installation, tenants: Tenants) -> None:
    output = helm("test", NAME, "-n", served.namespace, "--logs")
    assert "ok   stream" in output, output


def test_an_upgrade_changes_a_models_policy(served: Installation, policies: list[str], tenants: Tenants) -> None:
    assert policies == ["sticky", "sticky"]
    assert policies_of(served) == ["round_robin", "round_robin"]


@shared
def test_routers_count_a_tenants_requests_together(served: Installation, visitor: Visitor, tenants: Tenants) -> None:
    """At once and at both routers: if each counted by itself, twice as many would be admitted."""
    time.sleep(until_room_s(_BURST_S))
    answers = visitor.runs("knock", routers=routers_of(served), model=MODEL, key=tenants.limited, requests=AT_ONCE)
    assert Counter(status for _, status, _ in answers) == {200: LIMIT, 429: AT_ONCE - LIMIT}
    assert all(0 < int(wait) <= 120 for _, status, wait in answers if status == 429)


@shared
def test_no_request_fails_when_redis_dies(
    served: Installation, visitor: Visitor, tenants: Tenants, report: Report
) -> None:
    """Afterwards each router applies the full limits by itself."""
    routers = routers_of(served)
    running = visitor.starts("knock", routers=routers, model=MODEL, key=tenants.steady, seconds=_STEADY_S)
    try:
        redis_pod.kill(served.kubectl)
        output, _ = running.communicate(timeout=_STEADY_S + 120.0)
    finally:
        running.kill()
    answers = json.loads(output)
    report["without_redis"] = {"requests": len(answers), "failed": sum(status != 200 for _, status, _ in answers)}
    assert {status for _, status, _ in answers} == {200}
    assert {router for router, *_ in answers} == set(routers)
    for router in served.addresses(ROUTER):
        assert "lockstep_router_limits_fallback 1.0" in served.managed(router, "metrics")
    time.sleep(until_room_s(_BURST_S))
    alone = visitor.runs("knock", routers=routers, model=MODEL, key=tenants.limited, requests=AT_ONCE)
    admitted = Counter(router for router, status, _ in alone if status == 200)
    assert admitted == dict.fromkeys(routers, LIMIT)


def test_a_changed_secret_replaces_keys_without_a_restart(
    served: Installation, visitor: Visitor, tenants: Tenants, report: Report
) -> None:
    before = {pod.name: pod.uid for pod in served.release.pods()}
    old, new = tenants.key, secrets.token_urlsafe(32)

    def statuses(key: str) -> set[int]:
        answers = visitor.runs("knock", routers=routers_of(served), model=MODEL, key=key, requests=2)
        return {status for _, status, _ in answers}

    assert (statuses(old), statuses(new)) == ({200}, {401})
    tenants.key = new
    tenants.write()
    wait_for(lambda: statuses(new) == {200}, "both routers take the new key", _SYNC_S, every_s=2.0)
    assert statuses(old) == {401}
    assert {pod.name: pod.uid for pod in served.release.pods()} == before
    assert all(pod.restarts == 0 for pod in of(served.release.pods(), ROUTER))
