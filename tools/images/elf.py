"""Takes symbol tables and debug information out of shared libraries; the image has no `strip`.

The loader reads program headers alone. Linkers and debuggers alone read the table of sections and what follows
the last segment.
"""

import struct
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER_BYTES = 64
_PROGRAM_HEADERS = struct.Struct("<Q")  # their offset, at 0x20
_COUNTS = struct.Struct("<HH")  # bytes of one, and how many, at 0x36
_SEGMENT = struct.Struct("<8xQ16xQ")  # offset and bytes in the file


def strip(path: Path) -> int:
    """Shorten a shared library in place; anything else is left alone.

    Returns:
        the bytes saved.
    """
    data = bytearray(path.read_bytes())
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC):
        return 0
    (start,) = _PROGRAM_HEADERS.unpack_from(data, 0x20)
    size, count = _COUNTS.unpack_from(data, 0x36)
    segments = (_SEGMENT.unpack_from(data, start + size * index) for index in range(count))
    end = max(start + size * count, *(offset + length for offset, length in segments))
    saved = len(data) - int(end)
    if saved <= 0:
        return 0
    data[0x28:0x30] = bytes(8)  # offset of the sections
    data[0x3C:0x40] = bytes(4)  # their number, and the one with their names
    path.write_bytes(data[:end])
    return saved
