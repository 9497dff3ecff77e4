"""The doors of the routers through their Service, and streams whose router dies."""

import json
import re

import pytest
from answers import check_open
from helm import NAME, Installation
from kube import Namespaces, Report, Visitor, image_of
from lockstep_tools.chaos.release import ROUTER, of
from machine import wait_for

HTTP, GRPC = 8000, 8002
MODEL, PROMPT = "reference", "Once upon a time"
STREAMS, TOKENS = 8, 1600
_SURVIVED_S = 400.0
_TRIES = 3


@pytest.fixture(scope="module")
def image(served: Installation) -> str:
    return image_of(served.kubectl, of(served.release.pods(), ROUTER)[0].name)


def test_every_door_gives_the_same_answer(served: Installation, namespaces: Namespaces, image: str) -> None:
    """From another namespace, by the Service's name; gRPC by reflection alone."""
    visitor = Visitor(namespaces.new("doors"), image)
    host = f"{NAME}-router.{served.namespace}.svc"
    said = visitor.runs("doors", host=host, http=HTTP, grpc=GRPC, model=MODEL, prompt=PROMPT)
    check_open(said, MODEL, PROMPT)


@pytest.mark.exhaustive
def test_streams_of_the_client_survive_a_killed_router(
    served: Installation, namespaces: Namespaces, image: str, report: Report
) -> None:
    """The client knows both routers. The killed one's streams come whole, with the text that they have undisturbed."""
    visitor = Visitor(namespaces.new("survivors"), re.sub(r"/router([:@])", r"/tools\1", image))
    moved = 0
    for _ in range(_TRIES):
        moved = moved or _moved_streams(served, visitor, report)
        wait_for(served.release.is_settled, "another router has taken its place", 120.0, every_s=1.0)
    assert moved > 0, "each time the router died after its last stream: nothing was tested"


def _moved_streams(served: Installation, visitor: Visitor, report: Report) -> int:
    """Kill one of the routers under streams; how many of its streams the other one has answered."""
    routers = served.addresses(ROUTER)
    urls = [f"http://{address}:{HTTP}/v1" for address in routers.values()]
    running = visitor.starts("survive", routers=urls, model=MODEL, streams=STREAMS, tokens=TOKENS)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "streaming\n"
        streams = {name: served.status(name)["router"]["streams"] for name in routers}
        victim = max(streams, key=lambda name: streams[name])
        (survivor,) = routers.keys() - {victim}
        before = completed(served, survivor)
        served.kubectl.run("delete", "pod", victim, "--force", "--grace-period=0")
        output, _ = running.communicate(timeout=_SURVIVED_S)
    finally:
        running.kill()
    result = json.loads(output.splitlines()[-1])
    moved = completed(served, survivor) - before - streams[survivor]
    report["client_survives_router"] = {**result, "streams_of_victim": streams[victim], "moved": moved}
    assert result["different"] == []
    return moved


def completed(installation: Installation, router: str) -> int:
    """The completions that a router has answered to their end."""
    found = re.findall(
        r"^lockstep_router_requests_total\{(.*)\} (.*)$", installation.managed(router, "metrics"), re.MULTILINE
    )
    whole = [count for labels, count in found if 'endpoint="/v1/completions"' in labels and 'code="200"' in labels]
    return int(sum(map(float, whole)))
