"""The response object, and the events of a streamed one."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lockstep_common.errors import ErrorCode, LockstepError
from pydantic_core import from_json, to_json

from lockstep_router.faces.openai.responses.items import Items
from lockstep_router.faces.openai.responses.schemas import ResponsesRequest
from lockstep_router.generation.choices import Delta
from lockstep_router.generation.generation import Usage
from lockstep_router.journals import RequestRecord
from lockstep_router.output import Content

Body = dict[str, Any]


class ResponseEvent(NamedTuple):
    """One event of a streamed response; its data are JSON."""

    number: int
    type: str
    data: bytes


class ResponsesFormat:
    """Writes one response, whole or as events.

    Args:
        options: what the response repeats of the request; see `options_of`.
        request_id: makes the ids.
        model: the model's name.
        created: seconds since 1970.
    """

    def __init__(self, options: str, request_id: str, model: str, created: int) -> None:
        self._head = _head(options, request_id, model, created)
        self._items = Items(request_id)
        self._status = "completed"
        self.number = 0
        """Of the next event."""

    def opening(self) -> list[ResponseEvent]:
        """The events before the first token."""
        response = self._response("in_progress")
        return self._numbered({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def events(self, delta: Delta) -> list[ResponseEvent]:
        """The events of a delta."""
        return self._numbered(self._take(delta))

    def count(self, delta: Delta) -> None:
        """Go on by the events of a delta, without writing them."""
        self.number += sum(1 for _ in self._take(delta))

    def closing(self, usage: Usage, more: Body) -> list[ResponseEvent]:
        """The last event, with the whole response and further fields."""
        response = self._body(usage, more)
        return self._numbered([{"type": f"response.{self._status}", "response": response}])

    def failure(self, error: LockstepError, usage: Usage) -> list[ResponseEvent]:
        """The events of an answer that cannot go on."""
        # An answer that may go on elsewhere is not closed: a client that resumes or repeats it gets these events there.
        events = [] if error.meaning.retryable else list(self._items.finish("incomplete"))
        limits = (ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.RESOURCE_EXHAUSTED)
        code = "rate_limit_exceeded" if error.code in limits else "server_error"
        # OpenAI's field knows few codes; the one in `lockstep` says whether another try may help.
        failed = {
            "error": {"code": code, "message": str(error)},
            "usage": _usage(usage),
            "lockstep": {"code": error.code.value},
        }
        return self._numbered([*events, {"type": "response.failed", "response": self._response("failed") | failed}])

    def add(self, delta: Delta) -> None:
        """Collect a delta of a response that is sent in one piece."""
        for _ in self._take(delta):
            pass

    def complete_body(self, usage: Usage, more: Body) -> list[bytes]:
        """The complete response with further fields, as JSON in one piece."""
        return [to_json(self._body(usage, more))]

    def _body(self, usage: Usage, more: Body) -> Body:
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

    def _numbered(self, events: Iterable[Body]) -> list[ResponseEvent]:
        numbered = []
        for event in events:
            data = to_json(event | {"sequence_number": self.number})
            numbered.append(ResponseEvent(self.number, event["type"], data))
            self.number += 1
        return numbered


def response_format_of(record: RequestRecord) -> ResponsesFormat:
    """The format of the response to a resumable request."""
    return ResponsesFormat(record.style.options, record.request_id, record.model, record.created)


def options_of(body: ResponsesRequest) -> str:
    """What the response repeats of its request, as JSON."""
    reasoning = body.reasoning
    options = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "temperature": body.temperature,
        "text": {"format": _text_format(body)},
        "tool_choice": _tool_choice(body),
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_p": body.top_p,
        "user": body.user,
    }
    return to_json(options).decode()


def _head(options: str, request_id: str, model: str, created: int) -> Body:
    """The fields that do not change while the answer grows."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **from_json(options),
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
