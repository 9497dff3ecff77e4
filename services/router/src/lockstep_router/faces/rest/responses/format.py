"""The response object, and the events of a streamed one."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import to_json

from lockstep_router.faces.rest.responses.items import Items
from lockstep_router.faces.rest.responses.schemas import ResponsesRequest
from lockstep_router.generation.choices import Delta
from lockstep_router.generation.generation import Usage
from lockstep_router.output import Content

Body = dict[str, Any]


class ResponsesFormat:
    """Writes one response, whole or as events.

    Args:
        body: the request; the response repeats its options.
        request_id: makes the ids.
        model: the model's name.
    """

    def __init__(self, body: ResponsesRequest, request_id: str, model: str) -> None:
        self._head = _head(body, request_id, model)
        self._items = Items(request_id)
        self._status = "completed"
        self._number = 0

    def opening(self) -> bytes:
        """The events before the first token."""
        response = self._response("in_progress")
        return self._written({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def events(self, delta: Delta) -> bytes:
        """The events of a delta."""
        return self._written(self._take(delta))

    def closing(self, usage: Usage, more: Body) -> bytes:
        """The last event, with the whole response and further fields."""
        response = self.whole(usage, more)
        return self._written([{"type": f"response.{self._status}", "response": response}])

    def failure(self, error: LockstepError, usage: Usage) -> bytes:
        """The events of an answer that cannot go on."""
        events = list(self._items.finish("incomplete"))
        limits = (ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.RESOURCE_EXHAUSTED)
        code = "rate_limit_exceeded" if error.code in limits else "server_error"
        failed = {"error": {"code": code, "message": str(error)}, "usage": _usage(usage)}
        return self._written([*events, {"type": "response.failed", "response": self._response("failed") | failed}])

    def add(self, delta: Delta) -> None:
        """Collect a delta of a response that is sent in one piece."""
        for _ in self._take(delta):
            pass

    def whole(self, usage: Usage, more: Body) -> Body:
        """The complete response with further fields."""
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._response(self._status) | {"incomplete_details": reason, "usage": _usage(usage)} | more

    def _take(self, delta: Delta) -> Iterator[Body]:
        for part in delta.parts or ((Content(delta.text),) if delta.text else ()):
            yield from self._items.add(part)
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._items.finish_all(self._status)

    def _response(self, status: str) -> Body:
        return self._head | {"status": status, "output": self._items.bodies}

    def _written(self, events: Iterable[Body]) -> bytes:
        written = []
        for event in events:
            data = to_json(event | {"sequence_number": self._number})
            written.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._number += 1
        return b"".join(written)


def _head(body: ResponsesRequest, request_id: str, model: str) -> Body:
    """The fields that do not change while the answer grows."""
    reasoning = body.reasoning
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": _text_format(body)},
        "tool_choice": _tool_choice(body),
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _text_format(body: ResponsesRequest) -> Body:
    form = None if body.text is None else body.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _tool_choice(body: ResponsesRequest) -> Body | str:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _tool(tool: Body) -> Body:
    return tool | {"strict": bool(tool["strict"])}


def _usage(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
