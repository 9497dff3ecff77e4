"""Posting Events beside everything else: started with the worker, ended after it, waited for by nobody."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from importlib import import_module

from lockstep_worker.chronicle import Notice
from lockstep_worker.notice_queue import NoticeQueue
from lockstep_worker.settings import WorkerSettings

logger = logging.getLogger("lockstep.worker")

_FLUSH_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def posting(settings: WorkerSettings) -> AsyncIterator[Callable[[Notice], None]]:
    """Give what takes notices to be posted as Events of the pod that the settings name.

    On leaving, what waits has a few seconds to be posted.
    """
    queue = NoticeQueue()
    task = asyncio.create_task(_post(settings, queue))
    try:
        yield queue.put
    finally:
        queue.close()
        await asyncio.wait({task}, timeout=_FLUSH_TIMEOUT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _post(settings: WorkerSettings, queue: NoticeQueue) -> None:
    try:
        # On a thread: the Kubernetes client takes 0.3 s to load, and probes are to be answered meanwhile.
        pod_events = await asyncio.to_thread(import_module, "lockstep_worker.pod_events")
        await pod_events.PodEvents(settings.pod_name, settings.pod_namespace, settings.pod_uid).run(queue)
    except Exception:
        logger.exception("no more Events will be posted")
