"""OpenAI's response bodies: whole and in chunks, for chat and for plain completions."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep_api.v1 import inference_pb2, worker_pb2

from lockstep_router.choices import Delta, TokenEntry
from lockstep_router.generation import Usage
from lockstep_router.tokenizer import Tokenizer

Body = dict[str, Any]

_LEAST_LOGPROB = -9999.0
"""Stands for a probability of zero, whose logarithm JSON cannot tell."""


class Format(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, indices: Iterable[int]) -> list[tuple[int, Body]]:
        """Chunks that precede the first token, each with its choice."""

    def chunk(self, delta: Delta) -> Body:
        """One streamed chunk."""

    def usage_chunk(self, usage: Usage) -> Body:
        """The last chunk, if the client wants to know the usage."""

    def whole(self, choices: Sequence["Collected"], usage: Usage) -> Body:
        """The answer in one piece."""


@dataclass
class Collected:
    """All deltas of one choice put together."""

    text: str = ""
    finish_reason: str | None = None
    entries: list[TokenEntry] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.entries.extend(delta.entries)
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True)
class Head:
    """What all bodies of one answer have in common."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: list[Body]) -> Body:
        """A body with these choices."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage

    def opening(self, indices: Iterable[int]) -> list[tuple[int, Body]]:
        """The role, once for each choice."""
        return [(index, self._chunk(index, {"role": "assistant", "content": ""}, None, None)) for index in indices]

    def chunk(self, delta: Delta) -> Body:
        """A piece of the message."""
        content = {"content": delta.text} if delta.text or delta.entries else {}
        logprobs = self._content(delta.entries) if self._logprobs and delta.entries else None
        return self._chunk(delta.index, content, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> Body:
        """A chunk without choices."""
        return self._head.body("chat.completion.chunk", []) | {"usage": usage_body(usage)}

    def whole(self, choices: Sequence[Collected], usage: Usage) -> Body:
        """The messages."""
        bodies = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._content(choice.entries) if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._head.body("chat.completion", bodies) | {"usage": usage_body(usage)}

    def _chunk(self, index: int, delta: Body, logprobs: Body | None, finish_reason: str | None) -> Body:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        body = self._head.body("chat.completion.chunk", [choice])
        return body | {"usage": None} if self._include_usage else body

    def _content(self, entries: Sequence[TokenEntry]) -> Body:
        content = [
            self._token(entry.logprobs.chosen) | {"top_logprobs": [self._token(top) for top in entry.logprobs.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: inference_pb2.TokenLogprob) -> Body:
        raw = self._tokenizer.token_bytes(token.id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(token.logprob), "bytes": list(raw)}


class CompletionFormat:
    """/v1/completions. With `echo`, `prefixes` has the text that precedes each choice's own."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool, prefixes: Sequence[str] = ()
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._prefixes = prefixes

    def opening(self, indices: Iterable[int]) -> list[tuple[int, Body]]:
        """The echoed prompts, if wanted."""
        if not self._prefixes:
            return []
        return [(index, self._chunk(index, self._prefixes[index], None, None)) for index in indices]

    def chunk(self, delta: Delta) -> Body:
        """A piece of text."""
        logprobs = self._lists(delta.entries, delta.index) if self._logprobs and delta.entries else None
        return self._chunk(delta.index, delta.text, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> Body:
        """A chunk without choices."""
        return self._head.body("text_completion", []) | {"usage": usage_body(usage)}

    def whole(self, choices: Sequence[Collected], usage: Usage) -> Body:
        """The texts."""
        bodies = [
            {
                "index": index,
                "text": (self._prefixes[index] if self._prefixes else "") + choice.text,
                "logprobs": self._lists(choice.entries, index) if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._head.body("text_completion", bodies) | {"usage": usage_body(usage)}

    def _chunk(self, index: int, text: str, logprobs: Body | None, finish_reason: str | None) -> Body:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        body = self._head.body("text_completion", [choice])
        return body | {"usage": None} if self._include_usage else body

    def _lists(self, entries: Sequence[TokenEntry], index: int) -> Body:
        before = len(self._prefixes[index]) if self._prefixes else 0
        return {
            "tokens": [self._text(entry.logprobs.chosen) for entry in entries],
            "token_logprobs": [_finite(entry.logprobs.chosen.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry.logprobs) for entry in entries],
            "text_offset": [before + entry.text_offset for entry in entries],
        }

    def _alternatives(self, logprobs: inference_pb2.Logprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token in logprobs.top:
            # Tokens may share a text; the most likely comes first.
            best.setdefault(self._text(token), _finite(token.logprob))
        return best

    def _text(self, token: inference_pb2.TokenLogprob) -> str:
        raw: bytes = self._tokenizer.token_bytes(token.id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # As OpenAI shows parts of characters: several may share one text.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage_body(usage: Usage) -> Body:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_body(card: worker_pb2.ModelCard) -> Body:
    """An entry of /v1/models."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "lockstep",
        "max_model_len": card.context_length,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
