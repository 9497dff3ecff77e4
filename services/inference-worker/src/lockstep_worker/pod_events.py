"""Posts notices as Events of the worker's own pod, for `kubectl describe pod`.

This module imports the Kubernetes client, so it is imported only if Events are enabled. Nothing waits for it: a notice
that the API server does not accept in time is counted and dropped.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import CoreV1Api, CoreV1Event
from lockstep_common import kubernetes_api
from lockstep_common.kubernetes_api import KubernetesError

from lockstep_worker import metrics
from lockstep_worker.notices import Notice, NoticeQueue

logger = logging.getLogger("lockstep.worker")

COMPONENT = "lockstep-worker"
CONTAINER = "worker"
_MAX_MESSAGE_CHARS = 1024  # the API's own limit
_MAX_KINDS = 64
_PAUSES_S = (0.5, 2.0)
_NOT_FOUND = 404


class PodEvents:
    """Posts notices one after the other. A notice with the key of an earlier one raises the count of its Event."""

    def __init__(self, pod: str, namespace: str, uid: str, *, deadline_s: float = 5.0) -> None:
        self._pod = pod
        self._namespace = namespace
        self._uid = uid
        self._deadline_s = deadline_s
        self._connection = kubernetes_api.ApiConnection()
        self._posted: dict[str, tuple[str, int]] = {}
        """Name and count of the Event for each notice key, the most recently posted last."""
        self._failing = False

    async def run(self, queue: NoticeQueue) -> None:
        """Post notices until the queue is closed and empty."""
        try:
            async for notice in queue.notices():
                await self._post_with_retries(notice)
        finally:
            await self._connection.close()

    async def _post_with_retries(self, notice: Notice) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                await self._post(notice)
            except KubernetesError as error:
                self._note_failure(str(error))
            else:
                metrics.EVENTS.labels("posted").inc()
                self._failing = False
                return
            await self._connection.close()
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        metrics.EVENTS.labels("failed").inc()

    def _note_failure(self, problem: str) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("Events of the pod cannot be posted", extra={"problem": problem})

    async def _post(self, notice: Notice) -> None:
        api = CoreV1Api(await self._connection.client())
        name, count = self._posted.get(notice.key, ("", 0))
        if name:
            try:
                await self._raise_count(api, name, count + 1, notice)
            except KubernetesError as error:
                if error.status != _NOT_FOUND:
                    raise
                name = ""  # the API server deletes Events after about an hour
        if not name:
            count = 0
            name = await self._create(api, notice)
        self._posted.pop(notice.key, None)
        self._posted[notice.key] = (name, count + 1)
        if len(self._posted) > _MAX_KINDS:
            del self._posted[next(iter(self._posted))]

    async def _create(self, api: CoreV1Api, notice: Notice) -> str:
        name = f"{self._pod}.{time.time_ns():x}"
        now = _now()
        event = CoreV1Event.from_dict(
            {
                "metadata": {"name": name, "namespace": self._namespace},
                "involvedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": self._namespace,
                    "name": self._pod,
                    "uid": self._uid,
                    "fieldPath": f"spec.containers{{{CONTAINER}}}",
                },
                "type": "Warning" if notice.is_warning else "Normal",
                "reason": notice.reason,
                "message": notice.message[:_MAX_MESSAGE_CHARS],
                "source": {"component": COMPONENT},
                "reportingComponent": COMPONENT,
                "reportingInstance": self._pod,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )
        assert event is not None
        call = api.create_namespaced_event_without_preload_content(
            self._namespace, event, _request_timeout=self._deadline_s
        )
        await kubernetes_api.answer(call, self._deadline_s)
        return name

    async def _raise_count(self, api: CoreV1Api, name: str, count: int, notice: Notice) -> None:
        change: dict[str, Any] = {
            "count": count,
            "lastTimestamp": _now(),
            "message": notice.message[:_MAX_MESSAGE_CHARS],
        }
        call = api.patch_namespaced_event_without_preload_content(
            name,
            self._namespace,
            change,
            _content_type="application/merge-patch+json",
            _request_timeout=self._deadline_s,
        )
        await kubernetes_api.answer(call, self._deadline_s)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
