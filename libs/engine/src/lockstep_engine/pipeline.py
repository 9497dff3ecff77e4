"""The steps of an engine that are in flight: makes plans and sends them, as many as allowed, and measures the steps."""

import time
from collections.abc import Callable

from lockstep_engine.config import EngineConfig
from lockstep_engine.constraint import MaskThreads
from lockstep_engine.engine_status import EngineState
from lockstep_engine.group_lifecycle import GroupLifecycle
from lockstep_engine.mailbox import MAX_IN_FLIGHT
from lockstep_engine.plan import Plan, Result
from lockstep_engine.prompt_pace import PromptPace
from lockstep_engine.request import Output
from lockstep_engine.scheduler import Scheduler
from lockstep_engine.step_timing import StepTiming

_MASK_WAIT_S = 0.0005
"""Longest time that a plan waits for the masks of grammars. A stream whose mask is late is left to the next step, so
that this is all that grammars cost other streams."""
_MASKS_ALONE_WAIT_S = 0.005
"""The same while every stream has a grammar: more of them then share a step."""

_MAX_SLOWDOWN = 10
"""A step with parts of prompts may be so many times slower than the steps before it: tokens far into a long context
take several times as long as the first ones."""


class Pipeline:
    """Sends one engine's plans.

    Args:
        config: whether steps overlap, and their deadlines.
        scheduler: makes the plans.
        lifecycle: has the ranks; they fail if anything raises an error that leaves the state inconsistent.
        masks: whose masks plans wait for.
        pace: follows the steps.
        on_shed: called from the loop with the last outputs of requests that end because there was no memory.

    Attributes:
        timing: of the steps of this epoch.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        lifecycle: GroupLifecycle,
        masks: MaskThreads,
        pace: PromptPace,
        on_shed: Callable[[list[Output]], None],
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._masks = masks
        self._pace = pace
        self._on_shed = on_shed
        self._depth = 1
        self._waits_for_masks = False
        self._may_build = False
        self.timing = StepTiming()

    def begin(self, device: str) -> None:
        """New ranks are ready, on such a device."""
        self._depth = 1 if self._config.overlap is False else MAX_IN_FLIGHT
        # A stream with a grammar would take part in every second step. On a GPU that costs less than waiting does.
        self._waits_for_masks = self._config.overlap is None and device == "cpu"
        self._may_build = device != "cpu"
        self.timing = StepTiming()

    def done(self, result: Result) -> None:
        """The oldest step in flight is done."""
        self.timing.result(result)
        self._pace.done(result.step, time.monotonic())

    def fill(self) -> None:
        """Send plans until as many steps are in flight as allowed, or there is nothing to compute.

        Raises:
            MemoryError: the scheduler's state is consistent. No other error is raised.
        """
        if self._lifecycle.state is not EngineState.READY:
            return
        try:
            self._plan_steps()
        except MemoryError:
            raise
        except Exception as error:
            self._lifecycle.fail_for(error)

    def _plan_steps(self) -> None:
        group = self._lifecycle.group
        assert group is not None
        if not self._masks.is_settled:
            self._masks.settle(_MASK_WAIT_S if self._scheduler.sequences.unconstrained else _MASKS_ALONE_WAIT_S)
        try:
            while group.is_live and group.in_flight < self._depth:
                if group.in_flight and self._waits_for_masks and self._scheduler.sequences.constrained:
                    break
                plan = self._scheduler.schedule()
                if plan is None:
                    break
                if group.in_flight == 0:
                    self.timing.plan(plan.step)
                deadline_s = self._deadline_s(plan)
                sent_at = time.monotonic()
                group.execute(plan, deadline_s)
                if plan.loads is None and len(plan.token_ids):  # copies from host memory would count as computing
                    self._pace.planned(plan.step, plan.prompt_tokens, sent_at)
        except MemoryError:
            try:
                self._lifecycle.call_soon(self._on_shed, self._scheduler.shed(group.in_flight))
            except MemoryError as error:
                group.fail_for(error)
        if group.in_flight == 0:
            self.timing.idle()

    def _deadline_s(self, plan: Plan) -> float:
        """So that ranks that hang are found as soon beside a short prompt as while they decode. On a GPU a step with
        prompts has the whole time: it may have to build a kernel first.
        """
        config, pace = self._config, self._pace
        if plan.loads is not None:
            return config.prefill_deadline_s
        if not plan.has_prefill:
            return config.decode_deadline_s
        if self._may_build or not pace.step_s:
            return config.prefill_deadline_s
        return min(
            config.prefill_deadline_s, config.decode_deadline_s + _MAX_SLOWDOWN * plan.prompt_tokens * pace.token_s
        )
