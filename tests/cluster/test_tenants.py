"""API keys, limits, priorities, the audit log and a model's policy: given by the chart's values and by Secrets.

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
from answers import CLOSED, check_open
from helm import NAME, SMALL_QUEUES, Installation, helm
from kube import Json, Namespaces, Report, Visitor, apply, image_of
from lockstep_tools.chaos.release import ROUTER, WORKER, of
from machine import wait_for
from minutes import until_room_s
from slow_workers import LONG, slow_workers

HTTP, GRPC = 8000, 8002
MODEL, PROMPT = "reference", "Once upon a time"
KEYS = "lockstep-keys"
_SYNC_S = 180.0
"""The kubelet puts a changed Secret into pods within a minute or so."""
LIMIT, AT_ONCE = 4, 12
"""Requests per minute of the limited tenant, and how many it sends at a time."""
TOKEN_LIMIT = 60
"""Tokens per minute of another one: less than its first answer has."""
_BURST_S = 20.0
"""Longest time in which those arrive, with the start of the program that sends them."""
_STEADY_S = 8.0
_WITHOUT_REDIS_S = 60.0

shared = pytest.mark.skipif(not redis_pod.IMAGE, reason="LOCKSTEP_REDIS_IMAGE not set")


class Tenants:
    """The tenants: one whose key changes, and one for each limit and priority."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self.key = secrets.token_urlsafe(32)
        self.limits: dict[str, Json] = {
            "limited": {"requests_per_minute": LIMIT},
            "steady": {"requests_per_minute": 1_000_000},
            "tokens": {"tokens_per_minute": TOKEN_LIMIT},
            "narrow": {"concurrent_streams": 2},
            "low": {"priority": "low"},
            "high": {"priority": "high"},
        }
        self.keys = {name: secrets.token_urlsafe(32) for name in self.limits}
        self.write()

    def write(self) -> None:
        """Put the keys' hashes into their Secret."""
        tenants = [{"name": "first", "keys": entries(self.key)}]
        tenants += [{"name": name, "keys": entries(self.keys[name]), **limit} for name, limit in self.limits.items()]
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
        # Their streams hold seats until the test ends them, and a pod that reads 32 of them keeps up.
        "modelDefaults": slow_workers(served.kubectl),
        "router": {
            "keys": {"secretName": KEYS},
            "settings": {
                "model_policies": {MODEL: "round_robin"},
                # A slow machine must not look like a Redis that does not answer, or a worker that new streams avoid.
                "limits_storage_timeout_s": 5,
                "suspicion_phi": 0,
                "eject_after": 0,
                "slow_factor": 0,
            },
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
        "prompt": PROMPT,
    }
    assert visitor.runs("doors", **asked) == CLOSED
    assert visitor.runs("doors", **asked, key="another") == CLOSED
    check_open(visitor.runs("doors", **asked, key=tenants.key), MODEL, PROMPT)


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
    answers = visitor.runs(
        "knock", routers=routers_of(served), model=MODEL, key=tenants.keys["limited"], requests=AT_ONCE
    )
    assert Counter(status for _, status, _ in answers) == {200: LIMIT, 429: AT_ONCE - LIMIT}
    assert all(0 < int(wait) <= 120 for _, status, wait in answers if status == 429)


@pytest.fixture(scope="module")
def limited(served: Installation, visitor: Visitor, tenants: Tenants) -> Json:
    """What the tenants with limits and priorities have met, and the word that was in all of their prompts."""
    marker = f"zebra{secrets.token_hex(6)}"
    seats = len(of(served.release.pods(), WORKER)) * SMALL_QUEUES["modelDefaults"]["settings"]["max_seqs"]
    asked = {"routers": routers_of(served), "model": MODEL, "marker": marker, "seats": seats, "long": LONG}
    found: Json = visitor.runs("limits", **asked, **tenants.keys)
    return found | {"marker": marker}


def test_tokens_of_prompts_and_answers_are_limited(limited: Json) -> None:
    """At all routers, where they count together. An answer in progress is not cut: it takes what it takes."""
    too_long, fits, same, *others = limited["tokens"]
    assert (too_long["status"], too_long["code"]) == (400, "resource_exhausted")
    assert fits["status"] == 200
    assert fits["usage"]["total_tokens"] > TOKEN_LIMIT
    for refused in [same, *others] if redis_pod.IMAGE else [same]:
        assert (refused["status"], refused["code"]) == (429, "rate_limit_exceeded")
        assert refused["param"] == "tokens_per_minute"
        assert 0 < refused["waits_s"] <= 120


def test_streams_at_a_time_are_limited_at_each_router(limited: Json) -> None:
    """A stream that has ended makes room for another."""
    third = limited["streams"]["third"]
    assert (third["status"], third["code"], third["param"]) == (429, "rate_limit_exceeded", "concurrent_streams")
    assert limited["streams"]["elsewhere"] == [200]
    assert limited["streams"]["after"] == 200


def test_a_higher_priority_goes_first_on_full_workers(limited: Json) -> None:
    """Those of low priority came first. Each of the two workers takes its requests in their order, so that the other
    one's do not change who is first and who is last.
    """
    assert Counter(limited["turns"]) == {"high": 4, "low": 4}
    assert limited["turns"][:2] == ["high", "high"]
    assert limited["turns"][-2:] == ["low", "low"]


def test_the_audit_log_has_every_request_and_no_text(served: Installation, tenants: Tenants, limited: Json) -> None:
    expected = {"tokens": {200, 400, 429}, "narrow": {200, 429, 499}, "high": {101, 499}}

    def audited() -> list[Json]:
        logs = [served.kubectl.run("logs", pod.name) for pod in of(served.release.pods(), ROUTER)]
        return [json.loads(line) for log in logs for line in log.splitlines() if '"message":"audit"' in line]

    def of_tenant(lines: list[Json], tenant: str) -> set[int]:
        return {line["status"] for line in lines if line["tenant"] == tenant}

    def is_written() -> bool:
        lines = audited()
        return all(statuses <= of_tenant(lines, tenant) for tenant, statuses in expected.items())

    # Clients have left before a router notices, and lines are written a little later.
    wait_for(is_written, "the audit log has all kinds of answers", every_s=1.0)
    lines = audited()
    for tenant in expected:
        own = [line for line in lines if line["tenant"] == tenant]
        assert {line["key_id"] for line in own} == {entries(tenants.keys[tenant])[0]["sha256"][:8]}
    assert any(line["completion_tokens"] == 80 for line in lines)
    logs = {pod.name: served.kubectl.run("logs", pod.name) for pod in served.release.pods()}
    for text in [limited["marker"], *limited["texts"], tenants.key, *tenants.keys.values()]:
        written = json.dumps(text).strip('"')
        assert len(written) > 12
        assert [name for name, log in logs.items() if text in log or written in log] == []


@shared
def test_no_request_fails_when_redis_dies(
    served: Installation, visitor: Visitor, tenants: Tenants, report: Report
) -> None:
    """Afterwards each router applies the full limits by itself."""
    routers = routers_of(served)
    running = visitor.starts("knock", routers=routers, model=MODEL, key=tenants.keys["steady"], seconds=_STEADY_S)
    try:
        redis_pod.kill(served.kubectl)
        output, _ = running.communicate(timeout=_STEADY_S + 120.0)
    finally:
        running.kill()
    answers = json.loads(output)
    report["without_redis"] = {"requests": len(answers), "failed": sum(status != 200 for _, status, _ in answers)}
    assert {status for _, status, _ in answers} == {200}
    assert {router for router, *_ in answers} == set(routers)

    def count_alone() -> bool:
        """A router notices with its next request, and Redis may have died after all of those above."""
        further = visitor.runs("knock", routers=routers, model=MODEL, key=tenants.keys["steady"], requests=len(routers))
        assert {status for _, status, _ in further} == {200}
        metrics = [served.managed(router, "metrics") for router in served.addresses(ROUTER)]
        return all("lockstep_router_limits_fallback 1.0" in each for each in metrics)

    wait_for(count_alone, "both routers count by themselves", _WITHOUT_REDIS_S, every_s=1.0)
    time.sleep(until_room_s(_BURST_S))
    alone = visitor.runs("knock", routers=routers, model=MODEL, key=tenants.keys["limited"], requests=AT_ONCE)
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
