"""The workers of a list."""

import asyncio
from collections.abc import Iterable

from lockstep_router.discovery.found import Found
from lockstep_router.discovery.report import Report


class StaticList:
    """Workers that never change."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._workers = frozenset(Found(target) for target in targets)

    async def run(self, report: Report) -> None:
        """Report them."""
        report.settle(self._workers)
        await asyncio.Event().wait()
