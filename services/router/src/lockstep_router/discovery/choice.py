"""Which discovery the settings ask for."""

from typing import assert_never

from lockstep_router.discovery.dns import Dns
from lockstep_router.discovery.found import Discovery
from lockstep_router.discovery.static import StaticList
from lockstep_router.settings import RouterSettings


def choose_discovery(settings: RouterSettings) -> Discovery:
    """The discovery of the setting `discovery`."""
    dns = Dns(settings.workers_dns, settings.dns_interval_s) if settings.workers_dns else None
    match settings.discovery:
        case "static":
            return StaticList(settings.workers)
        case "dns":
            assert dns is not None
            return dns
        case "kubernetes":
            # The Kubernetes client takes 0.3 s and some 45 MiB: only who asks for it pays.
            from lockstep_router.discovery.endpoint_slices import EndpointSlices  # noqa: PLC0415

            return EndpointSlices(settings.namespace, settings.kubernetes_selector, fallback=dns)
        case _:
            assert_never(settings.discovery)
