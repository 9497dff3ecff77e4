"""The engine's input and output: requests, sampling parameters, outputs. Plain data; token ids only; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from lockstep_common.errors import LockstepError, invalid
from lockstep_common.protocol import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from numpy.typing import NDArray


class PromptScores(StrEnum):
    """Which log probabilities of a prompt's tokens are returned; for evaluation."""

    NONE = "none"
    TOKENS = "tokens"
    """The log probability of each token given those before it, and its rank."""
    VOCABULARY = "vocabulary"
    """The log probabilities of the full vocabulary as well."""


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object; the grammar has no text."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """A regular expression of the full output, in the syntax of Rust's regex library."""
    LARK = "lark"
    """llguidance's variant of Lark, or GBNF."""


@dataclass(frozen=True)
class Grammar:
    """What the output must conform to."""

    kind: GrammarKind
    text: str = ""
    field: str = "grammar"
    """Name of the client's field, for errors."""

    def validate(self) -> None:
        """Raise INVALID_REQUEST for a text that is too large or does not belong to the kind."""
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise invalid(self.field, f"is larger than {MAX_GRAMMAR_BYTES} bytes")
        if bool(self.text) == (self.kind is GrammarKind.JSON_OBJECT):
            raise invalid(self.field, "is empty" if not self.text else "takes no text")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The draw for an output position is a pure function of (seed, position). A request that is continued on another
    worker with the ids emitted so far draws the same numbers.
    """

    max_tokens: int = 16
    """Most tokens to emit, those of earlier attempts included."""
    min_tokens: int = 0
    """End-of-text and stop ids cannot be chosen before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all tokens."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (Keskar et al. 2019, CTRL)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was emitted."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was emitted."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """0 to 2^64 - 1."""
    logprobs: int | None = None
    """n: return log probabilities of the chosen token and of the n most likely ones. None: return none. They are those
    of the model's distribution; with a grammar, of its distribution over the tokens that the grammar allows."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Restricts the output. End-of-text ids can be chosen where it is complete. If nothing else can follow they end the
    stream, whatever `ignore_eos` and `min_tokens` say."""
    prompt_scores: PromptScores = PromptScores.NONE
    """Unless NONE, the full prompt is computed, even if the prefix cache has parts of it."""

    def validate(self, vocab_size: int) -> None:
        """Raise INVALID_REQUEST naming the first field that is out of range."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens < 2**63, "must not be negative and must fit 63 bits"),
            ("temperature", 0 <= self.temperature <= 100, "must be between 0 and 100"),
            ("top_k", 0 <= self.top_k < 2**63, "must not be negative and must fit 63 bits"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "must be above 0 and at most 100"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be between -2 and 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be between -2 and 2"),
            ("seed", 0 <= self.seed < 2**64, "must fit 64 bits"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}",
            ),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_IDS, f"takes at most {MAX_STOP_IDS} ids"),
            (
                "stop_token_ids",
                all(0 <= each < vocab_size for each in self.stop_token_ids),
                f"names a token outside the vocabulary of {vocab_size}",
            ),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"takes at most {MAX_LOGIT_BIAS} tokens"),
            (
                "logit_bias",
                all(0 <= token < vocab_size for token in self.logit_bias),
                f"names a token outside the vocabulary of {vocab_size}",
            ),
            (
                "logit_bias",
                all(-1000 <= bias <= 1000 for bias in self.logit_bias.values()),
                "must be between -1000 and 1000",
            ),
        )
        for name, holds, sentence in checks:
            if not holds:
                raise invalid(name, sentence)
        if self.grammar is not None:
            self.grammar.validate()


@dataclass(frozen=True)
class Request:
    """One stream of tokens to generate or to continue."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    emitted_ids: tuple[int, ...] = ()
    """Output of earlier attempts. The first new token has position len(emitted_ids)."""
    priority: int = 0
    """Its class: requests of higher priority have a head start before others, to run and not to be preempted, and those
    with output before those without (see `seniority`)."""
    tenant: str = ""
    """Separates prefix caches."""
    arrived_at: float | None = None
    """Time of the request's first arrival, on the clock of `time.monotonic`; None: the time of `submit`."""
    embeds: bool = False
    """Compute the prompt's embedding and generate nothing; the sampling is not used."""


class Phase(StrEnum):
    """State of an unfinished request."""

    WAITING = "waiting"
    """It is not in the batch yet, or was preempted by a more important request."""
    RUNNING = "running"
    """It is in the batch."""


@dataclass(frozen=True)
class PhaseChange:
    """A request began to run or was preempted, or a step computed a part of its prompt."""

    request_id: str
    phase: Phase


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its natural-log probability."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities at one position: the chosen token's, and the most likely ones' (best first)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Natural-log probabilities of consecutive tokens of a prompt, each after all tokens before it."""

    position: int
    """Position of the first of these tokens in the prompt. Token 0 has no log probability."""
    tokens: NDArray[np.float32]
    """[tokens]"""
    ranks: NDArray[np.int32]
    """[tokens]: 1 where the token was the most likely one."""
    vocabulary: NDArray[np.float32] | None = None
    """[tokens, vocabulary], if requested."""

    @property
    def has_nan(self) -> bool:
        """Whether one is no number: the model has computed NaN or infinity."""
        return bool(np.isnan(self.tokens).any())


class Output(NamedTuple):
    """The result of one step for one request. A tuple, because one is made for each token."""

    request_id: str
    position: int
    """Position of the first of `ids` in the output, counted from 0 over all attempts."""
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish: FinishReason | None = None
    """Set with the last ids. The id that stopped the stream (end-of-text or stop id) is among `ids`."""
    cached_tokens: int = 0
    """Set with the first output of a request: prompt tokens whose KV was in the prefix cache."""
    error: LockstepError | None = None
    """The request failed and gets no more tokens. `error.meaning.retryable`: another worker may continue it."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt tokens of this step, if requested. `ids` is empty until the prompt has been
    computed."""
    embedding: NDArray[np.float32] | None = None
    """[hidden], of length 1: set in the only output of a request that embeds, with `finish`."""
