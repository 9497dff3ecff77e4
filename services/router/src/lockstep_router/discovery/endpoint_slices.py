"""Worker addresses from Kubernetes: the EndpointSlices with a label are listed and then watched.

Endpoints that are not ready or terminating are included, because each worker reports its own state. An endpoint
carries its pod's name, which must be the worker's id: addresses are reused by other pods.
"""

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kubernetes.aio.client import DiscoveryV1Api
from lockstep_common import kubernetes_api
from lockstep_common.address import join_host_port
from lockstep_common.kubernetes_api import KubernetesError

from lockstep_router.discovery.dns import Dns
from lockstep_router.discovery.report import Report, WorkerAddress

logger = logging.getLogger("lockstep.router")

PORT_NAME = "grpc"
"""Name of the Service's port for gRPC. A slice with a single port needs no name."""

_WATCH_MARGIN_S = 5.0
_MAX_ALTERNATES = 3
_GONE = 410
_DEFECT = "an answer could not be understood"


class EndpointSlices:
    """Follows the EndpointSlices of one namespace.

    Args:
        namespace: the namespace of the EndpointSlices.
        selector: the label selector of the EndpointSlices.
        resync_s: longest duration of a watch; then everything is listed again, which repairs missed events.
        deadline_s: time limit for the answer to a list.
        backoff_initial_s, backoff_max_s: pause after a failure; it doubles, with 50 % jitter.
        fallback: used until the API server has answered once.
    """

    def __init__(
        self,
        namespace: str,
        selector: str,
        *,
        resync_s: int = 30,
        deadline_s: float = 10.0,
        backoff_initial_s: float = 0.2,
        backoff_max_s: float = 10.0,
        fallback: Dns | None = None,
    ) -> None:
        self._namespace = namespace
        self._selector = selector
        self._resync_s = resync_s
        self._deadline_s = deadline_s
        self._backoff_initial_s = backoff_initial_s
        self._backoff_max_s = backoff_max_s
        self._fallback = fallback
        self._connection = kubernetes_api.ApiConnection()

    async def run(self, report: Report) -> None:
        """List and watch until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = self._backoff_initial_s
        try:
            while True:
                began_at = loop.time()
                succeeded = await self._turn(report)
                lasted_s = loop.time() - began_at
                if lasted_s > self._backoff_max_s or (succeeded and lasted_s > pause_s):
                    pause_s = self._backoff_initial_s
                    if succeeded:
                        continue
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._backoff_max_s)
        finally:
            await self._connection.close()

    async def _turn(self, report: Report) -> bool:
        """One list and one watch; returns whether both succeeded."""
        try:
            slices, version = await self._list()
            report.update(workers_of(slices.values()))
            self._fallback = None
            return await self._watch(slices, version, report)
        except KubernetesError as error:
            await self._note(str(error), report)
        except Exception:
            if report.problem != _DEFECT:
                logger.exception("discovery failed")
            await self._note(_DEFECT, report)
        return False

    async def _list(self) -> tuple[dict[str, dict[str, Any]], str]:
        """All slices by name, and the version of the collection."""
        client = await self._connection.client()
        call = DiscoveryV1Api(client).list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=self._selector, _request_timeout=self._deadline_s
        )
        listed = await kubernetes_api.answer(call, self._deadline_s)
        slices = {each["metadata"]["name"]: each for each in listed.get("items") or ()}
        return slices, listed["metadata"]["resourceVersion"]

    async def _watch(self, slices: dict[str, dict[str, Any]], version: str, report: Report) -> bool:
        """Follow the changes since a version; returns whether the watch ended normally.

        A broken watch does not count as a failure of the discovery. If the API server fails, the next list fails too.
        """
        deadline_s = self._resync_s + _WATCH_MARGIN_S
        call = DiscoveryV1Api(await self._connection.client()).list_namespaced_endpoint_slice_without_preload_content(
            self._namespace,
            label_selector=self._selector,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=self._resync_s,
            _request_timeout=deadline_s,
        )
        is_open = False
        try:
            async for event in kubernetes_api.events(call, deadline_s):
                is_open = True
                report.succeed()
                _apply(event, slices)
                report.update(workers_of(slices.values()))
        except KubernetesError as error:
            if not is_open and error.status != _GONE:
                raise
            logger.debug("watch broken", extra={"problem": str(error)})
            return False
        return True

    async def _note(self, problem: str, report: Report) -> None:
        report.fail(problem)
        # Certificates or tokens may be out of date: the next connection reads them again.
        await self._connection.close()
        if self._fallback is not None:
            workers, _ = await self._fallback.resolve()
            if workers:
                report.update_partially(workers)


def _apply(event: dict[str, Any], slices: dict[str, dict[str, Any]]) -> None:
    match event.get("type"):
        case "ADDED" | "MODIFIED":
            slices[event["object"]["metadata"]["name"]] = event["object"]
        case "DELETED":
            slices.pop(event["object"]["metadata"]["name"], None)


def workers_of(slices: Iterable[dict[str, Any]]) -> frozenset[WorkerAddress]:
    """The workers in EndpointSlices (discovery.k8s.io/v1, as JSON).

    A pod of a dual-stack Service is in one slice of each address family. The first address is the target, IPv4 before
    IPv6, and the others are alternates.
    """
    by_pod: dict[str, WorkerAddress] = {}
    for each in sorted(slices, key=lambda each: str(each.get("addressType"))):
        port = _port(each)
        for endpoint in each.get("endpoints") or () if port else ():
            # All addresses of an endpoint belong to the same pod; the API asks consumers to use the first.
            target = join_host_port(endpoint["addresses"][0], port)
            reference = endpoint.get("targetRef") or {}
            name = reference.get("name") if reference.get("kind") == "Pod" else None
            key = reference.get("uid") or target
            first = by_pod.setdefault(key, WorkerAddress(target, name))
            if target not in (first.target, *first.alternates):
                by_pod[key] = replace(first, alternates=(*first.alternates, target)[:_MAX_ALTERNATES])
    return frozenset(by_pod.values())


def _port(endpoint_slice: dict[str, Any]) -> int | None:
    ports = endpoint_slice.get("ports") or ()
    named = [port for port in ports if port.get("name") == PORT_NAME] or (ports if len(ports) == 1 else ())
    return next((port["port"] for port in named if port.get("port")), None)
