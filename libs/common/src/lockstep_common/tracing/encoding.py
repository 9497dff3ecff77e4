"""Spans in protobuf's wire format, as parts of a message of OTLP. The SDK's classes between take five times as long.

A span is encoded once: what waits for the collector, and what is kept for people, is bytes. A test compares them with
those of the SDK.
"""

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing.spans import Kind, Shared, Span, Value
from lockstep_common.wire import part, varint

_SAME = 1024
"""Names, and whole numbers of attributes, that are remembered in their encoded form: most come again and again."""
_IDS_AND_TIMES = struct.Struct("<H16sH8sBQBQ")
_TIME = struct.Struct("<Q")
_FLAGS = struct.Struct("<I")
_DOUBLE = struct.Struct("<d")
_OF_RESOURCE, _OF_SPAN, _OF_EVENT = 1, 9, 3
"""Numbers of the field of attributes."""
_INT_MASK = (1 << 64) - 1

# Keys of fields, as in opentelemetry/proto/trace/v1/trace.proto: the number times 8, and 1 for 64 bits, 2 for what has
# a length, 5 for 32 bits.
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_BEFORE_TRACE_ID, _BEFORE_SPAN_ID = (int.from_bytes(each, "little") for each in (_TRACE_ID, _SPAN_ID))
_BEGIN, _END = 0x39, 0x41
_NO_ERROR, _ERROR = b"\x7a\x00", b"\x7a\x02\x18\x02"
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_OWN_PARENT, _REMOTE_PARENT = (
    b"\x85\x01" + _FLAGS.pack(flags) for flags in (_HAS_IS_REMOTE, _HAS_IS_REMOTE | _IS_REMOTE)
)
_LINK_FLAGS = b"\x35" + _FLAGS.pack(_HAS_IS_REMOTE | _IS_REMOTE)
_KINDS = tuple(b"\x30%c" % (kind + 1) for kind in Kind)


def encode_span(span: Span) -> bytes:
    """A span as a field of the spans of a scope."""
    trace, span_id = span.trace, span.span_id.to_bytes(8, "big")
    parts = [
        _IDS_AND_TIMES.pack(
            _BEFORE_TRACE_ID, trace.id_bytes, _BEFORE_SPAN_ID, span_id, _BEGIN, span.begin_ns, _END, span.end_ns
        ),
        _head(span.name, span.kind, span.has_remote_parent, bool(span.error)),
    ]
    for name, value in span.attributes.copy().items():  # the loop may still add to them
        kind = type(value)
        if kind is str:
            text = value.encode(errors="replace")  # type: ignore[union-attr]
            parts += (_before_text(name, len(text)), text)
        elif kind is int:  # not a truth value
            parts.append(_integer(_OF_SPAN, name, value))
        elif kind is float:
            parts += (_before_double(name), _DOUBLE.pack(value))
        else:
            parts.append(_attribute(_OF_SPAN, name, value))
    parts += [shared.encoded or _shared(shared) for shared in span.shared]
    if span.parent_id:
        parts += (_PARENT_ID, span.parent_id.to_bytes(8, "big"))
    if trace.state:
        parts.append(part(3, trace.state.encode()))  # a client may send any number of them
    for name, at_ns, attributes in span.events:
        if attributes:
            of_event = b"\x09" + _TIME.pack(at_ns) + _text(2, name) + _attributes(_OF_EVENT, attributes)
            parts.append(part(11, of_event))
        else:
            before, after = _around_time(name)
            parts += (before, _TIME.pack(at_ns), after)
    if span.links:
        parts += [part(13, _link(link)) for link in span.links]
    return part(2, b"".join(parts))


def encode_resource(resource: Mapping[str, Value]) -> bytes:
    """What names the process, as a field of the spans of a resource."""
    return part(1, _attributes(_OF_RESOURCE, resource))


def encode_message(spans: Iterable[bytes], resource: bytes, scope: str, schema_url: str) -> bytes:
    """An `ExportTraceServiceRequest`.

    Args:
        spans: of this process, encoded.
        resource: names the process, encoded.
        scope: names what makes the spans.
        schema_url: of the names of their attributes.
    """
    of_scope = part(2, b"".join((part(1, _text(1, scope)), *spans, _text(3, schema_url))))
    return part(1, resource + of_scope)


@lru_cache(_SAME)
def _head(name: str, kind: Kind, has_remote_parent: bool, is_error: bool) -> bytes:
    """What many spans have alike."""
    flags = _REMOTE_PARENT if has_remote_parent else _OWN_PARENT
    return _text(5, name) + _KINDS[kind] + (_ERROR if is_error else _NO_ERROR) + flags


@lru_cache(_SAME)
def _around_time(name: str) -> tuple[bytes, bytes]:
    """What is before and after the time of an event without attributes."""
    after = _text(2, name)
    event = part(11, b"\x09" + bytes(_TIME.size) + after)
    return event[: -len(after) - _TIME.size], after


def _link(linked: TraceContext) -> bytes:
    trace_id, span_id = linked.trace_id.to_bytes(16, "big"), linked.span_id.to_bytes(8, "big")
    return b"".join((_TRACE_ID, trace_id, _SPAN_ID, span_id, _LINK_FLAGS))


def _shared(shared: Shared) -> bytes:
    """Attributes of a span, which are remembered for all spans that have them."""
    shared.encoded = _attributes(_OF_SPAN, shared.attributes)
    return shared.encoded


@lru_cache(_SAME)
def _integer(number: int, name: str, value: int) -> bytes:
    return _attribute(number, name, value)


@lru_cache(_SAME)
def _before_double(name: str) -> bytes:
    """What is before the eight bytes of a number that is an attribute of a span."""
    return _attribute(_OF_SPAN, name, 0.0)[: -_DOUBLE.size]


@lru_cache(_SAME)
def _before_text(name: str, size: int) -> bytes:
    """What is before the bytes of a text of this size that is an attribute of a span."""
    attribute = _attribute(_OF_SPAN, name, "." * size)
    return attribute[: len(attribute) - size]


def _attributes(number: int, attributes: Mapping[str, Value]) -> bytes:
    return b"".join(
        [(_integer if type(value) is int else _attribute)(number, name, value) for name, value in attributes.items()]
    )


def _attribute(number: int, name: str, value: Value) -> bytes:
    """A field of that number with a `KeyValue`."""
    return part(number, _text(1, name) + part(2, _value(value)))


def _value(value: Value) -> bytes:
    """An `AnyValue`."""
    if isinstance(value, str):
        # Also if it is empty: it is one of several that a value can be.
        return part(1, value.encode(errors="replace"))
    if isinstance(value, int):  # a truth value, too
        return b"%c%b" % (0x10 if isinstance(value, bool) else 0x18, varint(value & _INT_MASK))
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return part(5, b"".join([part(1, _value(each)) for each in value]))


@lru_cache(_SAME)
def _text(number: int, text: str) -> bytes:
    """A field of text; nothing if it is empty."""
    return part(number, text.encode(errors="replace")) if text else b""
