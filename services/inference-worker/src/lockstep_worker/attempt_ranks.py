"""What the ranks did while an attempt was in `prefill` and in `decode`, for the router's console.

The ranks' counters are read when a phase begins and when it ends, never for a token.
"""

import time
from collections.abc import Callable, Sequence

from lockstep_api.v1 import worker_pb2
from lockstep_engine import RankTimes

ReadRanks = Callable[[], Sequence[RankTimes]]


class AttemptRanks:
    """The ranks' work in the phases of one attempt; a preempted one has both phases again, and they are added up.

    Args:
        read_ranks: the times of the ranks so far, in one epoch.
        clock: gives seconds, for how long a phase takes.
    """

    def __init__(self, read_ranks: ReadRanks, clock: Callable[[], float] = time.monotonic) -> None:
        self._read_ranks = read_ranks
        self._clock = clock
        self.awaits_token = True
        """Whether the next token is the first one since the attempt began to run."""
        self._phase: list[RankTimes] | None = None
        """Where its work is kept once it is over; None: the attempt waits."""
        self._since: Sequence[RankTimes] = ()
        """The counters where the phase begins."""
        self._began_at = 0.0
        self._prefill: list[RankTimes] = []
        self._decode: list[RankTimes] = []

    def run(self) -> None:
        """The ranks compute it. Nothing changes if they did before, or if its first token came before this news."""
        if self._phase is None:
            self._enter(self._prefill)

    def note_token(self) -> None:
        """The token that was awaited has come."""
        self.awaits_token = False
        self._enter(self._decode)

    def wait(self) -> None:
        """The attempt was preempted, or has ended."""
        self.awaits_token = True
        self._enter(None)

    def message(self, stream_id: str, attempt: int) -> worker_pb2.EndedAttempt:
        """The report of the attempt to its router."""
        return worker_pb2.EndedAttempt(
            stream_id=stream_id, attempt=attempt, prefill=map(_work, self._prefill), decode=map(_work, self._decode)
        )

    def _enter(self, phase: list[RankTimes] | None) -> None:
        if phase is self._phase:
            return
        now, now_s = self._read_ranks(), self._clock()
        if self._phase is not None:
            self._leave(self._phase, now, now_s - self._began_at)
        self._phase, self._since, self._began_at = phase, now, now_s

    def _leave(self, phase: list[RankTimes], now: Sequence[RankTimes], phase_s: float) -> None:
        spent = [within(each, phase_s) for each in _difference(now, self._since)]
        # Counters that went back are those of another epoch.
        if any(each.steps < 0 for each in spent):
            phase.clear()
        else:
            phase[:] = [_sum(*turns) for turns in zip(phase, spent, strict=False)] if phase else spent


def within(spent: RankTimes, phase_s: float) -> RankTimes:
    """What a rank did in a phase that took so long.

    The wait before the phase's first step may have begun long before, while there was no request: only as much of it as
    the phase has room for counts.
    """
    return spent._replace(waited_s=min(spent.waited_s, max(0.0, phase_s - spent.busy_s)))


def _difference(new: Sequence[RankTimes], old: Sequence[RankTimes]) -> list[RankTimes]:
    return [each - before for each, before in zip(new, old, strict=False)]


def _sum(one: RankTimes, other: RankTimes) -> RankTimes:
    return RankTimes(
        one.steps + other.steps,
        one.busy_s + other.busy_s,
        one.forward_s + other.forward_s,
        one.collective_s + other.collective_s,
        one.waited_s + other.waited_s,
    )


def _work(times: RankTimes) -> worker_pb2.RankWork:
    return worker_pb2.RankWork(
        steps=times.steps,
        compute_s=max(times.busy_s - times.collective_s, 0.0),
        collective_s=times.collective_s,
        idle_s=times.waited_s,
    )
