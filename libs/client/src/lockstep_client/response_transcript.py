"""What has been given of a streamed response, so that a repeat of it gives only what is new.

Its events are in one order. A repeat has the same ones, but may cut texts differently and has ids of its own: texts
are compared by characters, other events as wholes, and ids and numbers go on as they began.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_client.channels import DivergedError, Entries, Text
from lockstep_client.errors import LockstepError, from_body
from lockstep_client.sse import ServerSentEvent

_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ITEM_IDS = ("id", "call_id")
_RESPONSE_OWN = ("id", "created_at")
_TEXT = "response.output_text.delta"

Body = Mapping[str, Any]
Place = tuple[object, ...]


class ResponseTranscript:
    """Passes the events of a response on, and those of its repeats without what has been given."""

    def __init__(self) -> None:
        self.events = 0
        """Events that have been passed on."""
        self._texts: dict[Place, Text] = {}
        """What deltas make, by their type, item and part."""
        self._others: dict[Place, Entries] = {}
        """All other events, in the same way."""
        self._firsts: dict[Place, object] = {}
        """The first value of each id, by what has it."""
        self._is_repeat = False
        self._is_behind = False
        """Whether the repeat has not reached what has been given."""

    @property
    def texts(self) -> dict[int, str]:
        """The text so far, as that of choice 0."""
        pieces = [text.given for place, text in self._texts.items() if place[0] == _TEXT]
        return {0: "".join("".join(given) for given in pieces)} if pieces else {}

    def start_over(self) -> None:
        """What comes from now on is a repeat from the beginning."""
        self._is_repeat = self._is_behind = True
        for channel in self._channels():
            channel.start_over()

    def failure(self, body: Body) -> LockstepError | None:
        """The failure that an event reports."""
        if "error" in body:
            return from_body(body, None)
        if body.get("type") != "response.failed":
            return None
        response = _object(body.get("response"))
        code, error = _object(response.get("lockstep")).get("code"), _object(response.get("error"))
        return from_body({"error": {**error, "code": code or error.get("code")}}, None)

    def pass_on(self, event: ServerSentEvent, body: Body) -> ServerSentEvent | None:
        """The event without what has been given; None if nothing is left of it. `body` is its data, parsed.

        Raises:
            DivergedError: it repeats something that was different.
        """
        new = self._new(self._with_first_ids(body))
        if not self._is_repeat:
            self.events += 1
            return event
        if new is None:
            return None
        if self._is_behind:
            # Nothing new comes before all that was given has been repeated.
            self.check_end()
            self._is_behind = False
        new["sequence_number"] = self.events
        self.events += 1
        return ServerSentEvent(json.dumps(new, ensure_ascii=False, separators=(",", ":")), event.id, event.type)

    def is_last(self, body: Body) -> bool:
        """Whether an event ends the response; there is no end mark."""
        return body.get("type") in _LAST

    def check_end(self) -> None:
        """Check that a repeat has had everything that was given.

        Raises:
            DivergedError: it has not.
        """
        if any(channel.is_behind for channel in self._channels()):
            raise DivergedError

    def ending(self) -> None:
        """What is missing of a complete answer: the last event of a response has its text, so it is never known."""

    def _channels(self) -> Iterator[Text | Entries]:
        yield from self._texts.values()
        yield from self._others.values()

    def _new(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The event without the part of its text that has been given; None if that is all of it."""
        place = (body.get("type"), body.get("output_index"), body.get("content_index"))
        delta = body.get("delta")
        if not isinstance(delta, str):
            numberless = {name: value for name, value in body.items() if name != "sequence_number"}
            text = json.dumps(numberless, sort_keys=True).encode()
            # Its hash stands for an event: the last ones of an item have all of its text.
            digest = hashlib.blake2b(text, digest_size=16).hexdigest()
            return body if self._others.setdefault(place, Entries()).take([digest]) else None
        rest = self._texts.setdefault(place, Text()).take(delta)
        return {**body, "delta": rest} if rest else None

    def _with_first_ids(self, body: Body) -> dict[str, Any]:
        given, index = dict(body), body.get("output_index")
        if "item_id" in given:
            given["item_id"] = self._first((index, "id"), given["item_id"])
        if isinstance(given.get("item"), dict):
            given["item"] = self._item(index, given["item"])
        response = given.get("response")
        if isinstance(response, dict):
            own = {name: self._first((name,), response[name]) for name in _RESPONSE_OWN if name in response}
            output = response.get("output")
            if isinstance(output, list):
                own["output"] = [self._item(number, _object(item)) for number, item in enumerate(output)]
            given["response"] = {**response, **own}
        return given

    def _item(self, index: object, item: Body) -> dict[str, Any]:
        return {**item, **{name: self._first((index, name), item[name]) for name in _ITEM_IDS if name in item}}

    def _first(self, place: Place, value: object) -> object:
        return self._firsts.setdefault(place, value)


def _object(value: object) -> Body:
    return value if isinstance(value, dict) else {}
