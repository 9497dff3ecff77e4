"""The record of a stream: all that another worker needs to go on with it exactly."""

from dataclasses import dataclass, field
from enum import Enum

from lockstep_api.v1 import inference_pb2, worker_pb2

_FINISH_REASONS = frozenset(inference_pb2.FinishReason.values())


class Verdict(Enum):
    """What the journal says of an arriving frame."""

    ACCEPTED = "accepted"
    NOTHING = "nothing"
    STALE_ATTEMPT = "stale_attempt"
    DUPLICATE = "duplicate"
    GAP = "gap"
    MALFORMED = "malformed"


@dataclass
class Journal:
    """One stream. The emitted ids grow by one position at a time and never change."""

    stream_id: str
    model: str
    digest: str
    """Only workers with this model digest may continue the stream."""
    prompt_ids: list[int]
    sampling: inference_pb2.Sampling
    session: str
    tenant: str = ""
    traceparent: str = ""
    emitted_ids: list[int] = field(default_factory=list)
    attempt: int = 0
    worker_id: str = ""
    """Of the current attempt."""

    def next_submit(self, worker_id: str) -> worker_pb2.Submit:
        """Begin another attempt: the frame that has a worker go on after the last emitted id."""
        self.attempt += 1
        self.worker_id = worker_id
        return worker_pb2.Submit(
            stream_id=self.stream_id,
            attempt=self.attempt,
            prompt_ids=self.prompt_ids,
            emitted_ids=self.emitted_ids,
            sampling=self.sampling,
            tenant=self.tenant,
            traceparent=self.traceparent,
        )

    def accept(self, frame: worker_pb2.StreamTokens) -> Verdict:
        """Append the frame's ids if they are exactly the next ones of the current attempt."""
        if frame.attempt != self.attempt:
            return Verdict.STALE_ATTEMPT
        count = len(frame.ids)
        if count and frame.position < len(self.emitted_ids):
            return Verdict.DUPLICATE
        if count and frame.position > len(self.emitted_ids):
            return Verdict.GAP
        if len(self.emitted_ids) + count > self.sampling.max_tokens or not self._is_well_formed(frame):
            return Verdict.MALFORMED
        if not count and not frame.finish:
            return Verdict.NOTHING
        self.emitted_ids.extend(frame.ids)
        return Verdict.ACCEPTED

    @property
    def is_full(self) -> bool:
        """Whether the stream has all tokens it may have."""
        return len(self.emitted_ids) >= self.sampling.max_tokens

    def _is_well_formed(self, frame: worker_pb2.StreamTokens) -> bool:
        if frame.finish not in _FINISH_REASONS:
            return False
        return not self.sampling.HasField("logprobs") or len(frame.logprobs) == len(frame.ids)
