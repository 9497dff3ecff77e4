"""Spans as a message of OTLP, in protobuf's wire format. The SDK's classes between take five times as long.

The thread that exports shares Python's lock with the event loop, so its time is taken from requests. A test compares
the messages with those of the SDK.
"""

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing.spans import Kind, Span, Value

_SAME = 4096
"""Attributes and names that are remembered in their encoded form; most come again and again."""
_TIMES = struct.Struct("<BQBQ")
_TIME = struct.Struct("<BQ")
_FLAGS = struct.Struct("<I")
_DOUBLE = struct.Struct("<Bd")
_DOUBLE_VALUE = b"\x12\x09"
"""Begins an `AnyValue` of that size in an attribute."""
_BYTE = 0x80
_INT_MASK = (1 << 64) - 1

# Keys of fields, as in opentelemetry/proto/trace/v1/trace.proto: the number times 8, and 1 for 64 bits, 2 for what has
# a length, 5 for 32 bits.
_TRACE_ID = b"\x0a\x10"
_SPAN_ID = b"\x12\x08"
_PARENT_ID = b"\x22\x08"
_BEGIN, _END = 0x39, 0x41
_NO_ERROR, _ERROR = b"\x7a\x00", b"\x7a\x02\x18\x02"
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_OWN_PARENT, _REMOTE_PARENT = (
    b"\x85\x01" + _FLAGS.pack(flags) for flags in (_HAS_IS_REMOTE, _HAS_IS_REMOTE | _IS_REMOTE)
)
_LINK_FLAGS = b"\x35" + _FLAGS.pack(_HAS_IS_REMOTE | _IS_REMOTE)
_KINDS = {kind: b"\x30%c" % (kind + 1) for kind in Kind}


def encode(spans: Iterable[Span], resource: Mapping[str, Value], scope: str, schema_url: str) -> bytes:
    """An `ExportTraceServiceRequest`.

    Args:
        spans: of this process.
        resource: names the process.
        scope: names what makes the spans.
        schema_url: of the names of their attributes.
    """
    of_scope = _part(1, _text(1, scope)) + b"".join(_part(2, _span(span)) for span in spans) + _text(3, schema_url)
    return _part(1, _part(1, _attributes(1, resource)) + _part(2, of_scope))


def _span(span: Span) -> bytes:
    trace = span.trace
    parts = [
        _TRACE_ID,
        trace.trace_id.to_bytes(16, "big"),
        _SPAN_ID,
        span.span_id.to_bytes(8, "big"),
        _text(5, span.name),
        _KINDS[span.kind],
        _TIMES.pack(_BEGIN, span.begin_ns, _END, span.end_ns),
        _attributes(9, span.attributes),
        _ERROR if span.error else _NO_ERROR,
        _REMOTE_PARENT if span.parent_id and span.has_remote_parent else _OWN_PARENT,
    ]
    if trace.state:
        parts.append(_text(3, trace.state))
    if span.parent_id:
        parts += (_PARENT_ID, span.parent_id.to_bytes(8, "big"))
    for name, at_ns, attributes in span.events:
        parts.append(_part(11, _TIME.pack(0x09, at_ns) + _text(2, name) + _attributes(3, attributes)))
    parts += [_part(13, _link(link)) for link in span.links]
    return b"".join(parts)


def _link(linked: TraceContext) -> bytes:
    trace_id, span_id = linked.trace_id.to_bytes(16, "big"), linked.span_id.to_bytes(8, "big")
    return b"".join((_TRACE_ID, trace_id, _SPAN_ID, span_id, _LINK_FLAGS))


def _attributes(number: int, attributes: Mapping[str, Value]) -> bytes:
    # A copy: another thread may still add to them. Lists cannot be remembered, tuples can.
    return b"".join(
        [
            _measured(number, name, value)
            if isinstance(value, float)
            else _attribute(number, name, tuple(value) if isinstance(value, list) else value)
            for name, value in [*attributes.items()]
        ]
    )


def _measured(number: int, name: str, value: float) -> bytes:
    """An attribute that is hardly ever the same again."""
    return _part(number, _text(1, name) + _DOUBLE_VALUE + _DOUBLE.pack(0x21, value))


@lru_cache(_SAME, typed=True)  # True, 1 and 1.0 are equal, and are not encoded alike
def _attribute(number: int, name: str, value: Value) -> bytes:
    return _part(number, _text(1, name) + _part(2, _value(value)))


def _value(value: Value) -> bytes:
    """An `AnyValue`."""
    if isinstance(value, str):
        # Also if it is empty: it is one of several that a value can be.
        return _part(1, value.encode(errors="replace"))
    if isinstance(value, bool):
        return b"\x10%c" % value
    if isinstance(value, int):
        return b"\x18" + _number(value & _INT_MASK)
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    return _part(5, b"".join(_part(1, _value(each)) for each in value))


@lru_cache(_SAME)
def _text(number: int, text: str) -> bytes:
    """A field of text; nothing if it is empty."""
    return _part(number, text.encode(errors="replace")) if text else b""


def _part(number: int, content: bytes) -> bytes:
    """A field that has a length."""
    length = len(content)
    if length < _BYTE and number < _BYTE >> 3:  # most are short
        return b"%c%c%b" % (number << 3 | 2, length, content)
    return _number(number << 3 | 2) + _number(length) + content


def _number(value: int) -> bytes:
    """A varint."""
    if value < _BYTE:
        return b"%c" % value
    digits = bytearray()
    while value >= _BYTE:
        digits.append(value & 0x7F | _BYTE)
        value >>= 7
    digits.append(value)
    return bytes(digits)
