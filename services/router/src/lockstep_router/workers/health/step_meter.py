"""Measures the time of a worker's decode steps from its statuses.

Statuses count finished steps ten times a second. Time between two of them counts if streams ran all the while and no
prompt of this router was computed; the rest is left out. A sample covers half a second of such time.
"""

from lockstep_api.v1 import worker_pb2

from lockstep_router.workers.health.pace import size_class

_SAMPLE_S = 0.5
"""Ten ticks of the awake clock or more, so that its resolution does not matter."""

_PLANS_IN_FLIGHT = 2
"""Steps that may begin before the effect of a new request has left the worker's pipeline."""


class StepMeter:
    """The steps of one worker. Times are those of the awake clock."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was measured: the next status begins a new count of steps."""
        self._last: worker_pb2.Status | None = None
        self._at = 0.0
        self._has_prompts = False
        self._skip_to = 0
        """Number of steps before which the steps may contain prompts."""
        self._size = 0
        self._time_s = 0.0
        self._steps = 0

    def note_prompt(self) -> None:
        """Note that the worker computes a part of a prompt, or is about to."""
        self._has_prompts = True

    def note(self, status: worker_pb2.Status, now: float) -> tuple[int, float] | None:
        """Take a status; returns a sample when there is enough: the class of the batch's size, seconds of a step."""
        last, self._last = self._last, status
        began_at, self._at = self._at, now
        had_prompts, self._has_prompts = self._has_prompts, False
        if had_prompts:
            self._skip_to = status.steps + _PLANS_IN_FLIGHT
        size = size_class(status.running)
        if size != self._size:
            self._size, self._time_s, self._steps = size, 0.0, 0
        is_decode = last is not None and last.running and status.running and not had_prompts
        if last is None or not is_decode or not self._skip_to <= last.steps <= status.steps:
            return None
        self._time_s += now - began_at
        self._steps += status.steps - last.steps
        if self._time_s < _SAMPLE_S or not self._steps:
            return None
        sample = (size, self._time_s / self._steps)
        self._time_s, self._steps = 0.0, 0
        return sample
