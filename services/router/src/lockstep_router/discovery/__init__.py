"""Finds the workers. There are three sources behind one interface: a static list, DNS names, and EndpointSlices.

The rest of the router sees sets of `WorkerAddress` and does not know the source.
"""

from typing import assert_never

from lockstep_router.discovery.dns import Dns
from lockstep_router.discovery.report import Discovery, Report, WorkerAddress
from lockstep_router.discovery.static import StaticList
from lockstep_router.settings import RouterSettings

__all__ = ["Discovery", "Report", "WorkerAddress", "choose_discovery"]


def choose_discovery(settings: RouterSettings) -> Discovery:
    """The discovery that the setting `discovery` names."""
    dns = Dns(settings.workers_dns, settings.dns_interval_s) if settings.workers_dns else None
    match settings.discovery:
        case "static":
            return StaticList(settings.workers)
        case "dns":
            assert dns is not None
            return dns
        case "kubernetes":
            # Importing the Kubernetes client takes 0.3 s and some 45 MiB, so only this discovery does it.
            from lockstep_router.discovery.endpoint_slices import EndpointSlices  # noqa: PLC0415

            return EndpointSlices(settings.namespace, settings.kubernetes_selector, fallback=dns)
        case _:
            assert_never(settings.discovery)
