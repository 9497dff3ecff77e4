"""A release with a state server: what reaches it and its Redis, and streams that another router continues.

LOCKSTEP_REDIS_IMAGE names an image with redis-server; without it the release has the memory backend alone.
"""

import json
import re
from collections.abc import Iterator

import pytest
import state_release
from helm import NAME, SMALL_QUEUES, Installation, helm, install
from kube import Insider, Namespaces, Report, Visitor, declared_ports, image_of
from lockstep_tools.chaos.release import REDIS, ROUTER, STATE, WORKER, of
from machine import wait_for
from slow_workers import slow_workers

HTTP, GRPC, MANAGEMENT, REDIS_PORT = 8000, 9100, 9101, 6379
MODEL = "reference"
STREAMS, TOKENS = 8, 400
"""Their tokens take 16 s at least, far more than killing a router."""
_SURVIVED_S = 400.0
_TRIES = 3
_WAIT_S = 120.0

on_redis = pytest.param(
    "redis", marks=pytest.mark.skipif(not state_release.IMAGE, reason="LOCKSTEP_REDIS_IMAGE not set")
)


@pytest.fixture(scope="module", params=[pytest.param("memory", marks=pytest.mark.exhaustive), on_redis])
def stateful(
    request: pytest.FixtureRequest, namespaces: Namespaces, registry: str, report: Report
) -> Iterator[Installation]:
    """Two routers, two workers, and one state server in memory or two on the bundled Redis."""
    values = state_release.in_memory() if request.param == "memory" else state_release.on_redis(registry)
    kubectl = namespaces.new(f"state-{request.param}")
    values |= {"modelDefaults": SMALL_QUEUES["modelDefaults"] | slow_workers(kubectl)}
    with install(kubectl, registry, values) as installation:
        report[f"state_{request.param}_install_to_ready_s"] = installation.ready_s
        yield installation


@pytest.fixture
def image(stateful: Installation) -> str:
    return image_of(stateful.kubectl, of(stateful.release.pods(), ROUTER)[0].name)


def test_helm_test_is_green(stateful: Installation) -> None:
    output = helm("test", NAME, "-n", stateful.namespace, "--logs")
    assert "ok   stream" in output, output


def test_streams_of_a_killed_router_are_continued_by_the_other(
    stateful: Installation, namespaces: Namespaces, image: str, report: Report
) -> None:
    """Nothing is lost, doubled or changed; and the other router took the streams over, it did not begin them again."""
    visitor = Visitor(namespaces.new(f"heirs-{stateful.namespace[-6:]}"), re.sub(r"/router([:@])", r"/tools\1", image))
    moved = 0.0
    for _ in range(_TRIES):
        moved = moved or _moved_streams(stateful, visitor, report)
        wait_for(stateful.release.is_settled, "another router has taken its place", _WAIT_S, every_s=1.0)
    assert moved > 0, "no stream was taken over: clients began them again, or each time the router died after its last"


def _moved_streams(stateful: Installation, visitor: Visitor, report: Report) -> float:
    """Kill one of the routers under streams; how many of them the other one has taken over."""
    routers = stateful.addresses(ROUTER)
    urls = [f"http://{address}:{HTTP}/v1" for address in routers.values()]
    taken = takes(stateful)
    running = visitor.starts("survive", routers=urls, model=MODEL, streams=STREAMS, tokens=TOKENS)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "streaming\n"
        streams = {name: stateful.status(name)["router"]["streams"] for name in routers}
        victim = max(streams, key=lambda name: streams[name])
        stateful.kubectl.run("delete", "pod", victim, "--force", "--grace-period=0")
        output, _ = running.communicate(timeout=_SURVIVED_S)
    finally:
        running.kill()
    result = json.loads(output.splitlines()[-1])
    moved = takes(stateful) - taken
    report[f"streams_continued_{stateful.namespace}"] = {**result, "streams_of_victim": streams[victim], "taken": moved}
    assert result["different"] == []
    assert result["streams"] == STREAMS
    return moved


def takes(installation: Installation) -> float:
    """How many calls have taken a stream over."""
    return state_release.metric(installation, "lockstep_state_calls_total", {"method": "Journal.Take", "code": "OK"})


def test_every_stream_is_mirrored(stateful: Installation) -> None:
    """The release's own traffic so far has left writes, and nothing that the store had to refuse or give up."""
    assert state_release.metric(stateful, "lockstep_state_writes_total", {"outcome": "OK"}) > 0
    assert state_release.metric(stateful, "lockstep_state_damaged_values_total") == 0
    assert state_release.metric(stateful, "lockstep_state_breaker_open") == 0


def test_routers_reach_the_state_server_and_it_alone_its_redis(
    stateful: Installation, namespaces: Namespaces, image: str
) -> None:
    kubectl = stateful.kubectl
    pods = {component: of(stateful.release.pods(), component) for component in (ROUTER, WORKER, STATE, REDIS)}
    address = {
        pod.name: kubectl.json("get", "pod", pod.name)["status"]["podIP"] for each in pods.values() for pod in each
    }
    servers = [(address[pod.name], GRPC) for pod in pods[STATE]]
    managements = [(address[pod.name], MANAGEMENT) for pod in pods[STATE]]
    stores = [(address[pod.name], REDIS_PORT) for pod in pods[REDIS]]
    stranger = Visitor(namespaces.new(f"stranger-{stateful.namespace[-6:]}"), image)
    declared = [
        (address[pod.name], port)
        for component in (WORKER, STATE, REDIS)
        for pod in pods[component]
        for port in declared_ports(kubectl, pod.name)
    ]
    assert {*servers, *managements, *stores} <= set(declared)
    assert not any(stranger.reaches(*declared).values())
    for component, container, reachable in ((ROUTER, "router", servers), (WORKER, "worker", [])):
        reached = Insider(kubectl, pods[component][0].name, container).reaches(*servers, *managements, *stores)
        assert {target for target, taken in reached.items() if taken} == set(reachable), component
    reached = Insider(kubectl, pods[STATE][0].name, "state").reaches(*stores, (address[pods[ROUTER][0].name], HTTP))
    assert {target for target, taken in reached.items() if taken} == set(stores)


def test_its_pods_are_restricted_and_have_no_token(stateful: Installation) -> None:
    for component in (STATE, REDIS):
        for pod in of(stateful.release.pods(), component):
            spec = stateful.kubectl.json("get", "pod", pod.name)["spec"]
            assert not any("projected" in volume for volume in spec["volumes"]), "no token of the API server"
            for container in spec["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_an_upgrade_keeps_the_password_of_the_bundled_redis(stateful: Installation) -> None:
    if not of(stateful.release.pods(), REDIS):
        pytest.skip("the memory backend has no Redis")
    before = {pod.name for pod in of(stateful.release.pods(), REDIS)}
    stateful.upgrade({"commonAnnotations": {}})
    assert {pod.name for pod in of(stateful.release.pods(), REDIS)} == before
