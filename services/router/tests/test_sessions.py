"""Who asks: header, then user, then key; and no key is ever kept."""

import pytest
from lockstep_router import sessions


def test_session_comes_from_header_then_user_then_key():
    everything = {"x-session-id": "s1", "authorization": "Bearer secret-key"}
    assert sessions.session(everything, "alice") == "session:s1"
    del everything["x-session-id"]
    assert sessions.session(everything, "alice") == "user:alice"
    assert sessions.session(everything, None).startswith("key:")
    assert sessions.session({}, None) != sessions.session({}, None)


def test_key_is_hashed():
    name = sessions.tenant({"authorization": "Bearer secret-key"})
    assert name == sessions.tenant({"authorization": "bearer  secret-key"})
    assert "secret" not in name
    assert len(name) == 32
    assert sessions.tenant({"authorization": "Bearer other"}) != name


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "secret"])
def test_other_authorization_is_no_tenant(value):
    assert sessions.tenant({"authorization": value}) == ""


def test_sane_request_id_is_kept():
    assert sessions.request_id({"x-request-id": "my-req_1.a"}) == "my-req_1.a"


@pytest.mark.parametrize("value", ["", "a" * 65, "a b", "a\nb", "a:1", "é", "-x", "<script>"])
def test_odd_request_id_is_replaced(value):
    made = sessions.request_id({"x-request-id": value})
    assert made != value
    assert sessions.request_id({"x-request-id": made}) == made


def test_only_well_formed_trace_context_is_passed_on():
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert sessions.traceparent({"traceparent": good}) == good
    assert sessions.traceparent({"traceparent": good + "x"}) == ""
