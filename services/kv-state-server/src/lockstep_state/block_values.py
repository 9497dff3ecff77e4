"""A KV block as one value of the store: magic, length of the header, its XXH3-64, header, content.

Whatever is not exactly the block that is asked for is none: the caller computes it.
"""

import xxhash
from google.protobuf.message import DecodeError
from lockstep_api.v1 import state_pb2

_MAGIC = b"LSKV"
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 8
_START = len(_MAGIC) + _LENGTH_BYTES + _CHECKSUM_BYTES

Parsed = tuple[state_pb2.BlockHeader, memoryview]


def is_content(header: state_pb2.BlockHeader, content: bytes | bytearray | memoryview) -> bool:
    """Whether a block's content is what its header says."""
    return len(content) == header.length and xxhash.xxh3_64_intdigest(content) == header.checksum


def pack(header: state_pb2.BlockHeader, content: bytes | bytearray) -> bytes:
    """The value of a block."""
    head = header.SerializeToString(deterministic=True)
    return b"".join((_MAGIC, len(head).to_bytes(_LENGTH_BYTES, "big"), _checksum(head), head, content))


def unpack(value: bytes, key: state_pb2.BlockKey, schema: int) -> Parsed | None:
    """The header and the content of a block; None if the value is not this block in this schema."""
    view = memoryview(value)
    if len(view) < _START or view[: len(_MAGIC)] != _MAGIC:
        return None
    at = len(_MAGIC) + _LENGTH_BYTES
    end, checksum = _START + int.from_bytes(view[len(_MAGIC) : at], "big"), view[at:_START]
    head = bytes(view[_START:end])
    if _checksum(head) != checksum:
        return None
    try:
        header = state_pb2.BlockHeader.FromString(head)
    except DecodeError:
        return None
    content = view[end:]
    if header.schema != schema or header.key != key or not is_content(header, content):
        return None
    return header, content


def _checksum(head: bytes) -> bytes:
    return xxhash.xxh3_64_digest(head)
