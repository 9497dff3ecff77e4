"""Protobuf's wire format, for messages that are written or read many times a second without classes of their own."""

from collections.abc import Iterator

_BYTE = 0x80
_SIZES = {1: 8, 5: 4}
"""Bytes of the values of a fixed size, by wire type."""


def part(number: int, content: bytes) -> bytes:
    """A field that has a length."""
    length = len(content)
    if length < _BYTE and number < _BYTE >> 3:  # most are short
        return b"%c%c%b" % (number << 3 | 2, length, content)
    if length < _BYTE * _BYTE and number < _BYTE >> 3:  # a span
        return b"%c%c%c%b" % (number << 3 | 2, length & 0x7F | _BYTE, length >> 7, content)
    return b"%b%b%b" % (varint(number << 3 | 2), varint(length), content)


def varint(value: int) -> bytes:
    """A number that is not negative."""
    if value < _BYTE:
        return b"%c" % value
    digits = bytearray()
    while value >= _BYTE:
        digits.append(value & 0x7F | _BYTE)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def zigzag(value: int) -> int:
    """What `varint` writes for a number of the types `sint32` and `sint64`."""
    return value << 1 if value >= 0 else -value * 2 - 1


def delimited(data: bytes) -> Iterator[bytes]:
    """The messages in a row of them, each after its length."""
    at = 0
    while at < len(data):
        length, at = _varint_at(data, at)
        yield data[at : at + length]
        at += length


def fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The fields of a message: the number, what is behind its key and length, and all of it."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _varint_at(message, at)
        kind, content_at = key & 7, at
        if kind == 2:
            length, content_at = _varint_at(message, at)
            at = content_at + length
        elif kind == 0:
            _, at = _varint_at(message, at)
        else:
            at += _SIZES[kind]
        yield key >> 3, message[content_at:at], message[begin:at]


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while data[at] & _BYTE:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
