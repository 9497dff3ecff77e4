"""Puts a release back on several nodes. A drain leaves it crowded: what was evicted does not return by itself."""

import time

from lockstep_tools.chaos.release import ROUTER, WORKER, Release, of
from lockstep_tools.failure import CommandError

_WAIT_S = 180.0
_POLL_S = 1.0


def spread_out(release: Release) -> None:
    """See to it that neither all workers nor all routers are on one node.

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
        _await_whole(release)
        if len({pod.node for pod in of(release.pods(), component)}) == 1:
            raise CommandError(f"every {component} is on {pods[0].node}, and none would leave it")


def _await_whole(release: Release) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not release.is_whole():
        if time.monotonic() > deadline_s:
            raise CommandError("the release has not become whole again")
        time.sleep(_POLL_S)
