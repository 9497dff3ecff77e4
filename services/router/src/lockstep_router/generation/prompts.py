"""Turns the prompts of a request into token ids and checks them against the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.generation.request import Conversation, InfillPrompt, PromptSource, TextPrompt, TokenPrompt, Turn
from lockstep_router.generation.template_input import template_input
from lockstep_router.output import ModelFormats
from lockstep_router.text.threads import INLINE_CHARS, TextThreads
from lockstep_router.text.tokenizer import ControlTokenError, Tokenizer

MAX_CHARS_PER_TOKEN = 64
"""A prompt with more characters than this for each token of the context is refused without tokenizing it."""

_CHARS_OF_A_TOKEN = 4
"""Approximate characters of a token, to decide whether a list of ids is decoded in a thread."""
_CHARS_OF_A_TURN = 64
"""Approximate characters that a chat template adds to each message."""


@dataclass(slots=True)
class Prompt:
    """One prompt as token ids. Not changed after construction; not frozen, for speed."""

    ids: list[int]
    text: str = ""
    """Empty unless `keep_text` was set."""
    end_id: int | None = None
    """Ends the answer, like the model's end-of-text ids."""


class PromptEncoder:
    """Turns prompts into token ids; long prompts are encoded in threads.

    Args:
        threads: the threads for long texts.
        control_tokens: whether control tokens written in a prompt count as such, not as text.
        formats: in which models write tool calls.
    """

    def __init__(self, threads: TextThreads, *, control_tokens: bool, formats: ModelFormats) -> None:
        self.formats = formats
        self._threads = threads
        self._control_tokens = control_tokens

    async def encode_all(
        self,
        sources: Sequence[PromptSource],
        tokenizer: Tokenizer,
        card: worker_pb2.ModelCard,
        *,
        keep_text: bool = False,
        check: Callable[[PromptSource, Prompt], None] = lambda _source, _prompt: None,
    ) -> list[Prompt]:
        """Each prompt's token ids and, if wanted, its text.

        Args:
            sources: the prompts.
            tokenizer: of the model.
            card: of the model.
            keep_text: whether the texts are wanted.
            check: called with each encoded prompt; an error that it raises ends the work.

        Raises:
            LockstepError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED, naming the prompt's field; OVERLOADED.
        """
        together = sum(map(_chars, sources)) if len(sources) > 1 else 0
        prompts = []
        for source in sources:
            prompt = await self._encode(source, tokenizer, card, together, keep_text=keep_text)
            check(source, prompt)
            prompts.append(prompt)
        return prompts

    async def _encode(
        self, source: PromptSource, tokenizer: Tokenizer, card: worker_pb2.ModelCard, together: int, *, keep_text: bool
    ) -> Prompt:
        end_id: int | None = None
        try:
            match source:
                case TextPrompt():
                    ids, text = await self._encode_text(source, tokenizer, card, together), source.text
                case TokenPrompt():
                    check_ids(source.ids, card, source.field)
                    ids, text = source.ids, await self.decode(source.ids, tokenizer, together) if keep_text else ""
                case InfillPrompt():
                    ids, text = await self._encode_infill(source, tokenizer, card, together), source.prefix
                    end_id = None if tokenizer.infill is None else tokenizer.infill.end
                case Conversation():
                    ids, text = await self._encode_conversation(source, tokenizer, card), ""
        except ControlTokenError as error:
            raise invalid(source.field, str(error)) from error
        if not ids:
            raise invalid(source.field, "must have at least one token")
        return Prompt(ids, text if keep_text else "", end_id)

    async def decode(self, ids: list[int], tokenizer: Tokenizer, together: int = 0) -> str:
        """The text of token ids.

        Args:
            ids: any.
            tokenizer: of their model.
            together: characters of all prompts of the request, if it has several.

        Raises:
            LockstepError: OVERLOADED, too much text is waiting.
        """
        chars = _CHARS_OF_A_TOKEN * len(ids)
        return await self._threads.run(lambda: tokenizer.decode_long(ids), chars, chars_together=together)

    async def _encode_text(
        self, source: TextPrompt, tokenizer: Tokenizer, card: worker_pb2.ModelCard, together: int
    ) -> list[int]:
        chars = len(source.text)
        _check_chars(chars, card, source.field)

        def encode() -> list[int]:
            return tokenizer.encode(
                source.text, add_special_tokens=source.add_special_tokens, control_tokens=self._control_tokens
            )

        if max(chars, together) <= INLINE_CHARS:
            return encode()
        return await self._threads.run(encode, chars, chars_together=together)

    async def _encode_infill(
        self, source: InfillPrompt, tokenizer: Tokenizer, card: worker_pb2.ModelCard, together: int
    ) -> list[int]:
        if tokenizer.infill is None:
            raise invalid(
                "suffix", f"is not supported by {card.name!r}: its tokenizer has no tokens for a gap in a text"
            )
        chars = len(source.prefix) + len(source.suffix)
        _check_chars(chars, card, source.field)

        def encode() -> list[int]:
            return tokenizer.encode_infill(source.prefix, source.suffix, control_tokens=self._control_tokens)

        ids = await self._threads.run(encode, chars, chars_together=together)
        check_ids(ids, card, source.field)
        return ids

    async def _encode_conversation(
        self, source: Conversation, tokenizer: Tokenizer, card: worker_pb2.ModelCard
    ) -> list[int]:
        if (template := tokenizer.chat_template) is None:
            raise invalid("model", f"{card.name!r} has no {_what_lacks(tokenizer)}; use /v1/completions")
        _check_chars(_chars(source), card, source.field)

        def encode() -> list[int]:
            given = template_input(source, template, card, self.formats)
            text = tokenizer.render(
                given.messages, tools=given.tools, fields=given.fields, control_tokens=self._control_tokens
            )
            _check_chars(len(text), card, source.field)
            return tokenizer.encode_rendered(text, add_special_tokens=source.add_special_tokens)

        chars = _chars(source)
        return await self._threads.run(encode, max(chars, INLINE_CHARS + 1) if template.is_slow else chars)


def _what_lacks(tokenizer: Tokenizer) -> str:
    return f"usable {tokenizer.template_problem}" if tokenizer.template_problem else "chat template"


def _chars(source: PromptSource) -> int:
    """The length of a prompt as text, about."""
    match source:
        case TokenPrompt():
            return _CHARS_OF_A_TOKEN * len(source.ids)
        case TextPrompt():
            return len(source.text)
        case InfillPrompt():
            return len(source.prefix) + len(source.suffix)
        case Conversation():
            tools = () if source.tools is None else source.tools.tools
            return sum(map(_chars_of_turn, source.turns)) + sum(tool.chars for tool in tools)


def _chars_of_turn(turn: Turn) -> int:
    calls = sum(len(call.arguments) + _CHARS_OF_A_TURN for call in turn.calls)
    return len(turn.content) + len(turn.reasoning) + calls + _CHARS_OF_A_TURN


def check_ids(ids: Sequence[int], card: worker_pb2.ModelCard, field: str) -> None:
    """Raise INVALID_REQUEST for ids that are no tokens of the model."""
    if not ids or max(ids) < card.vocab_size:
        return
    index, token_id = next((index, each) for index, each in enumerate(ids) if each >= card.vocab_size)
    raise invalid(f"{field}[{index}]", f"is {token_id}, outside the vocabulary of {card.vocab_size}")


def _check_chars(chars: int, card: worker_pb2.ModelCard, field: str) -> None:
    limit = MAX_CHARS_PER_TOKEN * card.context_length
    if chars > limit:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{field} has {chars} characters, but this model's maximum context length is {card.context_length} tokens,"
            f" for which at most {limit} are taken",
            field=field,
        )
