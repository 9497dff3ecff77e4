"""What the ranks did while an attempt was in `prefill` and in `decode`, for the router's console.

The ranks' counters are read when a phase begins and when it ends, never for a token.
"""

from collections.abc import Callable, Sequence

from lockstep_api.v1 import worker_pb2
from lockstep_engine import RankTimes

ReadRanks = Callable[[], Sequence[RankTimes]]


class AttemptRanks:
    """The ranks' work in the phases of one attempt; a preempted one has both phases again, and they are added up.

    Args:
        read_ranks: the times of the ranks so far, in one epoch.
    """

    def __init__(self, read_ranks: ReadRanks) -> None:
        self._read_ranks = read_ranks
        self.awaits_token = True
        """Whether the next token is the first one since the attempt began to run."""
        self._phase: list[RankTimes] | None = None
        """Where its work is kept once it is over; None: the attempt waits."""
        self._since: Sequence[RankTimes] = ()
        """The counters where the phase begins."""
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
        """What the router is told of the attempt."""
        return worker_pb2.EndedAttempt(
            stream_id=stream_id, attempt=attempt, prefill=map(_work, self._prefill), decode=map(_work, self._decode)
        )

    def _enter(self, phase: list[RankTimes] | None) -> None:
        if phase is self._phase:
            return
        now = self._read_ranks()
        if self._phase is not None:
            spent = _difference(now, self._since)
            # Counters that went back are those of another epoch.
            self._phase[:] = spent if all(each.steps >= 0 for each in spent) else ()
        # What was done in earlier turns of the phase counts as done since then.
        self._phase, self._since = phase, _difference(now, phase) if phase else now


def _difference(new: Sequence[RankTimes], old: Sequence[RankTimes]) -> list[RankTimes]:
    return [each - before for each, before in zip(new, old, strict=False)]


def _work(times: RankTimes) -> worker_pb2.RankWork:
    return worker_pb2.RankWork(
        steps=times.steps,
        compute_s=max(times.busy_s - times.collective_s, 0.0),
        collective_s=times.collective_s,
        idle_s=times.waited_s,
    )
