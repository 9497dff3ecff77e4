"""The journal of a stream: everything that another worker needs to continue it exactly.

It decides which of a worker's tokens are taken. It knows nothing of workers, connections or time.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.trace_context import trace_fields

from lockstep_router.traces import RequestTrace

_FINISH_REASONS = frozenset(
    {
        inference_pb2.FINISH_REASON_UNSPECIFIED,
        inference_pb2.FINISH_REASON_STOP,
        inference_pb2.FINISH_REASON_LENGTH,
    }
)
"""Those that a worker may give."""


class Acceptance(Enum):
    """The journal's decision on an arriving update."""

    ACCEPTED = "accepted"
    EMPTY = "empty"
    STALE_ATTEMPT = "stale_attempt"
    DUPLICATE = "duplicate"
    GAP = "gap"
    MALFORMED = "malformed"


@dataclass
class Journal:
    """The journal of one stream. Emitted ids are appended in order and never change."""

    stream_id: str
    model: str
    digest: str
    """Only workers with this model digest may continue the stream."""
    prompt_ids: list[int]
    sampling: inference_pb2.Sampling
    session: str
    tenant: str = ""
    traceparent: str = ""
    """Context of the client or, if the request is traced, of the current attempt. `tracestate` belongs to it."""
    arrived_at: float | None = None
    """When the request arrived, in the event loop's time; None: when its stream was created."""
    timeout_s: float | None = None
    """The client's own limit for the time from the arrival to the end of the stream."""
    priority: int = 0
    """Class of the stream: of -1, 0 and 1, higher ones run first."""
    tracestate: str = ""
    trace: RequestTrace | None = None
    """The request's trace; None: it has none."""
    run_id: str = ""
    """The id by which the client of a resumable request comes back to it; empty: it is not resumable."""
    embeds: bool = False
    """The prompt's embedding is wanted, and no tokens."""
    emitted_ids: list[int] = field(default_factory=list)
    attempt: int = 0
    worker_id: str = ""
    """The worker of the current attempt."""
    fingerprint: str | None = None
    """`numerics` of the worker that gave the first token; empty: unknown; None: there is no token yet."""
    is_inexact: bool = False
    """Whether a later attempt gave tokens with other, or unknown, numerics."""
    request_id: str = ""
    """The client's request that the stream belongs to, for log lines here and in the worker."""
    age_s: float = 0.0
    """Seconds that the stream was older when it arrived here: another router had it. It keeps its place in queues."""
    max_tokens: int = field(init=False)
    logprobs_per_token: int = field(init=False)
    """Log probabilities that come with each token: the token's own and those of alternatives; 0 if none do."""

    def __post_init__(self) -> None:
        # Read for each token; fields of a message are slow to read.
        self.max_tokens = self.sampling.max_tokens
        self.logprobs_per_token = self.sampling.logprobs + 1 if self.sampling.HasField("logprobs") else 0

    def next_submit(self, worker_id: str, *, arrived_s: float = 0.0, deadline_s: float = 0.0) -> worker_pb2.Submit:
        """Begin the next attempt and return the Submit that continues after the last emitted id.

        Args:
            worker_id: the worker that gets it.
            arrived_s: the stream's arrival, in seconds after the RouterHello that the worker got.
            deadline_s: seconds until the stream must end; 0: no limit.
        """
        self.attempt += 1
        self.worker_id = worker_id
        # Made field by field, which takes a quarter of the time of a call with keyword arguments.
        submit = worker_pb2.Submit()
        submit.stream_id = self.stream_id
        submit.attempt = self.attempt
        submit.prompt_ids.extend(self.prompt_ids)
        submit.sampling.CopyFrom(self.sampling)
        submit.arrived_s = arrived_s
        if self.emitted_ids:
            submit.emitted_ids.extend(self.emitted_ids)
        if self.tenant:
            submit.tenant = self.tenant
        if self.traceparent:
            submit.traceparent = self.traceparent
            submit.tracestate = self.tracestate
        if self.request_id:
            submit.request_id = self.request_id
        if deadline_s:
            submit.deadline_s = deadline_s
        if self.embeds:
            submit.embed = True
        if self.priority:
            submit.priority = self.priority
        return submit

    def accept(self, update: worker_pb2.StreamTokens) -> Acceptance:
        """Append the update's ids if they are exactly the next ones of the current attempt."""
        if update.attempt != self.attempt:
            return Acceptance.STALE_ATTEMPT
        ids, finish = update.ids, update.finish
        count, end = len(ids), len(self.emitted_ids)
        if count or finish:
            position = update.position
            if position > end:
                return Acceptance.GAP
            if position < end:
                return Acceptance.DUPLICATE if count else Acceptance.MALFORMED
        lacks_logprobs = self.logprobs_per_token and len(update.logprobs) != count
        is_other = self.embeds and (count or bool(update.embedding) != bool(finish))
        if end + count > self.max_tokens or finish not in _FINISH_REASONS or lacks_logprobs or is_other:
            return Acceptance.MALFORMED
        if not count and not finish:
            return Acceptance.EMPTY
        self.emitted_ids.extend(ids)
        return Acceptance.ACCEPTED

    @property
    def context(self) -> str:
        """A `traceparent`: of the current attempt, of the request before it has one, or the client's; empty: none."""
        return self.traceparent or ("" if self.trace is None else self.trace.root.traceparent)

    def log_fields(self) -> dict[str, str | int]:
        """What each log line about the stream says. The span is that of the current attempt, if it has one."""
        fields: dict[str, str | int] = {"request_id": self.request_id} if self.request_id else {}
        return fields | trace_fields(self.context) | {"stream": self.stream_id, "attempt": self.attempt}

    @property
    def is_full(self) -> bool:
        """Whether the stream has max_tokens tokens."""
        return len(self.emitted_ids) >= self.max_tokens

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts its tokens."""
        return self.sampling.HasField("grammar")

    def numerics(self, fingerprint: str, grammar_engine: str) -> str:
        """What a worker's tokens of this stream depend on: its numerics and, with a grammar, what computes that; empty:
        unknown.
        """
        return f"{fingerprint} {grammar_engine}" if fingerprint and self.has_grammar else fingerprint

    def can_continue_exactly(self, fingerprint: str) -> bool:
        """Whether a worker with these `numerics` gives the tokens that the first worker would have given."""
        return self.fingerprint is None or (bool(fingerprint) and fingerprint == self.fingerprint)

    def request_digest(self) -> bytes:
        """A hash of the model, the prompt and the sampling without its seed: equal for equal requests."""
        sampling = inference_pb2.Sampling()
        sampling.CopyFrom(self.sampling)
        sampling.ClearField("seed")
        made = hashlib.blake2b(self.digest.encode(), digest_size=16)
        made.update(sampling.SerializeToString(deterministic=True))
        made.update(array("I", self.prompt_ids).tobytes())
        return made.digest()
