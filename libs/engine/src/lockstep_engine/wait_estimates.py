"""How long one more request would wait: the pace of an engine's steps, the length of its requests and its queue.

It follows the requests from when they are queued to their end. Estimates only: nothing waits here.
"""

import asyncio
import time
from collections.abc import Iterable

from lockstep_common.protocol import PRIORITIES

from lockstep_engine.prompt_pace import PromptPace
from lockstep_engine.queue_estimate import QueueEstimate
from lockstep_engine.request import Output, Phase, PhaseChange, Request
from lockstep_engine.sequences import Sequences


class WaitEstimates:
    """Estimates for one engine.

    Args:
        sequences: the requests.
        step_tokens: most tokens of a step.

    Attributes:
        queue: follows the requests, whose places others wait for.
        pace: follows the steps that compute prompts.
    """

    def __init__(self, sequences: Sequences, step_tokens: int) -> None:
        self._sequences = sequences
        self._step_tokens = step_tokens
        self.queue = QueueEstimate()
        self.pace = PromptPace()
        self._turn_s: float | None = None
        """Estimate, in this turn of the loop: until the turn of one more request comes."""

    def calibrate(self, step_s: float, token_s: float) -> None:
        """New ranks are ready: a step took `step_s` in their self-test, and `token_s` for each of its tokens."""
        self.queue.calibrate(step_s, token_s)
        self.pace.begin(step_s, token_s)

    def add(self, request: Request, arrived_at: float) -> None:
        """A request is queued. `arrived_at`: when it first arrived."""
        sampling = request.sampling
        self.queue.add(
            request.id,
            len(request.emitted_ids),
            sampling.max_tokens,
            reaches_limit=sampling.ignore_eos,
            embeds=request.embeds,
            priority=request.priority,
            prompt_tokens=len(request.prompt_ids) + len(request.emitted_ids),
            arrived_at=arrived_at,
        )

    def note_phases(self, changes: Iterable[PhaseChange]) -> None:
        """Requests began to run, or were preempted."""
        now = time.monotonic()
        for change in changes:
            if change.phase is Phase.RUNNING:
                self.queue.start(change.request_id, now)

    def note_outputs(self, outputs: Iterable[Output]) -> None:
        """Outputs of a step are passed on."""
        now = time.monotonic()
        for output in outputs:
            if output.error is not None:
                self.queue.drop([output.request_id])
            elif output.finish is not None:
                self.queue.end(output.request_id, output.position + len(output.ids), now)
            elif not self.queue.has_measured:
                self.queue.progress(output.request_id, output.position + len(output.ids), now)

    def waits(self) -> dict[int, tuple[float, float]]:
        """By priority: seconds that one more request would wait before it runs, and what each further one adds.

        A request of a tenant that is at its share of the blocks waits longer: those of others do not wait for its.
        """
        return self._waits_of(PRIORITIES.values())

    def prompt_s(self, tokens: int) -> float:
        """Seconds until so many tokens of one more prompt would be computed. The part of it that does not depend on
        `tokens` takes time for each request, and is asked for dozens of times in a turn of the loop.
        """
        pace, step_tokens = self.pace, self._step_tokens
        if self._turn_s is None:
            wait_s, _ = self._waits_of([0])[0]
            # Not their sum: the wait for a place includes the prompts of those that came first.
            self._turn_s = max(wait_s, pace.prompt_s(self._sequences.backlog, step_tokens))
            asyncio.get_running_loop().call_soon(self._forget_turn)
        return self._turn_s + pace.prompt_s(tokens, step_tokens)

    def _waits_of(self, priorities: Iterable[int]) -> dict[int, tuple[float, float]]:
        now, sequences = time.monotonic(), self._sequences
        places, is_full, apart = sequences.places, not sequences.free_seqs, sequences.waiting_for_share
        return {
            priority: self.queue.waits(places=places, is_full=is_full, now=now, priority=priority, apart=apart)
            for priority in priorities
        }

    def _forget_turn(self) -> None:
        self._turn_s = None
