"""Protobuf's wire format, for messages that are written many times a second without classes of their own."""

_BYTE = 0x80


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
