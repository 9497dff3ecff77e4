"""A request on its way through the engine: its tokens, how many of them have KV, and where that KV is."""

from dataclasses import dataclass, field

from lockstep_engine.blocks import BlockKey, extend_keys
from lockstep_engine.request import FinishReason, PromptScores, Request


@dataclass(eq=False)
class Sequence:
    """State of one request. The scheduler is its only owner."""

    request: Request
    arrival: int
    """Order of submission; ties of priority go to the earlier."""
    tokens: list[int] = field(init=False)
    """Prompt and output so far, as far as they are known here."""
    in_flight: int = 0
    """Tokens that steps in flight sample: they come after `tokens`, and only the ranks have them."""
    computed: int = 0
    """Tokens whose KV is in blocks when the steps in flight are done."""
    hot: list[int] = field(default_factory=list)
    cold: list[int] = field(default_factory=list)
    """Its blocks in order, in each version that there is of them, -1 where there is none. `BlockTables` keeps them."""
    fork: int = 0
    """So many blocks of its text were known when it began: other texts may part there, too."""
    keys: list[BlockKey] = field(default_factory=list)
    """Of the full blocks of `tokens`, as far as they were needed."""
    remembered: int = 0
    """So many of its first blocks can be found by their keys."""
    slot: int = -1
    """Row in the ranks' tables of sampling state; -1 while waiting."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    reported: bool = False
    """An output has been given, so `cached_tokens` has been told."""
    scored: int = 1
    """Prompt tokens before this one need no log probability (any more); the first never has one."""
    told: int = 1
    """Prompt tokens before this one have been given theirs."""

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.emitted_ids]

    @property
    def rank_order(self) -> tuple[int, int]:
        """Sorts the most important first."""
        return (-self.request.priority, self.arrival)

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
        """With the tokens in flight it has all that it may have, whatever they are."""
        return self.emitted + self.in_flight >= self.request.sampling.max_tokens or self.length >= context_length

    @property
    def scores_prompt(self) -> bool:
        """Its prompt's log probabilities are wanted."""
        return self.request.sampling.prompt_scores is not PromptScores.NONE

    def take_unscored(self, computed: int) -> range:
        """The prompt's positions that get their log probabilities when `computed` tokens have KV; each comes once,
        even if the prompt is computed again.
        """
        first = self.scored
        if self.scores_prompt:
            self.scored = max(first, min(computed + 1, len(self.request.prompt_ids)))
        return range(first, self.scored)

    def known_keys(self, tenant_salt: str) -> list[BlockKey]:
        """Keys of all full blocks of the present tokens."""
        extend_keys(self.keys, self.tokens, tenant_salt)
        return self.keys

    def finish_reason(self, eos_ids: frozenset[int], context_length: int) -> FinishReason | None:
        """Whether the output so far is complete, and why."""
        sampling = self.request.sampling
        if self.emitted > 0 and self.emitted >= sampling.min_tokens:
            last = self.tokens[-1]
            if last in sampling.stop_token_ids or (last in eos_ids and not sampling.ignore_eos):
                return FinishReason.STOP
        if self.emitted >= sampling.max_tokens or len(self.tokens) >= context_length:
            return FinishReason.LENGTH
        return None
