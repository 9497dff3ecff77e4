"""Requests whose grammars are being compiled. Each is queued when that is done; others go on meanwhile."""

import asyncio
import time
from collections.abc import Callable

from lockstep_common.errors import invalid

from lockstep_engine.constraint import Constraint
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.request import Grammar, Request


class Compilations:
    """The requests of one engine that wait for their grammars.

    Args:
        compiler: compiles them.
        on_compiled: called with a request's id, and with when its grammar began and ended to be compiled (monotonic
            ns).
        enqueue: called next, with a request, its time of arrival and its place in its grammar.
        fail: called with a request and an error if its grammar cannot be compiled, or if one of these calls fails.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        on_compiled: Callable[[str, int, int], None],
        enqueue: Callable[[Request, float, Constraint], None],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        self._compiler = compiler
        self._on_compiled = on_compiled
        self._enqueue = enqueue
        self._fail = fail
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def request_ids(self) -> list[str]:
        """The requests that wait."""
        return list(self._tasks)

    def begin(self, request: Request, grammar: Grammar, arrived_at: float) -> None:
        """Compile a request's grammar.

        Raises:
            LockstepError: INVALID_REQUEST or OVERLOADED.
        """
        self._compiler.check(grammar)
        if request.id in self._tasks:
            raise invalid("id", f"{request.id} is in use")
        work = self._compile(request, arrived_at, time.monotonic_ns())
        self._tasks[request.id] = asyncio.get_running_loop().create_task(work)

    def cancel(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def clear(self) -> None:
        """Forget all."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _compile(self, request: Request, arrived_at: float, began_ns: int) -> None:
        try:
            constraint = await self._compiler.compile(request)
            self._on_compiled(request.id, began_ns, time.monotonic_ns())
            del self._tasks[request.id]
            self._enqueue(request, arrived_at, constraint)
        except Exception as error:
            self._tasks.pop(request.id, None)
            self._fail(request, error)
