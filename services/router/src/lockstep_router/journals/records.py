"""What is kept of a resumable stream: its request, the tokens of each choice, and how it ended.

All of it is plain data, so that any backend can store it and any router can continue from it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import LockstepError

from lockstep_router.generation.parsing import Parsing
from lockstep_router.generation.style import Style

_BYTES_OF_A_RECORD = 2048
"""Memory of a stream without its prompts and tokens, about."""
_BYTES_OF_A_LOGPROB = 150
"""Memory of one log probability, about."""


@dataclass(frozen=True)
class ChoiceRecord:
    """One choice of the answer, as it was requested."""

    stream_id: str
    sampling: inference_pb2.Sampling
    """Complete, with the choice's own seed."""


@dataclass(frozen=True)
class RequestRecord:
    """A resumable request after its preparation: all that is needed to continue it and to write its answer again."""

    request_id: str
    owner: str
    """Names the tenant that may resume it."""
    model: str
    digest: str
    """Of the model."""
    tokenizer_digest: str
    created: int
    """Seconds since 1970, as in the answer."""
    style: Style
    stops: tuple[str, ...]
    prompts: tuple["array[int]", ...]
    """Token ids."""
    prefixes: tuple[str, ...]
    """The text of each prompt if it is echoed, else empty."""
    choices: tuple[ChoiceRecord, ...]
    """In the order of the answer's choices: those of the first prompt, then those of the next one."""
    tenant: str
    session: str
    parsing: Parsing | None = None
    """How the answers are parsed; None: they are text alone."""
    deadline_at: float | None = None
    """When the client's own timeout ends, in seconds since 1970; None: it has none."""
    traceparent: str = ""
    """Trace context of the request; empty: it has none."""
    written: bytes | None = field(default=None, compare=False, repr=False)
    """All but the prompts as the router that began the stream wrote it: by its clock, and with what a newer version has
    added. A record is written again as it was, or it counts as another one. None: this router began it.
    """

    @property
    def choices_per_prompt(self) -> int:
        """Number of choices of each prompt."""
        return len(self.choices) // len(self.prompts)

    @property
    def continues_prompts(self) -> bool:
        """Whether the answers continue the prompts' texts; else they begin texts of their own."""
        return self.style.kind == "text"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def size_bytes(self) -> int:
        """Approximate memory."""
        names = () if self.parsing is None else self.parsing.names
        texts = sum(map(len, (*self.prefixes, *self.stops, *names, self.style.options)))
        written = 0 if self.written is None else len(self.written)
        return _BYTES_OF_A_RECORD * (1 + len(self.choices)) + 4 * self.prompt_tokens + texts + written


@dataclass(frozen=True)
class Piece:
    """The next tokens of one choice."""

    index: int
    """The choice."""
    position: int
    """Of the first id in the choice."""
    ids: Sequence[int]
    logprobs: Sequence[inference_pb2.Logprobs] = ()
    """One for each id, or none."""
    finish: int = inference_pb2.FINISH_REASON_UNSPECIFIED
    """Set if these are the choice's last tokens."""
    cached_tokens: int = 0
    """Of the prompt, as the first attempt reported them."""
    is_inexact: bool = False
    """Whether the choice was continued with other, or unknown, numerics."""
    numerics: str = ""
    """Those that the choice began with; empty: unknown."""
    is_unproven: bool = False
    """Whether the choice began again on a router that had no token of it: clients may have some of other numerics."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory."""
        return 4 * len(self.ids) + _BYTES_OF_A_LOGPROB * sum(1 + len(each.top) for each in self.logprobs)


@dataclass
class ChoiceLog:
    """What one choice has so far. Tokens after a stop string are not part of it."""

    ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[inference_pb2.Logprobs] = field(default_factory=list)
    finish: int = inference_pb2.FINISH_REASON_UNSPECIFIED
    cached_tokens: int = 0
    is_inexact: bool = False
    numerics: str = ""
    is_unproven: bool = False

    def copied(self) -> "ChoiceLog":
        """The same, which grows by itself."""
        return replace(self, ids=self.ids[:], logprobs=self.logprobs[:])

    def begins(self, other: "ChoiceLog") -> bool:
        """Whether another log has the same tokens, or the same and more."""
        return self.ids == other.ids[: len(self.ids)] and self.finish in (0, other.finish)

    def add(self, piece: Piece) -> None:
        """Append a piece. What is there already is not added again.

        Raises:
            ValueError: the piece does not continue the choice.
        """
        known = len(self.ids) - piece.position
        if known < 0 or (self.finish and known < len(piece.ids)):
            raise ValueError(f"a piece at {piece.position} does not continue {len(self.ids)} tokens")
        self.ids.extend(piece.ids[known:])
        self.logprobs.extend(piece.logprobs[known:])
        self.finish = self.finish or piece.finish
        self.cached_tokens = piece.cached_tokens or self.cached_tokens
        self.is_inexact = self.is_inexact or piece.is_inexact
        self.numerics = self.numerics or piece.numerics
        self.is_unproven = self.is_unproven or piece.is_unproven


@dataclass(frozen=True)
class Outcome:
    """How a stream ended."""

    failure: LockstepError | None = None
    """The error that its clients get after the tokens so far; None: the answer is complete. A copy of the given one,
    which is never raised itself: it is kept for long, and a traceback would keep the whole generation.
    """

    def __post_init__(self) -> None:
        if self.failure is not None:
            object.__setattr__(self, "failure", self.failure.copied())

    def error(self) -> LockstepError | None:
        """A new one of `failure`, to be raised."""
        return None if self.failure is None else self.failure.copied()

    @property
    def may_go_on(self) -> bool:
        """Whether the stream can be continued after its tokens so far: what it failed of may have passed."""
        return self.failure is not None and self.failure.meaning.retryable


@dataclass(frozen=True)
class StoredStream:
    """A stream as a store has it."""

    record: RequestRecord
    logs: Sequence[ChoiceLog]
    """One for each choice. Not to be changed."""
    outcome: Outcome | None
    """None: it has not ended."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory."""
        tokens = (Piece(0, 0, log.ids, log.logprobs) for log in self.logs)
        return self.record.size_bytes + sum(each.size_bytes for each in tokens)


@dataclass(frozen=True)
class Claim:
    """An idempotency key's stream."""

    request_id: str
    fingerprint: bytes
    """Of the request's body: the same key with another body is refused."""
