"""How a request's answers are split into reasoning, content and tool calls."""

import hashlib
from dataclasses import dataclass, replace

from lockstep_api.v1 import worker_pb2

from lockstep_router.generation.request import Conversation, PromptSource
from lockstep_router.output import ModelFormats, OutputParser
from lockstep_router.output.formats import TOOL_FORMATS
from lockstep_router.output.json_calls import Calls, JsonCalls
from lockstep_router.output.reasoning import REASONING_FORMATS, ReasoningSplit
from lockstep_router.text.detokenizer import Detokenizer
from lockstep_router.text.tokenizer import Tokenizer

_TAIL_TOKENS = 32
"""Tokens at a prompt's end that are searched for a marker of reasoning: the marker and spaces after it."""
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MISTRAL_ID_CHARS = 9


@dataclass(frozen=True)
class Parsing:
    """How the answers to one request are parsed. Plain data, so that it can be stored with the request."""

    reasoning: str | None = None
    """Name of the format of reasoning; None: there is none."""
    is_open: bool = False
    """The prompt ends with the opening marker of reasoning."""
    tool_format: str | None = None
    """Name of the format of tool calls; None: there are no tools."""
    names: frozenset[str] = frozenset()
    """Of the functions."""
    most_calls: int | None = None
    """None: no limit."""

    @property
    def is_known(self) -> bool:
        """Whether this router has the formats: what is stored may come from a router of another version."""
        has_calls = self.tool_format is None or self.tool_format in TOOL_FORMATS
        return has_calls and (self.reasoning is None or self.reasoning in REASONING_FORMATS)

    def visible_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that are markers: their text is needed."""
        markers = set() if self.tool_format is None else set(TOOL_FORMATS[self.tool_format].markers)
        if self.reasoning is not None:
            syntax = REASONING_FORMATS[self.reasoning]
            markers |= {syntax.opening, syntax.closing}
        return tokenizer.special_ids_of(markers)

    def parser(self, stream_id: str) -> OutputParser:
        """The parser of one stream. The calls of a stream always have the same ids."""

        def new_id(index: int) -> str:
            return _call_id(f"{stream_id}:{index}", is_mistral=self.tool_format == "mistral")

        syntax = None if self.reasoning is None else REASONING_FORMATS[self.reasoning]
        reasoning = None if syntax is None else ReasoningSplit(syntax, is_open=self.is_open)
        if self.tool_format is None:
            return OutputParser(reasoning, None)
        calls = Calls(self.names.__contains__, new_id, self.most_calls)
        return OutputParser(reasoning, JsonCalls(TOOL_FORMATS[self.tool_format], calls))


def choose_parsing(
    source: PromptSource, prompt_ids: list[int], tokenizer: Tokenizer, card: worker_pb2.ModelCard, formats: ModelFormats
) -> Parsing | None:
    """How the answers to a prompt are parsed; None if they are content alone."""
    if not isinstance(source, Conversation) or tokenizer.chat_template is None:
        return None
    found, use = formats.of(card.name, tokenizer.chat_template.source), source.tools
    if found.reasoning is None and use is None:
        return None
    parsing = Parsing(found.reasoning)
    if found.reasoning is not None:
        marker, visible_ids = REASONING_FORMATS[found.reasoning].opening, parsing.visible_ids(tokenizer)
        parsing = replace(parsing, is_open=_ends_with(prompt_ids, marker, tokenizer, visible_ids))
    if use is None:
        return parsing
    return replace(
        parsing,
        tool_format=found.tools,
        names=frozenset(tool.name for tool in use.tools),
        most_calls=None if use.is_parallel else 1,
    )


def _ends_with(ids: list[int], marker: str, tokenizer: Tokenizer, visible_ids: frozenset[int]) -> bool:
    """Whether a prompt ends with a marker and spaces."""
    detokenizer = Detokenizer(tokenizer, visible_ids)
    text = "".join(detokenizer.step(token_id) for token_id in ids[-_TAIL_TOKENS:]) + detokenizer.flush()
    return text.rstrip().endswith(marker)


def _call_id(text: str, *, is_mistral: bool) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=12)
    if not is_mistral:
        return f"call_{digest.hexdigest()}"
    number, chars = int.from_bytes(digest.digest()), ""
    for _ in range(_MISTRAL_ID_CHARS):
        number, digit = divmod(number, len(_ID_DIGITS))
        chars += _ID_DIGITS[digit]
    return chars
