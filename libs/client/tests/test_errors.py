"""Errors come from one table, and no error shows a key."""

import time
from email.utils import formatdate

import pytest
from lockstep_client import (
    AuthenticationError,
    LockstepClient,
    LockstepError,
    Policy,
    RateLimitError,
    StreamMoved,
    UnavailableError,
    errors,
)
from lockstep_common.errors import MEANINGS, ErrorCode


def test_every_code_of_the_server_is_in_the_table():
    assert set(errors._BY_CODE) >= set(map(str, ErrorCode))


def test_retryable_codes_are_those_of_the_server():
    assert set(map(str, ErrorCode)) & errors.RETRYABLE_CODES == {
        str(code) for code, meaning in MEANINGS.items() if meaning.retryable
    }


def test_fields_of_an_error():
    body = b'{"error": {"message": "temperature must be less", "param": "temperature", "code": "invalid_request"}}'
    error = errors.from_response(400, {"x-request-id": "r-1"}, body)
    assert isinstance(error, errors.InvalidRequestError)
    assert (error.field, error.status, error.request_id) == ("temperature", 400, "r-1")


def test_moved_stream_is_an_error_of_its_own_that_is_not_retried():
    error = errors.from_body({"error": {"message": "another router has it", "code": "stream_moved"}}, None)
    assert (type(error), error.code) == (StreamMoved, "stream_moved")
    assert error.code not in errors.RETRYABLE_CODES


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": 5}', b'{"error": {"message": 5, "code": []}}', b"\xff"])
@pytest.mark.parametrize(
    ("status", "kind"), [(401, AuthenticationError), (429, RateLimitError), (502, UnavailableError)]
)
def test_bodies_that_are_none(status, kind, body):
    error = errors.from_response(status, {"retry-after": "3"}, body)
    assert type(error) is kind
    assert error.retry_after_s == 3


def test_retry_after():
    assert errors.retry_after("120") == 120
    assert errors.retry_after("soon") is None
    assert errors.retry_after(None) is None
    assert 50 < errors.retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert errors.retry_after(formatdate(0, usegmt=True)) == 0


def test_no_error_or_client_shows_the_key():
    with LockstepClient("http://127.0.0.1:9/v1", api_key="sk-secret", policy=Policy(retries=0)) as client:
        with pytest.raises(LockstepError) as failed:
            client.chat([{"role": "user", "content": "hi"}], model="reference")
        shown = [repr(client), repr(vars(client)), repr(client._requests.get("/v1/models")), repr(failed.value)]
        shown += [str(failed.value), repr(vars(failed.value)), repr(failed.value.__cause__)]
        assert not any("secret" in text for text in shown)


def test_urls_with_secrets_and_other_schemes_are_refused():
    for url in ("ftp://x", "http://user:secret@host/v1", "router:8000", ""):
        with pytest.raises(ValueError, match="base_urls") as refused:
            LockstepClient([url])
        assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="at least one"):
        LockstepClient([])
