"""Reading a request's body: bounded in bytes and in time."""

import asyncio

from lockstep_common.errors import ErrorCode, LockstepError
from starlette.requests import ClientDisconnect, Request


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        LockstepError: PAYLOAD_TOO_LARGE as soon as that is known, INVALID_REQUEST if it does not arrive in time,
            CANCELLED if the client has gone.
    """
    declared = request.headers.get("content-length", "0")
    # The server has checked the header's form; the chunks below count in any case.
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise LockstepError(
            ErrorCode.INVALID_REQUEST, f"the body did not arrive within {timeout_s:g} seconds"
        ) from error
    except ClientDisconnect as error:
        raise LockstepError(ErrorCode.CANCELLED, "the client has gone") from error
    return bytes(body)


def _too_large(max_bytes: int) -> LockstepError:
    return LockstepError(ErrorCode.PAYLOAD_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
