"""The messages of a socket: what clients may send, strictly typed, and what they get."""

from typing import Annotated, Any, Literal

from lockstep_common.errors import LockstepError, invalid
from pydantic import Field
from pydantic_core import to_json

from lockstep_router.faces.identity import MAX_TIMEOUT_S
from lockstep_router.faces.openai.fields import validate
from lockstep_router.faces.openai.schema_base import Strict

MAX_ID_CHARS = 128
_MAX_QUOTED_CHARS = 32

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Generate(Strict):
    """Begin a request: its answer comes as events with the same id."""

    type: Literal["generate"]
    id: RequestId = Field(description="A name of the client's own, which no other request in progress here has.")
    endpoint: Literal["chat.completions", "completions", "responses"] = Field(
        description="Whose body it is: that of `/v1/chat/completions`, `/v1/completions` or `/v1/responses`."
    )
    body: dict[str, Any] = Field(description="As in REST; `stream` may be left out, and may only be true.")
    session: str | None = Field(None, min_length=1, max_length=256, description="As the header `X-Session-ID`.")
    timeout_s: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, description="As the header `X-Request-Timeout`."
    )
    idempotency_key: str | None = Field(
        None,
        description="As the header `Idempotency-Key`: requests with the same key and an equal body get one answer, "
        "later ones join the first.",
    )


class Resume(Strict):
    """Get the answer of a request that was started before, on any face, after an event that the client has."""

    type: Literal["resume"]
    id: RequestId = Field(description="A name of the client's own, which no other request in progress here has.")
    stream: str = Field(min_length=1, max_length=256, description="The id in `started`, or in `X-Lockstep-Stream-ID`.")
    last_event_id: str | None = Field(
        None,
        min_length=1,
        max_length=64 << 10,
        description="The last event that the client has; without it the answer comes from its beginning.",
    )


class Cancel(Strict):
    """End a request: one of this socket by its id, or one of any face by its idempotency key."""

    type: Literal["cancel"]
    id: RequestId | None = Field(None, description="A request of this socket; exactly one of the two is needed.")
    idempotency_key: str | None = Field(None, description="The key of a request of any face.")


class Ping(Strict):
    """Ask for a pong."""

    type: Literal["ping"]


ClientMessage = Generate | Resume | Cancel | Ping
_TYPES: dict[str, type[ClientMessage]] = {"generate": Generate, "resume": Resume, "cancel": Cancel, "ping": Ping}


def client_message(data: dict[str, Any]) -> ClientMessage:
    """The typed message.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field.
    """
    given = data.get("type")
    model = _TYPES.get(given) if isinstance(given, str) else None
    if model is None:
        quoted = f", not {given[:_MAX_QUOTED_CHARS]!r}" if isinstance(given, str) else ""
        raise invalid("type", f"must be one of {', '.join(_TYPES)}{quoted}")
    return validate(model, data)


def id_of(data: dict[str, Any]) -> str | None:
    """The id of a message that may be invalid, to answer with."""
    given = data.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS else None


def started(client_id: str, stream: str) -> bytes:
    """The request has been accepted; `stream` names it for a resume."""
    return to_json({"type": "started", "id": client_id, "stream": stream})


def event(client_id: bytes, event_id: str, data: bytes) -> bytes:
    """A chunk of an answer. The client's id and the chunk are JSON already."""
    return b'{"type":"event","id":%b,"event_id":"%b","data":%b}' % (client_id, event_id.encode(), data)


def done(client_id: str, usage: dict[str, Any]) -> bytes:
    """The answer is complete."""
    return to_json({"type": "done", "id": client_id, "usage": usage})


def failed(client_id: str | None, error: LockstepError) -> bytes:
    """A request, or a message, has failed: OpenAI's error object with the HTTP status."""
    body = error.openai_body()["error"] | {"status": error.meaning.http_status}
    if error.retry_after_s is not None:
        body["retry_after_s"] = error.retry_after_whole_s
    return to_json({"type": "error", "id": client_id, "error": body})


def cancelled(idempotency_key: str, stream: str) -> bytes:
    """The stream that had the key has ended and is forgotten."""
    return to_json({"type": "cancelled", "idempotency_key": idempotency_key, "stream": stream})


PONG = to_json({"type": "pong"})
DRAINING = to_json({"type": "draining"})
