"""Which connections are allowed. The same attempts on a release without policies show that these tests can fail."""

import pytest
from helm import Installation
from kube import Insider, Namespaces, Visitor, declared_ports
from lockstep_tools.chaos.release import ROUTER, WORKER, of

HTTP, CLIENTS_GRPC, GRPC = 8000, 8002, 9000
CONTAINERS = {ROUTER: "router", WORKER: "worker"}


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
    return [(address, port) for address in installation.addresses(component).values() for port in ports]


def listening(installation: Installation, component: str) -> set[int]:
    """The ports at which pods of a component listen, as their kernels report."""
    pods = of(installation.release.pods(), component)
    inside = [Insider(installation.kubectl, pod.name, CONTAINERS[component]) for pod in pods]
    return {port for each in inside for port in each.runs("listening")}


def declared(installation: Installation, component: str) -> set[int]:
    pods = of(installation.release.pods(), component)
    return {port for pod in pods for port in declared_ports(installation.kubectl, pod.name)}


@pytest.mark.parametrize("component", [ROUTER, WORKER])
def test_pods_listen_at_the_ports_that_they_declare_and_at_no_other(served: Installation, component: str) -> None:
    """The ranks of a worker find each other on loopback. So the tests below, which try these ports, try all."""
    assert listening(served, component) == declared(served, component) != set()


@pytest.mark.parametrize("visitor", ["foreigner", "neighbour"])
def test_pods_without_the_labels_reach_the_routers_and_nothing_else(
    served: Installation, visitor: str, request: pytest.FixtureRequest
) -> None:
    allowed = targets(served, ROUTER, HTTP, CLIENTS_GRPC)
    every = [target for component in CONTAINERS for target in targets(served, component, *declared(served, component))]
    reached = request.getfixturevalue(visitor).reaches(*every)
    assert {target for target, taken in reached.items() if taken} == set(allowed)
    assert len(every) > len(allowed)


def test_without_policies_all_these_ports_are_open(open_served: Installation, foreigner: Visitor) -> None:
    for component in CONTAINERS:
        ports = targets(open_served, component, *declared(open_served, component))
        assert ports
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
