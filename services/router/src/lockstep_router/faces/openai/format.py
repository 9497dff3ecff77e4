"""OpenAI's response bodies: in one piece and in chunks, for chat and for plain completions."""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep_api.v1 import inference_pb2, worker_pb2
from pydantic_core import to_json

from lockstep_router.faces.openai.chat_messages import GrowingMessage, delta_body
from lockstep_router.generation.choices import MIN_LOGPROB, Delta, TokenEntry
from lockstep_router.generation.generation import Usage
from lockstep_router.generation.preparation import Prepared
from lockstep_router.generation.sampling import MODEL_SETTINGS
from lockstep_router.generation.style import Style
from lockstep_router.journals import RequestRecord
from lockstep_router.text.tokenizer import Tokenizer

Body = dict[str, Any]

Pieces = Sequence[bytes | bytearray]
"""JSON of any size, in pieces that follow each other. Joining all of them could stop the event loop for seconds."""

_BLOCK_BYTES = 64 << 10
"""Size from which on a growing piece is not added to."""


class Format(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, indices: Iterable[int]) -> list[Body]:
        """Chunks that precede the first token."""

    def chunk(self, delta: Delta, more: Body) -> bytes:
        """One streamed chunk with further fields, as JSON."""

    def text_ends(self, index: int) -> tuple[bytes, bytes]:
        """The JSON before and after the text, as it stands between quotes, in a choice's chunks of nothing else."""

    def usage_chunk(self, usage: Usage) -> Body:
        """The last chunk, with the usage, if the client asked for it."""

    def add(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""

    def keep(self, indices: Sequence[int]) -> None:
        """Answer with these choices alone, in this order, once all deltas are collected."""

    def complete_body(self, usage: Usage, more: Body) -> Pieces:
        """The collected answer with further fields, as JSON."""


_MARK = secrets.token_hex(16)
"""Text in place of a chunk's own; no name or id has it."""


class TextChunks:
    """Chunks of nothing but text as JSON: most tokens give one. All of a choice are alike but for their text."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[bytes, bytes]] = {}
        """By the choice: the JSON before and after the text."""

    def json(self, chunk: Callable[[Delta], Body], delta: Delta, more: Body) -> bytes:
        """Any chunk, which `chunk` makes, with further fields."""
        if more or delta.entries or delta.parts or delta.finish_reason is not None or not delta.text:
            return to_json(chunk(delta) | more)
        before, after = self.ends(chunk, delta.index)
        return before + to_json(delta.text)[1:-1] + after

    def ends(self, chunk: Callable[[Delta], Body], index: int) -> tuple[bytes, bytes]:
        """The JSON before and after the text of a choice's chunks, as it stands between quotes."""
        ends = self._ends.get(index)
        if ends is None:
            before, _, after = to_json(chunk(Delta(index, _MARK, 0))).partition(_MARK.encode())
            ends = self._ends[index] = (before, after)
        return ends


class Column:
    """A named list as JSON, which grows in pieces."""

    def __init__(self, name: str) -> None:
        self._pieces = [bytearray(to_json(name) + b":[")]
        self._separator = b""

    def add(self, items: bytes) -> None:
        """Append items, which are JSON with commas between them."""
        if len(self._pieces[-1]) >= _BLOCK_BYTES:
            self._pieces.append(bytearray())
        self._pieces[-1] += self._separator + items
        self._separator = b","

    @property
    def pieces(self) -> Pieces:
        """The list of all items."""
        return [*self._pieces, b"]"]


class Collected:
    """One choice of an answer that is sent in one piece.

    Log probabilities are turned into JSON as they arrive. Doing it at the end, for thousands of tokens with twenty
    alternatives each, would block the event loop for seconds.
    """

    def __init__(self, columns: Iterable[str], more: bytes = b"") -> None:
        self._more = more
        """JSON text that follows the columns."""
        self.finish_reason: str | None = None
        self._texts: list[str] = []
        self._columns = {name: Column(name) for name in columns}

    def add(self, delta: Delta, logprobs: Body) -> None:
        """Append a delta and, by column, the log probabilities of its tokens."""
        self.finish_reason = delta.finish_reason
        self._texts.append(delta.text)
        for name, column in self._columns.items():
            if delta.entries:
                column.add(to_json(logprobs[name])[1:-1])

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self._texts)

    def finish(self, body: Body) -> Iterator[bytes | bytearray]:
        """The choice as JSON, with its log probabilities if it has any. The text is in the first piece."""
        if not self._columns:
            yield to_json(body | {"logprobs": None})
            return
        before = to_json(body)[:-1] + b',"logprobs":{'
        for column in self._columns.values():
            yield before
            yield from column.pieces
            before = b","
        yield self._more + b"}}"


@dataclass(slots=True)
class Head:
    """The fields that all bodies of one answer share. Not changed after construction; not frozen, for speed."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: list[Body]) -> Body:
        """A body with these choices."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def complete_body(self, kind: str, choices: Iterable[Iterable[bytes | bytearray]], more: Body) -> Pieces:
        """A body as JSON, made of choices that are JSON already and of further fields."""
        head = to_json({"id": self.id, "object": kind, "created": self.created, "model": self.model})[:-1]
        pieces: list[bytes | bytearray] = [head + b',"choices":[']
        for choice in choices:
            pieces += choice
            pieces.append(b",")
        pieces[-1] = b"]," + to_json(more)[1:]
        return pieces


class ChatFormat:
    """Writes answers of /v1/chat/completions."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, choices: int, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._collected = [Collected(("content",) if logprobs else (), b',"refusal":null') for _ in range(choices)]
        self._messages = [GrowingMessage() for _ in range(choices)]
        self._text_chunks = TextChunks()

    def opening(self, indices: Iterable[int]) -> list[Body]:
        """The role, once for each choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None) for index in indices]

    def _piece(self, delta: Delta) -> Body:
        content = {"content": delta.text} if delta.text or delta.entries else {}
        content |= delta_body(delta.parts)
        logprobs = self._columns(delta.entries) | {"refusal": None} if self._logprobs and delta.entries else None
        return self._chunk(delta.index, content, logprobs, delta.finish_reason)

    def chunk(self, delta: Delta, more: Body) -> bytes:
        """A piece of the message with further fields, as JSON."""
        return self._text_chunks.json(self._piece, delta, more)

    def text_ends(self, index: int) -> tuple[bytes, bytes]:
        """The JSON around a piece of text."""
        return self._text_chunks.ends(self._piece, index)

    def usage_chunk(self, usage: Usage) -> Body:
        """A chunk without choices."""
        return self._head.body("chat.completion.chunk", []) | {"usage": usage_body(usage)}

    def add(self, delta: Delta) -> None:
        """Collect a piece of a message."""
        self._collected[delta.index].add(delta, self._columns(delta.entries) if self._logprobs else {})
        for part in delta.parts:
            self._messages[delta.index].add(part)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop the other messages."""
        self._collected = [self._collected[index] for index in indices]

    def complete_body(self, usage: Usage, more: Body) -> Pieces:
        """The messages."""
        bodies: list[Body] = [
            {
                "index": index,
                "message": self._messages[index].body(choice.text),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._collected)
        ]
        more = {"usage": usage_body(usage), **more}
        choices = [choice.finish(body) for choice, body in zip(self._collected, bodies, strict=True)]
        return self._head.complete_body("chat.completion", choices, more)

    def _chunk(self, index: int, delta: Body, logprobs: Body | None, finish_reason: str | None) -> Body:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        body = self._head.body("chat.completion.chunk", [choice])
        return body | {"usage": None} if self._include_usage else body

    def _columns(self, entries: Sequence[TokenEntry]) -> Body:
        content = [
            self._token(entry.logprobs.chosen) | {"top_logprobs": [self._token(top) for top in entry.logprobs.top]}
            for entry in entries
        ]
        return {"content": content}

    def _token(self, token: inference_pb2.TokenLogprob) -> Body:
        raw = self._tokenizer.token_bytes(token.id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(token.logprob), "bytes": list(raw)}


class CompletionFormat:
    """Writes answers of /v1/completions. With `echo`, `prefixes` has the prompt's text for each choice."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        choices: int,
        logprobs: bool,
        include_usage: bool,
        prefixes: Sequence[str] = (),
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._prefixes = prefixes
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs else ()
        self._collected = [Collected(columns) for _ in range(choices)]
        self._text_chunks = TextChunks()

    def opening(self, indices: Iterable[int]) -> list[Body]:
        """The echoed prompts, if the client asked for them."""
        if not self._prefixes:
            return []
        return [self._chunk(index, self._prefixes[index], None, None) for index in indices]

    def _piece(self, delta: Delta) -> Body:
        logprobs = self._columns(delta.entries, delta.index) if self._logprobs and delta.entries else None
        return self._chunk(delta.index, delta.text, logprobs, delta.finish_reason)

    def chunk(self, delta: Delta, more: Body) -> bytes:
        """A piece of text with further fields, as JSON."""
        return self._text_chunks.json(self._piece, delta, more)

    def text_ends(self, index: int) -> tuple[bytes, bytes]:
        """The JSON around a piece of text."""
        return self._text_chunks.ends(self._piece, index)

    def usage_chunk(self, usage: Usage) -> Body:
        """A chunk without choices."""
        return self._head.body("text_completion", []) | {"usage": usage_body(usage)}

    def add(self, delta: Delta) -> None:
        """Collect a piece of a text."""
        self._collected[delta.index].add(delta, self._columns(delta.entries, delta.index) if self._logprobs else {})

    def keep(self, indices: Sequence[int]) -> None:
        """Drop the other texts."""
        self._collected = [self._collected[index] for index in indices]
        self._prefixes = [self._prefixes[index] for index in indices] if self._prefixes else ()

    def complete_body(self, usage: Usage, more: Body) -> Pieces:
        """The texts."""
        choices = [
            choice.finish({"index": index, "text": choice.text, "finish_reason": choice.finish_reason})
            for index, choice in enumerate(self._collected)
        ]
        if self._prefixes:
            # All choices of a prompt share its JSON: sixteen copies of a long one would block the event loop.
            shared = {prefix: to_json(prefix)[1:-1] for prefix in set(self._prefixes)}
            choices = [_echoing(shared[prefix], choice) for prefix, choice in zip(self._prefixes, choices, strict=True)]
        more = {"usage": usage_body(usage), **more}
        return self._head.complete_body("text_completion", choices, more)

    def _chunk(self, index: int, text: str, logprobs: Body | None, finish_reason: str | None) -> Body:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        body = self._head.body("text_completion", [choice])
        return body | {"usage": None} if self._include_usage else body

    def _columns(self, entries: Sequence[TokenEntry], index: int) -> Body:
        before = len(self._prefixes[index]) if self._prefixes else 0
        return {
            "tokens": [self._text(entry.logprobs.chosen) for entry in entries],
            "token_logprobs": [_finite(entry.logprobs.chosen.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry.logprobs) for entry in entries],
            "text_offset": [before + entry.text_offset for entry in entries],
        }

    def _alternatives(self, logprobs: inference_pb2.Logprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one."""
        best: dict[str, float] = {}
        for token in (*logprobs.top, logprobs.chosen):
            # Several tokens may have the same text; the most likely one comes first.
            best.setdefault(self._text(token), _finite(token.logprob))
        return best

    def _text(self, token: inference_pb2.TokenLogprob) -> str:
        raw: bytes = self._tokenizer.token_bytes(token.id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # OpenAI's form for parts of characters; several tokens may have the same text.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _echoing(prefix: bytes, choice: Iterator[bytes | bytearray]) -> Iterator[bytes | bytearray]:
    """A choice with more JSON at the beginning of its text."""
    before, name, text = next(choice).partition(b'"text":"')
    yield before + name
    yield prefix
    yield text
    yield from choice


def make_format(style: Style, request_id: str, prepared: Prepared) -> Format:
    """The format of the answer to one request."""
    head = Head(_answer_id(style, request_id), prepared.card.name)
    texts = [prompt.text for prompt in prepared.prompts]
    return _format(style, head, prepared.tokenizer, len(prepared.journals), texts)


def format_of(record: RequestRecord, tokenizer: Tokenizer) -> Format:
    """The format of the answer to a resumable request."""
    head = Head(_answer_id(record.style, record.request_id), record.model, record.created)
    return _format(record.style, head, tokenizer, len(record.choices), record.prefixes)


def _answer_id(style: Style, request_id: str) -> str:
    return f"chatcmpl-{request_id}" if style.kind == "chat" else f"cmpl-{request_id}"


def _format(style: Style, head: Head, tokenizer: Tokenizer, choices: int, texts: Sequence[str]) -> Format:
    """The format; `texts` are those of the prompts."""
    if style.kind == "chat":
        return ChatFormat(head, tokenizer, choices=choices, logprobs=style.logprobs, include_usage=style.include_usage)
    per_prompt = choices // len(texts)
    return CompletionFormat(
        head,
        tokenizer,
        choices=choices,
        logprobs=style.logprobs,
        include_usage=style.include_usage,
        prefixes=[text for text in texts for _ in range(per_prompt)] if style.echo else (),
    )


def usage_body(usage: Usage) -> Body:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def model_body(card: worker_pb2.ModelCard) -> Body:
    """An entry of /v1/models."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "lockstep",
        # vLLM's clients read it: the model that was loaded, whatever names it is served by.
        "root": card.name,
        "max_model_len": card.context_length,
        "default_sampling": {
            field: _shortest(getattr(card.default_sampling, field))
            for field in MODEL_SETTINGS
            if card.default_sampling.HasField(field)
        },
    }


def _shortest(value: float) -> float:
    """A number of a message with single precision, in the fewest digits that mean it: 0.7, not 0.699999988."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _finite(logprob: float) -> float:
    # Compared in this order, not a number counts as the least.
    return logprob if MIN_LOGPROB < logprob < math.inf else MIN_LOGPROB


def inexact_mark(*, is_inexact: bool) -> Body:
    """Extra fields of an answer that was continued inexactly; see the setting `exact_failover`."""
    return {"lockstep": {"inexact": True}} if is_inexact else {}
