"""Which connections are allowed. The same attempts on a release without policies show that these tests can fail."""

import pytest
from helm import Installation
from kube import Insider, Namespaces, Visitor
from lockstep_tools.chaos.release import ROUTER, WORKER, of

HTTP, GRPC = 8000, 9000
MANAGEMENT = {ROUTER: 8001, WORKER: 9001}


@pytest.fixture(scope="module")
def image(served: Installation) -> str:
    """An image that has Python and is on every node."""
    pod = of(served.release.pods(), ROUTER)[0]
    return str(served.kubectl.json("get", "pod", pod.name)["spec"]["containers"][0]["image"])


@pytest.fixture(scope="module")
def foreigner(namespaces: Namespaces, image: str) -> Visitor:
    """A pod in another namespace."""
    return Visitor(namespaces.new("foreign"), image)


@pytest.fixture(scope="module")
def neighbour(served: Installation, image: str) -> Visitor:
    """A pod in the release's namespace that is not part of the release."""
    return Visitor(served.kubectl, image)


def targets(installation: Installation, component: str, *ports: int) -> list[tuple[str, int]]:
    pods = of(installation.release.pods(), component)
    found = [installation.kubectl.json("get", "pod", pod.name)["status"]["podIP"] for pod in pods]
    return [(address, port) for address in found for port in ports]


@pytest.mark.parametrize("visitor", ["foreigner", "neighbour"])
def test_pods_without_the_labels_reach_the_routers_and_nothing_else(
    served: Installation, visitor: str, request: pytest.FixtureRequest
) -> None:
    allowed = targets(served, ROUTER, HTTP)
    closed = targets(served, WORKER, GRPC, MANAGEMENT[WORKER]) + targets(served, ROUTER, MANAGEMENT[ROUTER])
    reached = request.getfixturevalue(visitor).reaches(*allowed, *closed)
    assert {target for target, taken in reached.items() if taken} == set(allowed)


def test_without_policies_the_same_ports_are_open(open_served: Installation, foreigner: Visitor) -> None:
    ports = targets(open_served, WORKER, GRPC, MANAGEMENT[WORKER])
    ports += targets(open_served, ROUTER, HTTP, MANAGEMENT[ROUTER])
    assert all(foreigner.reaches(*ports).values())


def test_workers_and_routers_reach_only_each_other(served: Installation, open_served: Installation) -> None:
    """Inside the release: a router reaches workers, a worker nothing, and neither reaches another release."""
    router, worker = of(served.release.pods(), ROUTER)[0], of(served.release.pods(), WORKER)[0]
    others = targets(open_served, WORKER, GRPC) + targets(open_served, ROUTER, HTTP)
    ours = targets(served, WORKER, GRPC)
    inside = Insider(served.kubectl, router.name, "router")
    reached = inside.reaches(*ours, *others)
    assert {target for target, taken in reached.items() if taken} == set(ours)
    reached = Insider(served.kubectl, worker.name, "worker").reaches(*targets(served, ROUTER, HTTP), *others)
    assert not any(reached.values())
