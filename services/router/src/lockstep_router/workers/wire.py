"""A router's frames as bytes.

A message in a frame, and frames in one message, differ from the message itself in a few bytes before it. Protobuf's
own classes copy what is put into them: a Submit, with all of its prompt, once for each layer.
"""

import functools
from collections.abc import Sequence

from google.protobuf.message import Message
from lockstep_api.v1 import worker_pb2
from lockstep_common.wire import varint

_LENGTH_DELIMITED = 2
"""Protobuf's wire type of messages."""
_MAX_VARINTS = 1024
"""Lengths that are kept in their form: most frames have one of few."""
_varint = functools.lru_cache(_MAX_VARINTS)(varint)


def _tag(descriptor: object, field: str) -> bytes:
    number: int = descriptor.fields_by_name[field].number  # type: ignore[attr-defined]
    return _varint(number << 3 | _LENGTH_DELIMITED)


_SUBMIT = _tag(worker_pb2.RouterFrame.DESCRIPTOR, "submit")
_CANCEL = _tag(worker_pb2.RouterFrame.DESCRIPTOR, "cancel")
_SEVERAL = _tag(worker_pb2.RouterFrame.DESCRIPTOR, "several")
_FRAMES = _tag(worker_pb2.RouterFrames.DESCRIPTOR, "frames")


def _framed(tag: bytes, message: Message) -> bytes:
    data = message.SerializeToString()
    return b"%b%b%b" % (tag, _varint(len(data)), data)


def submit_frame(submit: worker_pb2.Submit) -> bytes:
    """The RouterFrame of a Submit."""
    return _framed(_SUBMIT, submit)


def cancel_frame(cancel: worker_pb2.Cancel) -> bytes:
    """The RouterFrame of a Cancel."""
    return _framed(_CANCEL, cancel)


def several_frames(frames: Sequence[bytes]) -> bytes:
    """The RouterFrame of several others."""
    parts: list[bytes] = []
    for frame in frames:
        parts += (_FRAMES, _varint(len(frame)), frame)
    inner = b"".join(parts)
    return b"%b%b%b" % (_SEVERAL, _varint(len(inner)), inner)
