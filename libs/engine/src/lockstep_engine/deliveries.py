"""Outputs on their way to the caller, whose errors must not leave a request without a last output."""

import contextlib
from collections.abc import Callable

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine import faults
from lockstep_engine.request import Output


class Deliveries:
    """Passes the outputs of one engine on.

    Args:
        on_outputs: the caller's: takes the number of a step and outputs.
        label: names the engine in errors.
        epoch: gives the current one.
    """

    def __init__(self, on_outputs: Callable[[int, list[Output]], None], label: str, epoch: Callable[[], int]) -> None:
        self._on_outputs = on_outputs
        self._label = label
        self._epoch = epoch
        self.steps = 0
        """Number of the last step of this epoch whose result has come."""

    def pass_on(self, outputs: list[Output]) -> None:
        """Pass on the outputs of the last step. If the caller fails on them, the group has to."""
        self._on_outputs(self.steps, outputs)

    def pass_on_last(self, outputs: list[Output]) -> None:
        """Pass on the last outputs of requests that the scheduler does not have: they are not among those that end with
        the group. If the caller fails on them, each gets an error that says it can be continued elsewhere.
        """
        try:
            self._on_outputs(self.steps, outputs)
        except Exception:
            self.pass_on_lost(self.lost([each.request_id for each in outputs], "the driver failed"))
            raise

    def lost(self, request_ids: list[str], reason: str) -> list[Output]:
        """The last outputs of requests that are lost: errors that say they can be continued elsewhere."""
        error = LockstepError(ErrorCode.WORKER_LOST, f"{self._label}: {reason}")
        return [Output(each, 0, (), error=error) for each in request_ids]

    def pass_on_lost(self, lost: list[Output]) -> None:
        """Pass on the last outputs of lost requests: each alone, if the caller fails on them together."""
        try:
            self._on_outputs(self.steps, lost)
        except Exception as error:
            faults.note(error, self._epoch())
            for output in lost:
                with contextlib.suppress(Exception):
                    self._on_outputs(self.steps, [output])
