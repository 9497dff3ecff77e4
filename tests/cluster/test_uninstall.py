"""`helm uninstall`: the last file of a run, since it ends the second release."""

from helm import NAME, Installation, helm
from kube import resources
from machine import wait_for


def test_uninstall_leaves_nothing(open_served: Installation) -> None:
    """Objects that every namespace has are ignored."""
    assert resources(open_served.kubectl)
    helm("uninstall", NAME, "-n", open_served.namespace)
    wait_for(lambda: not resources(open_served.kubectl), "nothing is left", 120.0, every_s=2.0)
