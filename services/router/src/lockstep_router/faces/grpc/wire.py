"""Limits the number of elements in a protobuf message before it is parsed.

Parsing makes an object of each element, so a message within its size limit could still take a tenth of a second and
hundreds of megabytes. It never decides whether the message is valid: the parser does.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from lockstep_common.errors import invalid

from lockstep_router.faces.openai.json_structure import too_many

MAX_RECORDS = 20_000
"""Largest number of fields of all messages. A conversation of 4,096 messages has about 12,300."""
MAX_ENTRIES = 4096
"""Largest number of texts or messages in one list; no list of a valid request is longer."""

_MAX_DEPTH = 8
_MESSAGE_HAS = "the message has"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_CONTINUED = bytes(range(128, 256))
"""The bytes of a number that others of the same number follow."""


class _BrokenError(Exception):
    """The message is no protobuf message; the parser says so."""


def check_structure(message: bytes, descriptor: Descriptor, max_values: int) -> None:
    """Raise INVALID_REQUEST for a message with too many elements.

    Args:
        message: as received; one that is no message may pass.
        descriptor: of its type.
        max_values: limit for the numbers in packed lists, such as token ids.
    """
    counter = _Counter(message, max_values)
    try:
        counter.count(0, len(message), descriptor, 1)
    except _BrokenError:
        return


class _Counter:
    def __init__(self, message: bytes, max_values: int) -> None:
        self._message = message
        self._max_values = max_values
        self._records = 0
        self._values = 0

    def count(self, at: int, end: int, descriptor: Descriptor, depth: int) -> None:
        """Count what is in one message and in those inside of it."""
        if depth > _MAX_DEPTH:
            raise too_many(_MESSAGE_HAS, "levels", _MAX_DEPTH)
        entries: dict[int, int] = {}
        while at < end:
            self._records += 1
            if self._records > MAX_RECORDS:
                raise too_many(_MESSAGE_HAS, "fields", MAX_RECORDS)
            tag, at = self._varint(at, end)
            kind = tag & 7
            if kind == _VARINT:
                _, at = self._varint(at, end)
            elif kind == _FIXED64:
                at += 8
            elif kind == _FIXED32:
                at += 4
            elif kind == _BYTES:
                size, at = self._varint(at, end)
                if at + size > end:
                    raise _BrokenError
                field = descriptor.fields_by_number.get(tag >> 3)
                entries[tag] = entries.get(tag, 0) + 1
                if field is not None and entries[tag] > MAX_ENTRIES:
                    raise invalid(field.name, f"has more than {MAX_ENTRIES} entries")
                self._look_into(field, at, at + size, depth)
                at += size
            else:
                raise _BrokenError  # groups: no message here has any

    def _look_into(self, field: FieldDescriptor | None, at: int, end: int, depth: int) -> None:
        if field is None:
            return
        if field.message_type is not None:
            self.count(at, end, field.message_type, depth + 1)
        elif field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._values += len(self._message[at:end].translate(None, _CONTINUED))
            if self._values > self._max_values:
                raise too_many(_MESSAGE_HAS, "values", self._max_values)

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(_MAX_VARINT_BYTES):
            if at >= end:
                raise _BrokenError
            byte = self._message[at]
            at += 1
            value |= (byte & 0x7F) << (7 * shift)
            if byte < 0x80:
                return value, at
        raise _BrokenError
