"""What the two clients share: settings, requests as bytes, and answers as objects."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep_client.errors import LockstepError, ProtocolError, from_body, from_response
from lockstep_client.events import Event, events_of
from lockstep_client.fields import Prompt
from lockstep_client.policy import OnLost, Policy
from lockstep_client.sse import ServerSentEvent
from lockstep_client.steps import Head, Outgoing
from lockstep_client.transcript import DONE

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
SESSION_HEADER = "X-Session-ID"


class Requests:
    """Makes the requests of one client. The key is in no representation of it."""

    def __init__(self, base_urls: str | Iterable[str], api_key: str | None, policy: Policy) -> None:
        self.base_urls: Sequence[str] = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        self.policy = policy
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key and not (_is_printable(key) and not key.endswith(" ")):
            raise ValueError("api_key must be printable ASCII characters, without a space at its end")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Outgoing:
        """A request without a body."""
        return Outgoing("GET", path, {**self._headers, "Accept": "application/json"})

    def post(self, path: str, body: Mapping[str, Any], session: str | None = None) -> Outgoing:
        """A request with a body; fields that are None are left out.

        Raises:
            ValueError: the body cannot be written as JSON, or the session as a header.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        if session is not None:
            if not _is_printable(session) or session != session.strip(" "):
                raise ValueError("session must be printable ASCII characters, without spaces at its ends")
            headers[SESSION_HEADER] = session
        given = {name: value for name, value in body.items() if value is not None}
        try:
            content = json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except TypeError as error:
            raise ValueError(f"the request has a field that is no JSON: {error}") from None
        return Outgoing("POST", path, headers, content)

    def generate(
        self,
        path: str,
        fields: Mapping[str, Any],
        *,
        stream: bool,
        session: str | None,
        extra: Mapping[str, Any] | None,
    ) -> Outgoing:
        """A request for an answer."""
        body = {**fields, **(extra or {}), "stream": stream}
        if stream:
            body.setdefault("stream_options", {"include_usage": True})
        return self.post(path, body, session)

    def embed(self, given: Prompt, model: str, dimensions: int | None, user: str | None) -> Outgoing:
        """A request for the vectors of texts, as base64: the same bits in a third of the bytes."""
        fields = {"model": model, "input": given, "dimensions": dimensions, "user": user}
        return self.post("/v1/embeddings", {**fields, "encoding_format": "base64"})

    def limits(self, timeout_s: float | None, on_lost: OnLost | None) -> Policy:
        """The limits of one request."""
        policy = self.policy
        if timeout_s is not None:
            policy = replace(policy, timeout_s=timeout_s)
        return policy if on_lost is None else replace(policy, on_lost=on_lost)


def _is_printable(text: str) -> bool:
    """Whether HTTP and gRPC can carry it in a header."""
    return text.isascii() and text.isprintable()


def object_of(head: Head, content: bytes) -> dict[str, Any]:
    """The JSON object that an answer is.

    Raises:
        LockstepError: it is a refusal, or no JSON object.
    """
    if head.status >= 400:
        raise from_response(head.status, head.headers, content)
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ProtocolError("the answer is no JSON object", status=head.status)
    return body


def parse_event(event: ServerSentEvent) -> list[Event] | LockstepError | None:
    """What an event of a stream holds; the error that it reports; None: it is the end mark."""
    if event.data == DONE:
        return None
    body = json.loads(event.data)
    return from_body(body, None) if "error" in body else events_of(body, event.id)
