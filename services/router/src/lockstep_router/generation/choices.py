"""The text of one stream: tokens in, pieces of text with finish reason and log probabilities out."""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from lockstep_api.v1 import inference_pb2, worker_pb2

from lockstep_router.generation.parsing import Parsing
from lockstep_router.output import Content, OutputParser, Part
from lockstep_router.text.detokenizer import NONE_VISIBLE, Detokenizer
from lockstep_router.text.stop_strings import NO_STOP_STRINGS, StopStrings
from lockstep_router.text.tokenizer import Tokenizer

_STOP = inference_pb2.FINISH_REASON_STOP
_FINISH_REASONS = {_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}

MIN_LOGPROB = -9999.0
"""Replaces the logarithm of a zero probability: JSON has no -inf."""


@dataclass(frozen=True)
class TokenEntry:
    """A token with its log probabilities and where its text begins in the choice's text."""

    logprobs: inference_pb2.Logprobs
    text_offset: int


@dataclass(slots=True)
class Delta:
    """The new part of a choice. Not changed after construction; not frozen, for speed."""

    index: int
    text: str
    tokens: int
    """Number of the choice's tokens so far, including those whose text is held back."""
    finish_reason: str | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    parts: tuple[Part, ...] = ()
    """Everything new in order, if there is reasoning or a tool call in it; `text` is that of the content alone."""


class Choice:
    """Turns one stream's updates into text: a pure function of the ids, whichever workers they come from.

    Args:
        index: of the choice in the answer.
        tokenizer: of the model.
        stops: the stop strings.
        parsing: how the text is parsed; None: it is content alone.
        stream_id: of the choice's stream.
        preceding: the prompt's ids, if the text continues the prompt's; empty: it begins a text.
        min_tokens: stop strings that end in the text of so many first tokens do not end the answer.
    """

    tokens = 0
    reasoning_tokens = 0
    cached_tokens: int | None = None
    """Cached tokens of the prompt, as the first attempt reported them."""
    logprob = 0.0
    """Sum of its tokens' log probabilities, if these are known."""
    is_finished = False
    _decoded_chars = 0
    _given_chars = 0

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        parsing: Parsing | None = None,
        stream_id: str = "",
        *,
        preceding: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self._parser = None if parsing is None else parsing.parser(stream_id)
        self._parts: list[Part] = []
        self._is_plain = not stops and self._parser is None
        visible_ids = NONE_VISIBLE if parsing is None else parsing.visible_ids(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, visible_ids, preceding)
        self._min_tokens = min_tokens
        self._stop_strings = StopStrings(stops) if stops else NO_STOP_STRINGS
        self._waiting: deque[TokenEntry] = deque()  # tokens whose text is held back

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of its tokens, if these are known."""
        return self.logprob / max(1, self.tokens)

    @property
    def is_plain(self) -> bool:
        """Whether what it gives next is the plain text of the next token, if that has one for itself."""
        return self._is_plain and self._detokenizer.is_whole and not self.is_finished

    def skip_to(self, tokens: int) -> None:
        """Go to the state after so many tokens, of which others have given the text: `is_plain` holds before."""
        self.tokens = tokens
        self._detokenizer.skip()

    def feed(self, update: worker_pb2.StreamTokens) -> Delta | None:
        """Take an update's tokens; None if the client gets nothing new, or the choice is finished."""
        if self.is_finished:
            return None
        if self.cached_tokens is None:
            self.cached_tokens = update.cached_tokens
        if self._is_plain and len(update.ids) == 1 and not (update.logprobs or self._waiting):
            # Most updates: what follows gives the same for them.
            self.tokens += 1
            if finish := update.finish:
                self.is_finished = True
                text = "" if finish == _STOP else self._detokenizer.step(update.ids[0])
                return Delta(self.index, text + self._detokenizer.flush(), self.tokens, _FINISH_REASONS[finish])
            text = self._detokenizer.step(update.ids[0])
            self._decoded_chars += len(text)
            self._given_chars += len(text)
            return Delta(self.index, text, self.tokens) if text else None
        count = len(update.ids)
        text_count = max(0, count - 1) if update.finish == _STOP else count
        text = "".join(self._feed_token(update, index) for index in range(text_count))
        if text_count < count:
            text += self._feed_stop_token(update, text_count)
        finish_reason = "stop" if self._has_ended else None
        if finish_reason is None and update.finish:
            rest = self._pass_on(self._detokenizer.flush())
            finish_reason = "stop" if self._stop_strings.found else _FINISH_REASONS[update.finish]
            text += self._parse(rest + self._stop_strings.flush())
        self._given_chars += len(text)
        self.is_finished = finish_reason is not None
        entries = self._release(everything=self.is_finished and not self._stop_strings.found)
        if self._parser is not None:
            return self._parsed_delta(self._parser, finish_reason, entries)
        if not text and not entries and not self.is_finished:
            return None
        return Delta(self.index, text, self.tokens, finish_reason, entries)

    @property
    def _has_ended(self) -> bool:
        """Whether the answer has ended by what it says."""
        return self._stop_strings.found or (self._parser is not None and self._parser.has_ended)

    def _feed_token(self, update: worker_pb2.StreamTokens, index: int) -> str:
        if self._has_ended:
            return ""
        self._count_token(update, index)
        text = self._pass_on(self._detokenizer.step(update.ids[index]))
        if self._parser is None:
            return text
        was_reasoning = self._parser.is_reasoning
        self._parse(text)
        self.reasoning_tokens += was_reasoning or self._parser.is_reasoning
        return text

    def _feed_stop_token(self, update: worker_pb2.StreamTokens, index: int) -> str:
        """Take the last token of an answer that was stopped. It has no text, unless its text is what ends the answer:
        a journal says that the answer was stopped, and not by what.
        """
        if self._has_ended:
            return ""
        if (rest := self._detokenizer.rest_with(update.ids[index])) and self._is_ended_by(rest):
            return self._feed_token(update, index)
        self._count_token(update, index)
        self.reasoning_tokens += self._parser is not None and self._parser.is_reasoning
        return ""

    def _is_ended_by(self, text: str) -> bool:
        """Whether the answer would end by what it says after this text."""
        if self.tokens >= self._min_tokens and self._stop_strings.completes(text):
            return True
        if self._parser is None or not self._parser.may_end:
            return False
        parser = deepcopy(self._parser)
        parser.feed(self._stop_strings.held + text)
        return parser.has_ended

    def _count_token(self, update: worker_pb2.StreamTokens, index: int) -> None:
        self.tokens += 1
        if update.logprobs:
            logprob = update.logprobs[index].chosen.logprob
            # Compared in this order, not a number counts as the least.
            self.logprob += logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
            self._waiting.append(TokenEntry(update.logprobs[index], self._decoded_chars))

    def _parse(self, text: str) -> str:
        if self._parser is not None and text:
            self._parts += self._parser.feed(text)
        return text

    def _parsed_delta(self, parser: OutputParser, finish_reason: str | None, entries: list[TokenEntry]) -> Delta | None:
        if self.is_finished:
            self._parts += parser.finish()
            if finish_reason == "stop" and parser.has_calls:
                finish_reason = "tool_calls"
        parts, self._parts = self._parts, []
        if not parts and not entries and not self.is_finished:
            return None
        texts = [part.text for part in parts if isinstance(part, Content)]
        others = tuple(parts) if len(texts) < len(parts) else ()
        return Delta(self.index, "".join(texts), self.tokens, finish_reason, entries, others)

    def _pass_on(self, piece: str) -> str:
        self._decoded_chars += len(piece)
        return self._stop_strings.feed(piece, counts=self.tokens > self._min_tokens)

    def _release(self, *, everything: bool) -> list[TokenEntry]:
        """The waiting tokens of whose text at least a part has been given."""
        released = []
        while self._waiting and (everything or self._waiting[0].text_offset < self._given_chars):
            released.append(self._waiting.popleft())
        return released
