"""What has been given of a streamed answer, so that a repeat of the stream gives only what is new.

The repeat has the same tokens, but its events may hold other numbers of them, so each field of each choice is
compared and cut by itself: texts by characters, lists of log probabilities by entries.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from lockstep_client.channels import DivergedError, Entries, Text
from lockstep_client.errors import LockstepError, from_body
from lockstep_client.sse import ServerSentEvent

DONE = "[DONE]"

_TEXTS = frozenset({"text", "content", "refusal", "reasoning", "reasoning_content", "arguments"})
"""Fields whose pieces are joined; others are sent once."""
_OWN = frozenset({"id", "created", "system_fingerprint"})
"""Fields that a repeat may have other values for: it keeps the first ones."""

_CONTENT = frozenset({"choices", "usage", "lockstep"})

Path = tuple[object, ...]


class Transcript:
    """Passes the events of a stream on, and those of its repeats without what has been given."""

    def __init__(self, choices: int | None = None, *, wants_usage: bool = False) -> None:
        """Begin with nothing.

        Args:
            choices: of the answer; None: unknown.
            wants_usage: whether the answer ends with its usage.
        """
        self._choices = choices
        self._wants_usage = wants_usage
        self._usage: object = None
        """The usage that the last finish had with it; its own event follows."""
        self.events = 0
        """Events that have been passed on."""
        self._texts: dict[Path, Text] = {}
        self._entries: dict[Path, Entries] = {}
        self._once: dict[Path, object] = {}
        self._head: dict[str, Any] = {}
        self._frame: dict[str, Any] = {}
        """What all chunks have alike."""
        self._has_usage = False
        self._is_repeat = False
        self._is_new = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """That of the answer to a request with this body."""
        options = body.get("stream_options")
        wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return cls(_choices_of(body), wants_usage=wants_usage)

    @property
    def texts(self) -> dict[int, str]:
        """The text so far, by the choice."""
        found = {}
        for path, text in self._texts.items():
            if path[1:] in (("text",), ("delta", "content")) and isinstance(path[0], int):
                found[path[0]] = "".join(text.given)
        return dict(sorted(found.items()))

    def start_over(self) -> None:
        """What comes from now on is a repeat from the beginning."""
        self._is_repeat = True
        for channel in self._channels():
            channel.start_over()

    def pass_on(self, event: ServerSentEvent, body: Mapping[str, Any]) -> ServerSentEvent | None:
        """The event without what has been given; None if nothing is left of it. `body` is its data, parsed.

        Raises:
            DivergedError: it repeats something that was different.
        """
        self._is_new = False
        extras = body.get("lockstep")
        if isinstance(extras, dict) and extras.get("usage"):
            self._usage = extras["usage"]
        given = {**body, **self._own(body)}
        choices = body.get("choices")
        if isinstance(choices, list):
            self._frame = self._frame or {name: given[name] for name in given if name not in _CONTENT}
            given["choices"] = [self._choice(choice) for choice in choices if isinstance(choice, dict)]
        if body.get("usage"):
            self._is_new |= not self._has_usage
            self._has_usage = True
        elif not isinstance(choices, list):
            self._is_new = True  # no answer's chunk: nothing is known of it
        if not self._is_repeat:
            self.events += 1
            return event
        if not self._is_new:
            return None
        self.events += 1
        return ServerSentEvent(json.dumps(given, ensure_ascii=False, separators=(",", ":")), event.id, event.type)

    def failure(self, body: Mapping[str, Any]) -> LockstepError | None:
        """The failure that an event reports."""
        return from_body(body, None) if "error" in body else None

    def is_last(self, body: Mapping[str, Any]) -> bool:  # noqa: ARG002 - the end mark is no chunk
        """Whether a chunk ends the stream."""
        return False

    def ending(self) -> list[ServerSentEvent] | None:
        """What is missing of an answer whose choices are all complete: the usage and the end mark; None if more is."""
        finished = sum(path[1:] == ("finish_reason",) for path in self._once)
        if self._choices is None or finished < self._choices:
            return None
        events = [ServerSentEvent(DONE)]
        if self._wants_usage and not self._has_usage:
            if self._usage is None:
                return None
            chunk = {**self._frame, "choices": [], "usage": self._usage}
            events.insert(0, ServerSentEvent(json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))))
        return events

    def check_end(self) -> None:
        """Check that a repeat has had everything that was given.

        Raises:
            DivergedError: it ends earlier.
        """
        if any(channel.is_behind for channel in self._channels()):
            raise DivergedError

    def _channels(self) -> Iterator[Text | Entries]:
        yield from self._texts.values()
        yield from self._entries.values()

    def _own(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a repeat that keep their first values."""
        for name in _OWN & body.keys():
            self._head.setdefault(name, body[name])
        return {name: self._head[name] for name in _OWN & body.keys()}

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        index = choice.get("index", 0)
        taken = self._object((index,), {name: value for name, value in choice.items() if name != "logprobs"})
        if "logprobs" in choice:
            logprobs = choice["logprobs"]
            taken["logprobs"] = self._logprobs((index,), logprobs) if isinstance(logprobs, dict) else logprobs
        return taken

    def _logprobs(self, path: Path, columns: Mapping[str, Any]) -> dict[str, Any] | None:
        taken = {
            name: self._list((*path, "logprobs", name), value) if isinstance(value, list) else value
            for name, value in columns.items()
        }
        return taken if any(isinstance(value, list) and value for value in taken.values()) else None

    def _list(self, path: Path, entries: list[Any]) -> list[Any]:
        new = self._entries.setdefault(path, Entries()).take(entries)
        self._is_new |= bool(new)
        return new

    def _object(self, path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
        taken = {}
        for name, value in given.items():
            kept = self._field((*path, name), name, value)
            if kept is not _GIVEN:
                taken[name] = kept
        return taken

    def _field(self, path: Path, name: str, value: Any) -> Any:
        """The new part of a field; `_GIVEN` if there is none and the field is left out."""
        taker = self._taker(name, value)
        return value if taker is None else taker(path, value)

    def _taker(self, name: str, value: Any) -> Callable[[Path, Any], Any] | None:
        if value is None or name == "index":
            return None
        if isinstance(value, dict):
            return self._object
        if isinstance(value, list):
            return self._items
        return self._text if name in _TEXTS and isinstance(value, str) else self._sent_once

    def _text(self, path: Path, piece: str) -> str:
        new = self._texts.setdefault(path, Text()).take(piece)
        self._is_new |= bool(new)
        return new

    def _items(self, path: Path, items: list[Any]) -> list[Any]:
        """Items that name their index, such as tool calls."""
        return [
            self._object((*path, item.get("index", number)), item) if isinstance(item, dict) else item
            for number, item in enumerate(items)
        ]

    def _sent_once(self, path: Path, value: Any) -> Any:
        if path not in self._once:
            if path[-1] == "finish_reason" and self._is_repeat:
                self._check_choice(path[0])
            self._once[path] = value
            self._is_new = True
            return value
        if path[-1] != "id" and self._is_repeat and self._once[path] != value:
            raise DivergedError
        return _GIVEN if self._is_repeat else value

    def _check_choice(self, index: object) -> None:
        for channels in (self._texts, self._entries):
            if any(path[0] == index and channel.is_behind for path, channel in channels.items()):
                raise DivergedError


_GIVEN = object()


def _choices_of(body: Mapping[str, Any]) -> int | None:
    """The number of choices that a request asks for; None: it asks for none that could be."""
    number, prompts = body.get("n") or 1, body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        return number * len(prompts) if isinstance(number, int) else None
    return number if isinstance(number, int) else None
