"""The items of a response as they grow, and the events that say so."""

from collections.abc import Iterator
from typing import Any

from lockstep_router.output import CallArguments, CallName, Content, Part, Reasoning

Body = dict[str, Any]

_PART_OF = {"message": "output_text", "reasoning": "reasoning_text"}
"""The type of an item's only content part, which also names its events."""


class Items:
    """Makes items of an answer's parts. Each method returns events without their sequence numbers.

    Args:
        request_id: makes the items' ids.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        """Of the item that grows."""
        self._done: list[Body] = []
        self._growing: Body | None = None

    @property
    def bodies(self) -> list[Body]:
        """The items that are complete."""
        return self._done

    def add(self, part: Part) -> Iterator[Body]:
        """Append a part."""
        match part:
            case Content():
                yield from self._add_text("message", part.text)
            case Reasoning():
                yield from self._add_text("reasoning", part.text)
            case CallName():
                yield from self.finish("completed")
                item = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
                yield from self._begin("fc", item)
            case CallArguments():
                self._texts.append(part.text)
                yield self._event("response.function_call_arguments.delta", delta=part.text)

    def finish(self, status: str) -> Iterator[Body]:
        """Complete the item that grows, if there is one."""
        item, text = self._growing, "".join(self._texts)
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            kind = _PART_OF[item["type"]]
            part = _part(kind, text)
            item["content"] = [part]
            more: Body = {"logprobs": []} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", content_index=0, text=text, **more)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        self._done.append(item)
        self._growing, self._texts = None, []

    def finish_all(self, status: str) -> Iterator[Body]:
        """Complete the answer; one without any text has an empty message."""
        if not self._done and self._growing is None:
            yield from self._begin_text("message")
        yield from self.finish(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Body]:
        if self._growing is None or self._growing["type"] != kind:
            yield from self.finish("completed")
            yield from self._begin_text(kind)
        self._texts.append(text)
        more: Body = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{_PART_OF[kind]}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str) -> Iterator[Body]:
        if kind == "message":
            yield from self._begin("msg", {"type": kind, "role": "assistant", "content": []})
        else:
            yield from self._begin("rs", {"type": kind, "summary": [], "content": []})
        yield self._event("response.content_part.added", content_index=0, part=_part(_PART_OF[kind], ""))

    def _begin(self, prefix: str, item: Body) -> Iterator[Body]:
        index = len(self._done)
        self._growing = {"id": f"{prefix}_{self._request_id}_{index}", "status": "in_progress"} | item
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(self._growing)}

    def _event(self, kind: str, **fields: Any) -> Body:
        assert self._growing is not None
        return {"type": kind, "item_id": self._growing["id"], "output_index": len(self._done)} | fields


def _part(kind: str, text: str) -> Body:
    part: Body = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part
