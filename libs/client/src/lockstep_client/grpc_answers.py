"""Answers of `lockstep.v1.Inference` in the form of the REST API: chunks of a stream, and whole bodies."""

import base64
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lockstep_api.v1 import inference_pb2 as pb

from lockstep_client.sse import ServerSentEvent
from lockstep_client.transcript import DONE

Body = dict[str, Any]

_FINISHES: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_MIN_LOGPROB = -9999.0
"""Stands for the logarithm of a zero probability: JSON has no -inf."""
_DEFAULT_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _Generated:
    """What chunks and whole answers have in common."""

    def __init__(self, body: Mapping[str, Any], created: int, *, is_chat: bool) -> None:
        self._model = body.get("model")
        self._is_chat = is_chat
        self._created = created
        self._prefix = "chatcmpl-" if is_chat else "cmpl-"

    def _head(self, request_id: str, kind: str) -> Body:
        return {"id": self._prefix + request_id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, given: Sequence[pb.Logprobs]) -> Body | None:
        if not given:
            return None
        return _chat_logprobs(given) if self._is_chat else _text_logprobs(given)


class Streamed(_Generated):
    """An answer as chunks.

    Args:
        body: of the request.
        created: when it was made, in seconds since 1970.
        is_chat: whether it is that of a conversation.
        opened: the choices of which the client has something already, if it continues an answer.
    """

    is_stream = True

    def __init__(self, body: Mapping[str, Any], created: int, *, is_chat: bool, opened: Collection[int] = ()) -> None:
        super().__init__(body, created, is_chat=is_chat)
        self._wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._opened = set(opened)

    def take(self, message: pb.GenerateEvent) -> list[ServerSentEvent]:
        """The chunk of an event."""
        chunk = self._head(message.request_id, "chat.completion.chunk" if self._is_chat else "text_completion")
        if message.HasField("usage"):
            if not self._wants_usage:
                return []
            chunk |= {"choices": [], "usage": _usage(message.usage)}
        else:
            chunk |= {"choices": [self._choice(message)]}
            extras: Body = {"inexact": True} if message.inexact else {}
            if message.HasField("final_usage") and self._wants_usage:
                extras["usage"] = _usage(message.final_usage)
            if extras:
                chunk["lockstep"] = extras
        return [ServerSentEvent(json.dumps(chunk, ensure_ascii=False), message.event_id)]

    def end(self) -> list[ServerSentEvent] | bytes:
        """The end mark."""
        return [ServerSentEvent(DONE)]

    def _choice(self, message: pb.GenerateEvent) -> Body:
        choice: Body = {"index": message.choice}
        if self._is_chat:
            choice["delta"] = self._delta(message)
        else:
            choice["text"] = message.text
        choice["logprobs"] = self._logprobs(message.logprobs)
        choice["finish_reason"] = _FINISHES.get(message.finish)
        return choice

    def _delta(self, message: pb.GenerateEvent) -> Body:
        delta: Body = {}
        if message.choice not in self._opened:
            self._opened.add(message.choice)
            delta["role"] = "assistant"
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.text:
            delta["content"] = message.text
        if message.tool_calls:
            delta["tool_calls"] = [_call_piece(each) for each in message.tool_calls]
        return delta


class Whole(_Generated):
    """An answer in one piece; the arguments are those of `Streamed`."""

    is_stream = False

    def __init__(self, body: Mapping[str, Any], created: int, *, is_chat: bool) -> None:
        super().__init__(body, created, is_chat=is_chat)
        self._request_id = ""
        self._choices: dict[int, _Choice] = {}
        self._usage: Body | None = None
        self._is_inexact = False

    def take(self, message: pb.GenerateEvent) -> list[ServerSentEvent]:
        """Collect an event."""
        self._request_id = message.request_id
        if message.HasField("usage"):
            self._usage = _usage(message.usage)
        else:
            self._choices.setdefault(message.choice, _Choice()).take(message)
            self._is_inexact |= message.inexact
        return []

    def end(self) -> list[ServerSentEvent] | bytes:
        """The whole body."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            content: Body = {"message": choice.message} if self._is_chat else {"text": choice.text}
            more: Body = {"logprobs": self._logprobs(choice.logprobs), "finish_reason": choice.finish_reason}
            choices.append({"index": index, **content, **more})
        body = self._head(self._request_id, "chat.completion" if self._is_chat else "text_completion")
        body |= {"choices": choices, "usage": self._usage}
        if self._is_inexact:
            body["lockstep"] = {"inexact": True}
        return json.dumps(body, ensure_ascii=False).encode()


class _Choice:
    """One choice of a whole answer."""

    def __init__(self) -> None:
        self.logprobs: list[pb.Logprobs] = []
        self.finish_reason: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Body] = []

    def take(self, message: pb.GenerateEvent) -> None:
        self._texts.append(message.text)
        self._reasoning.append(message.reasoning)
        self.logprobs += message.logprobs
        self.finish_reason = self.finish_reason or _FINISHES.get(message.finish)
        for piece in message.tool_calls:
            if piece.name:
                self._calls.append(
                    {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
                )
            self._calls[piece.index]["function"]["arguments"] += piece.arguments

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> Body:
        message: Body = {"role": "assistant", "content": self.text, "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message |= {"content": self.text or None, "tool_calls": self._calls}
        return message


class Embeddings:
    """Vectors, in the order of their texts.

    Args:
        model: the model's name.
        is_base64: whether they are wanted as bytes of numbers of single precision, lowest byte first.
    """

    is_stream = False

    def __init__(self, model: str, *, is_base64: bool) -> None:
        self._model = model
        self._is_base64 = is_base64
        self._vectors: dict[int, Any] = {}
        self._tokens = 0

    def take(self, message: pb.EmbedEvent) -> list[ServerSentEvent]:
        """Collect a vector."""
        if message.HasField("usage"):
            self._tokens = message.usage.prompt_tokens
        else:
            self._vectors[message.index] = self._written(message.embedding)
        return []

    def end(self) -> list[ServerSentEvent] | bytes:
        """The whole body."""
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in sorted(self._vectors.items())
        ]
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return json.dumps({"object": "list", "data": data, "model": self._model, "usage": usage}).encode()

    def _written(self, vector: Sequence[float]) -> str | list[float]:
        if self._is_base64:
            return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        return list(vector)


def model_list(message: pb.ListModelsResponse) -> Body:
    """The body of /v1/models."""
    return {"object": "list", "data": [_model(each) for each in message.models]}


def single_model(message: pb.ListModelsResponse) -> Body:
    """The body of /v1/models/{id}."""
    return _model(message.models[0])


def _model(model: pb.Model) -> Body:
    given = model.default_sampling
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "lockstep",
        "root": model.id,
        "max_model_len": model.max_model_len,
        "default_sampling": {name: getattr(given, name) for name in _DEFAULT_SETTINGS if given.HasField(name)},
    }


def _usage(usage: pb.Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _call_piece(piece: pb.ToolCallPiece) -> Body:
    function: Body = {"arguments": piece.arguments}
    if not piece.name:
        return {"index": piece.index, "function": function}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name} | function}


def _chat_logprobs(given: Sequence[pb.Logprobs]) -> Body:
    content = [_token(each.chosen) | {"top_logprobs": [_token(top) for top in each.top]} for each in given]
    return {"content": content, "refusal": None}


def _token(token: pb.TokenLogprob) -> Body:
    text = token.token.decode(errors="replace")
    return {"token": text, "logprob": max(token.logprob, _MIN_LOGPROB), "bytes": list(token.token)}


def _text_logprobs(given: Sequence[pb.Logprobs]) -> Body:
    return {
        "tokens": [_text(each.chosen) for each in given],
        "token_logprobs": [max(each.chosen.logprob, _MIN_LOGPROB) for each in given],
        "top_logprobs": [_alternatives(each) for each in given],
    }


def _alternatives(logprobs: pb.Logprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one."""
    best: dict[str, float] = {}
    for token in (*logprobs.top, logprobs.chosen):
        # Several tokens may have the same text; the most likely one comes first.
        best.setdefault(_text(token), max(token.logprob, _MIN_LOGPROB))
    return best


def _text(token: pb.TokenLogprob) -> str:
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)
