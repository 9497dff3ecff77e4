"""Checks of what callers send. Each error names the field; nothing invalid reaches a backend."""

import math
import re
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

MAX_NAME_CHARS = 512
MAX_CHOICES = 1024
MAX_HEADS = 1 << 16
HASH_BYTES = 32
SCHEMA = 1
"""Of records and of blocks."""

_MAX_FINGERPRINT_BYTES = 128
_MAX_EPOCH = 1 << 53
_MAX_DIMENSIONS = 8
_MAX_LEFT_S = 1e9
_FINISHES = frozenset(inference_pb2.FinishReason.values())
_DTYPE = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True)
class Times:
    """Times to live: one for calls that give none, and the greatest."""

    default_s: float
    greatest_s: float

    def check(self, field: str, ttl_s: float) -> float:
        """A time to live that can be used."""
        if not math.isfinite(ttl_s) or not 0 <= ttl_s <= self.greatest_s:
            raise invalid(field, f"must be between 0 and {self.greatest_s:g} seconds")
        return max(ttl_s, 0.001) if ttl_s else self.default_s


def check_name(field: str, value: str, *, may_be_empty: bool = False) -> str:
    """A name of something."""
    if not value and not may_be_empty:
        raise invalid(field, "is missing")
    if len(value) > MAX_NAME_CHARS:
        raise invalid(field, f"has more than {MAX_NAME_CHARS} characters")
    return value


def check_epoch(field: str, value: int) -> int:
    """An epoch."""
    if not 1 <= value < _MAX_EPOCH:
        raise invalid(field, "must be at least 1, and below 2^53")
    return value


def check_fingerprint(field: str, value: bytes) -> bytes:
    """A fingerprint of a request's body."""
    if len(value) > _MAX_FINGERPRINT_BYTES:
        raise invalid(field, f"has more than {_MAX_FINGERPRINT_BYTES} bytes")
    return value


def check_count(field: str, count: int, greatest: int) -> None:
    """The number of elements."""
    if not 1 <= count <= greatest:
        raise invalid(field, f"must have 1 to {greatest} elements")


def check_schema(field: str, schema: int) -> None:
    """The version of a message that is stored."""
    if schema != SCHEMA:
        raise invalid(field, f"is {schema}; this server knows {SCHEMA}")


def check_record(record: state_pb2.StreamRecord) -> None:
    """The record that opens a stream."""
    check_schema("record.schema", record.schema)
    check_count("record.choices", len(record.choices), MAX_CHOICES)
    check_count("record.prompts", len(record.prompts), MAX_CHOICES)


def check_left(field: str, left_s: float) -> float:
    """What is left of a timeout."""
    if not 0 <= left_s <= _MAX_LEFT_S:  # which NaN is not either
        raise invalid(field, f"must be between 0 and {_MAX_LEFT_S:g} seconds")
    return left_s


def check_pieces(write: state_pb2.StreamWrite) -> None:
    """The pieces of one write."""
    if len(write.pieces) > 1 and len({piece.choice for piece in write.pieces}) != len(write.pieces):
        raise invalid("pieces", "must have at most one of each choice")
    for piece in write.pieces:
        if piece.choice >= MAX_CHOICES:
            raise invalid("pieces.choice", f"must be below {MAX_CHOICES}")
        if piece.finish not in _FINISHES:
            raise invalid("pieces.finish", "is no reason that this server knows")
        if len(piece.logprobs) not in (0, len(piece.ids)):
            raise invalid("pieces.logprobs", "must have one element for each id, or none")
        check_name("pieces.numerics", piece.numerics, may_be_empty=True)


def check_heads(field: str, heads: state_pb2.HeadRange) -> None:
    """A range of heads."""
    if heads.count < 1 or heads.first + heads.count > MAX_HEADS:
        raise invalid(field, f"must have at least one head, and be below {MAX_HEADS}")


def check_hash(field: str, value: bytes) -> None:
    """A block's hash."""
    if len(value) != HASH_BYTES:
        raise invalid(field, f"must have {HASH_BYTES} bytes")


def check_key(field: str, key: state_pb2.BlockKey) -> None:
    """A block's key."""
    check_hash(f"{field}.hash", key.hash)
    check_heads(f"{field}.heads", key.heads)


def check_header(header: state_pb2.BlockHeader, max_bytes: int) -> None:
    """The header of a block."""
    check_schema("header.schema", header.schema)
    check_key("header.key", header.key)
    if not _DTYPE.fullmatch(header.dtype):
        raise invalid("header.dtype", "must be a name of a type, such as float8_e4m3fn")
    check_count("header.shape", len(header.shape), _MAX_DIMENSIONS)
    if not 1 <= header.length <= max_bytes:
        code = ErrorCode.PAYLOAD_TOO_LARGE if header.length else ErrorCode.INVALID_REQUEST
        raise LockstepError(code, f"header.length must be between 1 and {max_bytes}", field="header.length")
