"""Spreads a release over nodes again. After a drain it may be on one node: evicted pods do not return by themselves."""

from lockstep_tools.chaos.release import ROUTER, WORKER, Release, of
from lockstep_tools.failure import CommandError

_WAIT_S = 180.0


def place_on_two_nodes(release: Release) -> None:
    """Make sure that neither all workers nor all routers are on one node.

    A pod that has to move is deleted, with grace: the scheduler prefers the emptier node.

    Raises:
        CommandError: it cannot be done.
    """
    for component in (WORKER, ROUTER):
        pods = of(release.pods(), component)
        nodes = {pod.node for pod in pods}
        if len(nodes) > 1:
            continue
        if len(pods) < 2:
            raise CommandError(f"one {component} alone cannot be on two nodes")
        release.kubectl.run("delete", "pod", pods[-1].name, "--wait=true", timeout_s=_WAIT_S)
        release.await_settled()
        if len({pod.node for pod in of(release.pods(), component)}) == 1:
            raise CommandError(f"every {component} is on {pods[0].node}, and none moved when one was deleted")
