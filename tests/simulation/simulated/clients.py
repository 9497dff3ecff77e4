"""Clients: they run requests through a router without any transport, and write down what they see."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from random import Random
from typing import TYPE_CHECKING

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import LockstepError
from lockstep_router.generation.choices import Delta
from lockstep_router.generation.generation import Generation
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.request import Caller, GenerationRequest, TextPrompt, TokenPrompt
from lockstep_router.generation.sampling import derive_seed
from lockstep_router.router import Router
from lockstep_router.tenants.tenant import Tenant

from simulated import model
from simulated.history import TERMINAL, Event, History, Kind
from simulated.kernel import Kernel
from simulated.plan import Request

if TYPE_CHECKING:
    from simulated.processes import RouterProcess

TENANT = Tenant("simulated")


def open_histories(request: Request, name: str, now: float) -> list[History]:
    """One history for each choice of a request that arrives now."""
    histories = []
    for choice in range(request.choices):
        sampling = inference_pb2.Sampling(
            seed=derive_seed(request.seed, choice), max_tokens=request.max_tokens, stop_token_ids=request.stop_ids
        )
        histories.append(
            History(
                name=f"{name}.{choice}",
                expected=model.expected(request.prompt_ids, sampling, request.stops),
                arrived_at=now,
                timeout_s=request.timeout_s,
                has_stops=bool(request.stops),
                is_poison=request.is_poison,
            )
        )
    return histories


class Client:
    """Runs one request on one router.

    Args:
        kernel: the clock.
        request: the request.
        histories: of its streams; the client appends what it sees.
        on_prepared: called with the prepared request before it runs.
        on_end: called once, when all its streams have ended.
    """

    def __init__(
        self,
        kernel: Kernel,
        request: Request,
        histories: list[History],
        on_prepared: Callable[["Client", Prepared], None],
        on_end: Callable[[], None],
    ) -> None:
        self.request = request
        self.histories = histories
        self.is_done = False
        """Whether all its streams have ended."""
        self.process: RouterProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self._on_end = on_end
        self._kernel = kernel
        self._on_prepared = on_prepared
        self._rng = Random(f"{request.name}/{request.seed}")

    async def converse(self, router: Router) -> None:
        for history in self.histories:
            history.arrived_at = self._kernel.now
        try:
            await self._run(router)
        except LockstepError as error:
            self._end(Kind.ERROR, str(error.code))
        except asyncio.CancelledError:
            self._end(Kind.LEFT)
        except Exception as error:
            self._end(Kind.ERROR, repr(error))

    def leave(self) -> None:
        """The client is gone, if it has not got an end before."""
        self._end(Kind.LEFT)

    def explain(self, code: str) -> None:
        """Note an error that is explained by what happens to its router."""
        for history in self.histories:
            history.explained.add(code)

    def lose_connection(self) -> None:
        """The router has died."""
        self._end(Kind.BROKEN)

    async def _run(self, router: Router) -> None:
        account = router.limits.account(TENANT)
        with router.admitted(account):
            prepared = await router.prepare(self._generation_request(), account)
            self._on_prepared(self, prepared)
            async with router.run(prepared, account) as generation:
                await self._read(generation)

    async def _read(self, generation: Generation) -> None:
        async with aclosing(generation.deltas()) as deltas:  # type: ignore[type-var]
            async for several in deltas:
                for delta in several:
                    self._note(delta)
                wanted = self.request.leaves_after_tokens
                if wanted is not None and several[-1].tokens >= wanted and not self.is_done:
                    self._end(Kind.LEFT)
                    return
                await self._pause()
        if len(self.histories) == 1:
            self.histories[0].usage = generation.usage.completion_tokens

    async def _pause(self) -> None:
        if self.request.pause_s and self._rng.random() < 0.2:
            for history in self.histories:
                history.paused_s += self.request.pause_s
            await asyncio.sleep(self.request.pause_s)

    def _note(self, delta: Delta) -> None:
        history = self.histories[delta.index]
        if delta.text:
            self._add(history, Event(self._kernel.now, Kind.TEXT, delta.text, delta.tokens))
        if delta.finish_reason is not None:
            self._add(history, Event(self._kernel.now, Kind.FINISH, delta.finish_reason))

    def _end(self, kind: Kind, value: str = "") -> None:
        for history in self.histories:
            if not any(event.kind in TERMINAL for event in history.events):
                self._add(history, Event(self._kernel.now, kind, value))

    def _add(self, history: History, event: Event) -> None:
        history.events.append(event)
        self._kernel.trace("client", history.name, event.kind, event.value, event.tokens)
        if event.kind in TERMINAL and not self.is_done and all(each.ended_at is not None for each in self.histories):
            self.is_done = True
            self._on_end()

    def _generation_request(self) -> GenerationRequest:
        request = self.request
        ids = list(request.prompt_ids)
        prompt = TextPrompt("".join(map(model.text_of, ids))) if request.is_text else TokenPrompt(ids)
        return GenerationRequest(
            model=model.MODEL,
            caller=Caller(request.session, timeout_s=request.timeout_s),
            prompts=(prompt,),
            sampling=inference_pb2.Sampling(stop_token_ids=request.stop_ids),
            max_tokens=request.max_tokens,
            seed=request.seed,
            choices_per_prompt=request.choices,
            stops=request.stops,
        )
