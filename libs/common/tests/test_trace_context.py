"""A trace context is passed on only if the W3C specification calls it valid."""

import pytest
from lockstep_common.trace_context import parse_traceparent

TRACE, PARENT = "a" * 32, "b" * 16


@pytest.mark.parametrize("text", [f"00-{TRACE}-{PARENT}-01", f"01-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what"])
def test_valid_trace_context_is_kept(text):
    assert parse_traceparent(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no trace",
        f"00-{TRACE}-{PARENT}-01x",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"01-{TRACE}-{PARENT}-01-{'x' * 100}",
        f"00-{TRACE}-{PARENT}-01\n",
    ],
)
def test_invalid_trace_context_is_dropped(text):
    assert parse_traceparent(text) == ""
