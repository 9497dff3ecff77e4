"""Worker addresses from the setting `workers`."""

import asyncio
from collections.abc import Iterable

from lockstep_router.discovery.report import Report, WorkerAddress


class StaticList:
    """A set of workers that never changes."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._workers = frozenset(WorkerAddress(target) for target in targets)

    async def run(self, report: Report) -> None:
        """Report the set once."""
        report.set_static(self._workers)
        await asyncio.Event().wait()
