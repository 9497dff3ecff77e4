"""The state of a request in the scheduler: its tokens, how many of them have KV, and in which blocks that KV is."""

from dataclasses import dataclass, field

from lockstep_common.seniority import turn_at

from lockstep_engine.blocks import BlockKey, extend_keys
from lockstep_engine.constraint import Constraint
from lockstep_engine.request import FinishReason, PromptScores, Request


@dataclass(eq=False)
class Sequence:
    """State of one request. The scheduler is its only owner."""

    request: Request
    arrival: int
    """Order of submission."""
    arrived_at: float = 0.0
    """When its request first arrived: with its class this decides whose turn it is; if two are equal, the one submitted
    first goes first."""
    constraint: Constraint | None = None
    """Its place in its grammar."""
    tokens: list[int] = field(init=False)
    """Prompt and output so far, without the tokens in flight."""
    in_flight: int = 0
    """Tokens that steps in flight sample. They follow `tokens`; only the ranks know them yet."""
    computed: int = 0
    """Tokens that have KV once the steps in flight are done."""
    hot: list[int] = field(default_factory=list)
    cold: list[int] = field(default_factory=list)
    """`hot` and `cold`: ids of its blocks in order of position, in each version; -1 where a version does not exist.
    Only `BlockTables` writes them."""
    dropped: int = 0
    """How many of its first blocks it had and has no more, in any version: no later query sees them."""
    fork: int = 0
    """How many of its blocks the prefix cache had, in any version, when it started. Later requests may diverge after
    the same block."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the full blocks of `tokens`, computed as far as they were needed."""
    loads_end: int = 0
    """It is not computed before the tier in host memory is done with its loads up to this end (see `HostTier`)."""
    remembered: int = 0
    """How many of its first blocks the prefix cache knows by their keys."""
    sampling_row: int = -1
    """Its row in the tables of the sampler and of plans; -1 while it waits."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    has_output: bool = False
    """An output has been produced; `cached_tokens` was in the first one."""
    is_held: bool = False
    """It is not admitted yet: blocks of its prompt are on their way to host memory."""
    score_from: int = 1
    """First prompt position that still needs a log probability. Position 0 never has one."""
    scores_delivered: int = 1
    """First prompt position whose log probability has not been in an output."""

    _turn: tuple[bool, tuple[float, int]] | None = None
    """The last `precedence`, and whether there was output."""

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.emitted_ids]

    @property
    def precedence(self) -> tuple[float, int]:
        """Sorting key that puts the most important sequence first: by arrival, with the head starts of its class and
        of output (see `seniority`).
        """
        has_output = self.emitted > 0
        if self._turn is None or self._turn[0] is not has_output:  # each step asks every sequence
            turn = turn_at(self.arrived_at, self.request.priority, has_output=has_output)
            self._turn = has_output, (turn, self.arrival)
        return self._turn[1]

    @property
    def emitted(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens so far, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that still need KV before the next one can be sampled."""
        return self.length - self.computed

    def is_full(self, context_length: int) -> bool:
        """Whether it reaches its token limit with the tokens in flight, whatever these are."""
        if self.request.embeds:
            return False
        return self.emitted + self.in_flight >= self.request.sampling.max_tokens or self.length >= context_length

    @property
    def may_sample(self) -> bool:
        """Whether its next token can be planned: the tokens that its grammar allows are known."""
        return self.constraint is None or (self.in_flight == 0 and self.constraint.mask is not None)

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of its prompt are wanted."""
        return self.request.sampling.prompt_scores is not PromptScores.NONE

    def take_unscored(self, computed: int) -> range:
        """The prompt positions to score in the step that raises the count of tokens with KV to `computed`. A position
        is returned once, even if the prompt is computed again.
        """
        first = self.score_from
        if self.scores_prompt:
            self.score_from = max(first, min(computed + 1, len(self.request.prompt_ids)))
        return range(first, self.score_from)

    def known_keys(self, tenant_salt: str) -> list[BlockKey]:
        """Keys of all full blocks of `tokens`."""
        extend_keys(self.keys, self.tokens, tenant_salt)
        return self.keys

    def finish_reason(self, eos_ids: frozenset[int], context_length: int) -> FinishReason | None:
        """The reason for which the output so far is complete; None: it is not."""
        sampling = self.request.sampling
        if self.emitted > 0:
            last, is_long_enough = self.tokens[-1], self.emitted >= sampling.min_tokens
            # With a grammar, masks allow an end-of-text id only where the stream may end with it.
            ends = last in eos_ids and (sampling.grammar is not None or (is_long_enough and not sampling.ignore_eos))
            if ends or (is_long_enough and last in sampling.stop_token_ids):
                return FinishReason.STOP
        if self.emitted >= sampling.max_tokens or len(self.tokens) >= context_length:
            return FinishReason.LENGTH
        return None
