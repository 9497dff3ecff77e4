"""Spans as a message of OTLP, in protobuf's wire format. The SDK's classes between take five times as long.

The thread that exports shares Python's lock with the event loop, so its time is taken from requests. A test compares
the messages with those of the SDK.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lockstep_common.trace_context import TraceContext
from lockstep_common.tracing.spans import Kind, Shared, Span, Value

_SAME = 1024
"""Names that are remembered in their encoded form; there are few."""
_SAME_VALUES = 64
"""Values of one attribute that are remembered so: most come again and again, and ids and durations never do."""
_TIMES = struct.Struct("<BQBQ")
_TIME = struct.Struct("<BQ")
_FLAGS = struct.Struct("<I")
_DOUBLE = struct.Struct("<d")
_OF_RESOURCE, _OF_SPAN, _OF_EVENT = 1, 9, 3
"""Numbers of the field of attributes."""
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
_KINDS = tuple(b"\x30%c" % (kind + 1) for kind in Kind)


def encode(spans: Iterable[Span], resource: Mapping[str, Value], scope: str, schema_url: str) -> bytes:
    """An `ExportTraceServiceRequest`.

    Args:
        spans: of this process.
        resource: names the process.
        scope: names what makes the spans.
        schema_url: of the names of their attributes.
    """
    of_scope = _part(1, _text(1, scope)) + b"".join([_span(span) for span in spans]) + _text(3, schema_url)
    return _part(1, _part(1, _attributes(_OF_RESOURCE, resource)) + _part(2, of_scope))


def _span(span: Span) -> bytes:
    """A field of the spans of a scope."""
    trace = span.trace
    parts = [
        _TRACE_ID,
        trace.trace_id.to_bytes(16, "big"),
        _SPAN_ID,
        span.span_id.to_bytes(8, "big"),
        _text(5, span.name),
        _KINDS[span.kind],
        _TIMES.pack(_BEGIN, span.begin_ns, _END, span.end_ns),
        _own(span.attributes),
        *[shared.encoded or _shared(shared) for shared in span.shared],
        _ERROR if span.error else _NO_ERROR,
        _REMOTE_PARENT if span.has_remote_parent else _OWN_PARENT,
    ]
    if trace.state:
        parts.append(_text(3, trace.state))
    if span.parent_id:
        parts += (_PARENT_ID, span.parent_id.to_bytes(8, "big"))
    for name, at_ns, attributes in span.events:
        of_event = _TIME.pack(0x09, at_ns) + _text(2, name)
        parts.append(_part(11, of_event + _attributes(_OF_EVENT, attributes) if attributes else of_event))
    if span.links:
        parts += [_part(13, _link(link)) for link in span.links]
    return _part(2, b"".join(parts))


def _link(linked: TraceContext) -> bytes:
    trace_id, span_id = linked.trace_id.to_bytes(16, "big"), linked.span_id.to_bytes(8, "big")
    return b"".join((_TRACE_ID, trace_id, _SPAN_ID, span_id, _LINK_FLAGS))


def _shared(shared: Shared) -> bytes:
    """Attributes of a span, which are remembered for all spans that have them."""
    shared.encoded = _attributes(_OF_SPAN, shared.attributes)
    return shared.encoded


_known: dict[tuple[tuple[str, Value], type], bytes] = {}
"""Encoded attributes of spans. With their types, since True, 1 and 1.0 are equal, and are not encoded alike."""
_values: Counter[str] = Counter()
"""How many of each name are known."""


def _own(attributes: Mapping[str, Value]) -> bytes:
    """The attributes of one span."""
    own = dict(attributes)  # another thread may still add to them
    try:
        return b"".join(
            [_known.get(key) or _new(key) for key in zip(own.items(), map(type, own.values()), strict=True)]
        )
    except TypeError:  # lists cannot be remembered
        return _attributes(_OF_SPAN, own)


def _new(key: tuple[tuple[str, Value], type]) -> bytes:
    """An attribute of a span that is not known."""
    (name, value), _ = key
    encoded = _attribute(_OF_SPAN, name, value)
    if _values[name] < _SAME_VALUES:
        _values[name] += 1
        _known[key] = encoded
    return encoded


def _attributes(number: int, attributes: Mapping[str, Value]) -> bytes:
    return b"".join([_attribute(number, name, value) for name, value in dict(attributes).items()])


def _attribute(number: int, name: str, value: Value) -> bytes:
    """A field of that number with a `KeyValue`."""
    key = _text(1, name)
    if isinstance(value, str):
        text = value.encode(errors="replace")
        length = len(text)
        size = len(key) + 4 + length
        if size < _BYTE:  # as below, in less time: these are ids, which are never the same
            return b"%c%c%b\x12%c\x0a%c%b" % (number << 3 | 2, size, key, length + 2, length, text)
    return _part(number, key + _part(2, _value(value)))


def _value(value: Value) -> bytes:
    """An `AnyValue`."""
    if isinstance(value, str):
        # Also if it is empty: it is one of several that a value can be.
        return _part(1, value.encode(errors="replace"))
    if isinstance(value, int):  # a truth value, too
        return b"%c%b" % (0x10 if isinstance(value, bool) else 0x18, _number(value & _INT_MASK))
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return _part(5, b"".join([_part(1, _value(each)) for each in value]))


@lru_cache(_SAME)
def _text(number: int, text: str) -> bytes:
    """A field of text; nothing if it is empty."""
    return _part(number, text.encode(errors="replace")) if text else b""


def _part(number: int, content: bytes) -> bytes:
    """A field that has a length."""
    length = len(content)
    if length < _BYTE and number < _BYTE >> 3:  # most are short
        return b"%c%c%b" % (number << 3 | 2, length, content)
    if length < _BYTE * _BYTE and number < _BYTE >> 3:  # a span
        return b"%c%c%c%b" % (number << 3 | 2, length & 0x7F | _BYTE, length >> 7, content)
    return b"%b%b%b" % (_number(number << 3 | 2), _number(length), content)


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
