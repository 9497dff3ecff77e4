"""The sender of a call: its key, address and metadata. Keys are hashed before they are stored, and never logged."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from lockstep_common.call_bounds import address_of
from lockstep_common.errors import LockstepError

from lockstep_router.faces import identity
from lockstep_router.faces.access import NOBODY, authenticate
from lockstep_router.faces.forwarded import ForwardedClients
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.record import Record
from lockstep_router.router import Router
from lockstep_router.tenants import KeyFile
from lockstep_router.traces import begin_request

_AUTHORIZATION = "authorization"
_FORWARDED_FOR = "x-forwarded-for"
_PASSED_ON = ("x-session-id", "x-request-id", "traceparent", "tracestate")
ERROR_CODE = "lockstep-error-code"
ERROR_FIELD = "lockstep-field"
ROUTER_METADATA = "x-lockstep-router"
HTTP_STATUS = "lockstep-http-status"
_MAX_FIELD_CHARS = 256


def metadata_of(context: grpc.aio.ServicerContext) -> list[tuple[str, Any]]:
    """The metadata that the client has sent."""
    return list(context.invocation_metadata() or ())


def identify(router: Router, metadata: list[tuple[str, Any]], record: Record) -> None:
    """Find out whose call it is, and begin its trace.

    Raises:
        LockstepError: INVALID_API_KEY.
    """
    if router.keys is not None:
        _authenticate(router.keys, metadata, record, router)
    record.trace = begin_request(router.tracing, _headers(metadata))


def _authenticate(keys: KeyFile, metadata: list[tuple[str, Any]], record: Record, router: Router) -> None:
    given = _values(metadata, _AUTHORIZATION)
    access = record.access = authenticate(keys, given)
    record.account, record.key_id = router.limits.account(access.tenant), access.key_id


def new_record(router: Router, metadata: list[tuple[str, Any]]) -> Record:
    """The record of a call that has just arrived."""
    return Record(identity.request_id(_headers(metadata)), router.limits.account(NOBODY))


def origin_of(router: Router, address: str, metadata: list[tuple[str, Any]], record: Record, session: str) -> Origin:
    """The sender, as the rules of the REST API see it. A session in the message precedes one in the metadata."""
    headers = dict(_headers(metadata))
    if session:
        headers["x-session-id"] = session
    if router.keys is None:
        headers |= {name: str(value) for name, value in metadata if name == _AUTHORIZATION}
    shares = router.settings.anonymous_cache == "shared"
    return Origin(headers, address, record.account.tenant.name, record.trace, record.request_id, shares)


async def client_address(
    forwarded: ForwardedClients | None, context: grpc.aio.ServicerContext, metadata: list[tuple[str, Any]]
) -> str:
    """The client's address: the peer's, unless that is a trusted proxy. The length of metadata is limited already."""
    address = address_of(context.peer())
    return address if forwarded is None else await forwarded.address(address, _values(metadata, _FORWARDED_FOR))


def _values(metadata: list[tuple[str, Any]], wanted: str) -> list[bytes]:
    return [str(value).encode("utf-8", "surrogateescape") for name, value in metadata if name == wanted]


def _headers(metadata: list[tuple[str, Any]]) -> Mapping[str, str]:
    return {name: value for name, value in metadata if name in _PASSED_ON and isinstance(value, str)}


async def abort(context: grpc.aio.ServicerContext, error: LockstepError, router_id: str) -> None:
    """End the call with an error, as the table of errors says. Every answer names the router, an error too."""
    trailing = [
        (ERROR_CODE, str(error.code)),
        (HTTP_STATUS, str(error.meaning.http_status)),
        (ROUTER_METADATA, router_id),
    ]
    if error.field is not None:
        trailing.append((ERROR_FIELD, _ascii(error.field)))
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_whole_s)))
    try:
        await context.abort(grpc.StatusCode[error.meaning.grpc_status], error.message, tuple(trailing))
    except grpc.aio.InternalError:
        # The client has gone, and the task of the call is not cancelled yet. gRPC would log it as an error.
        raise asyncio.CancelledError from None


def _ascii(text: str) -> str:
    # Values of metadata are visible ASCII.
    return "".join(char if " " <= char <= "~" else "?" for char in text[:_MAX_FIELD_CHARS])
