"""The worker's part of a request's trace: what an attempt waited for and what the ranks did meanwhile.

`grammar`, `queue`, `prefill` and `decode` are children of the router's `attempt`; below `queue` is a fetch of KV blocks
(`kv_store/`), below the last two each rank has a span. A preempted attempt has a further queue, prefill and decode. A
token costs a count, and a few of them an entry in a list of bounded length.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing import Kept, Span, Tracing, names
from lockstep_common.tracing.spans import CURRENT
from lockstep_engine import Output, RankTimes

from lockstep_worker.attempt_ranks import within

_MAX_MARKS = 48
"""Steps of a decode that become events. When there are as many, every second one is forgotten."""

_CLIENTS_OWN = frozenset({ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED})
"""Ends that the client has chosen. By OpenTelemetry's conventions they are no errors of the service."""

ReadRanks = Callable[[], Sequence[RankTimes]]


class AttemptTrace:
    """The spans of one attempt.

    Args:
        tracing: of the worker.
        context: the router's attempt.
        read_ranks: the times of the ranks so far.
    """

    def __init__(self, tracing: Tracing, context: TraceContext, read_ranks: ReadRanks) -> None:
        self._trace = tracing.trace(context)
        self._read_ranks = read_ranks
        self._began_at = time.monotonic()
        self._phase: Span = self._trace.begin("queue")
        self._ranks: Sequence[RankTimes] = ()
        """Their times when the phase began."""
        self._has_token = False
        self._tokens = self._steps = 0
        self._stride = 1
        self._marks: list[tuple[int, int]] = []
        """Of the decode's steps: the monotonic clock in ns, and the tokens so far."""

    @property
    def kept_id(self) -> int:
        """The trace's id if it is kept, as far as that is known now; 0 if not."""
        return self._trace.kept_id

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """What the engine begins for the request within this block, such as a fetch of blocks, belongs to its wait. A
        request that is refused has no trace here.
        """
        token = CURRENT.set(self._phase)
        try:
            yield
        except BaseException:
            self._trace.release()
            raise
        finally:
            CURRENT.reset(token)

    def on_compiled(self, began_ns: int, ended_ns: int) -> None:
        """The request's grammar was compiled between these times of the monotonic clock; it waits for its turn now."""
        self._trace.end(self._trace.begin("grammar", at_ns=began_ns), at_ns=ended_ns)
        self._phase.begin_ns = self._trace.time_of(ended_ns)

    def on_running(self) -> None:
        """The ranks compute it, or have computed a part of its prompt."""
        if self._phase.name == "queue":
            self._keep_if_slow()
            self._next("prefill")
        elif self._phase.name == "prefill":
            self._phase.event("chunk")

    def on_waiting(self) -> None:
        """It was preempted."""
        if self._phase.name != "queue":
            self._phase.event("preempted")
            self._next("queue")

    def on_output(self, output: Output) -> None:
        """Note the tokens of a step, and the end."""
        if output.ids:
            self._note_tokens(output)
        if output.finish or output.error:
            self.end(output.error)

    def _note_tokens(self, output: Output) -> None:
        if self._phase.name != "decode":
            self._begin_decode(output)
        self._tokens += len(output.ids)
        self._steps += 1
        if self._steps % self._stride == 0:
            self._marks.append((time.monotonic_ns(), self._tokens))
            if len(self._marks) >= _MAX_MARKS:
                del self._marks[::2]
                self._stride *= 2

    def end(self, failure: LockstepError | None = None, *, is_cancelled: bool = False) -> None:
        """The attempt has ended.

        Args:
            failure: if the worker ended it with an error.
            is_cancelled: the router wants no more of it, which is no error.
        """
        error = ""
        if is_cancelled:
            self._phase.attributes[names.OUTCOME] = "cancelled"
        if failure is not None and failure.code in _CLIENTS_OWN:
            self._phase.attributes[names.OUTCOME] = str(failure.code)
        elif failure is not None:
            error = str(failure.code)
            if failure.meaning.http_status >= 500:
                self._trace.keep(Kept.ERROR)
        self._keep_if_slow()
        self._close(error)
        self._trace.release()

    def _begin_decode(self, output: Output) -> None:
        if not self._has_token:
            self._has_token = True
            self._keep_if_slow()
            self._phase.attributes[names.CACHED_TOKENS] = output.cached_tokens
        self._next("decode")

    def _keep_if_slow(self) -> None:
        self._trace.keep_if_slow(time.monotonic() - self._began_at)

    def _next(self, name: str) -> None:
        """The next phase begins."""
        self._close("")
        self._phase = self._trace.begin(name)
        if name != "queue":
            self._ranks = self._read_ranks()

    def _close(self, error: str) -> None:
        phase, now_ns = self._phase, time.monotonic_ns()
        if phase.name == "decode":
            phase.attributes |= {names.TOKENS: self._tokens, names.STEPS: self._steps}
            for at_ns, tokens in self._marks:
                phase.event("step", {names.TOKENS: tokens}, at_ns)
            self._tokens, self._steps, self._stride, self._marks = 0, 0, 1, []
        if phase.name != "queue":
            self._end_ranks(phase, now_ns)
        self._trace.end(phase, error, now_ns)

    def _end_ranks(self, phase: Span, now_ns: int) -> None:
        """A span for each rank. Its times are those of all requests in the batch, while this one was in the phase."""
        phase_s = (self._trace.time_of(now_ns) - phase.begin_ns) / 1e9
        spent = [within(new - old, phase_s) for new, old in zip(self._read_ranks(), self._ranks, strict=False)]
        transfer_s = min((each.collective_s for each in spent), default=0.0)
        for rank, each in enumerate(spent):
            span = self._trace.begin("rank", phase)
            span.begin_ns = phase.begin_ns
            span.attributes = {
                names.RANK: rank,
                names.STEPS: each.steps,
                names.COMPUTE_S: max(each.busy_s - each.collective_s, 0.0),
                names.COLLECTIVE_S: each.collective_s,
                # The rank that is waited for spends the least time in collectives: the rest of theirs is waiting.
                names.PEER_WAIT_S: each.collective_s - transfer_s,
                names.PLAN_WAIT_S: each.waited_s,
            }
            self._trace.end(span, at_ns=now_ns)


def begin_attempt(
    tracing: Tracing | None, traceparent: str, tracestate: str, read_ranks: ReadRanks
) -> AttemptTrace | None:
    """The trace of an attempt; None: the worker makes no traces, or the router has sent no usable context."""
    context = None if tracing is None else TraceContext.parse(traceparent, tracestate)
    return None if tracing is None or context is None else AttemptTrace(tracing, context, read_ranks)
