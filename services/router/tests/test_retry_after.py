"""A client that comes back after `Retry-After` does not come too early: the time is never rounded down."""

import json

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.faces.grpc.caller import abort
from lockstep_router.faces.rest.replies import error_reply
from lockstep_router.faces.websocket.messages import failed


class Call:
    """The context of a gRPC call."""

    async def abort(self, code, message, trailing):
        self.trailing = dict(trailing)


@pytest.mark.parametrize(("retry_after_s", "said"), [(0.0, 1), (0.4, 1), (1.0, 1), (1.2, 2), (2.5, 3), (7.01, 8)])
async def test_every_face_rounds_up(retry_after_s, said):
    error = LockstepError(ErrorCode.OVERLOADED, "all workers are busy", retry_after_s=retry_after_s)
    call = Call()
    await abort(call, error, "r0")
    assert error_reply(error).headers["retry-after"] == call.trailing["retry-after"] == str(said)
    assert json.loads(failed("a", error))["error"]["retry_after_s"] == said


async def test_an_error_without_a_time_says_none():
    error = LockstepError(ErrorCode.MODEL_NOT_FOUND, "there is no such model")
    call = Call()
    await abort(call, error, "r0")
    assert "retry-after" not in error_reply(error).headers
    assert "retry-after" not in call.trailing
    assert "retry_after_s" not in json.loads(failed("a", error))["error"]
