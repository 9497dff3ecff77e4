"""The next write of a stream to the state server: what that lacks of it, as far as one write may have it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_api.v1 import state_pb2

from lockstep_router.journals.mirror_entry import Entry
from lockstep_router.journals.stored_form import REMOVED, tenant_of, to_message, to_piece

_WRITE_IDS = 16_384
_WRITE_LOGPROBS = 1024


@dataclass(frozen=True)
class Sent:
    """A write on its way."""

    request_id: str
    entry: Entry
    since: float | None
    ends: Sequence[tuple[int, int, bool, bool]]
    """Of each piece: the choice, the position of its end, and whether it has the finish and the mark."""
    seal: bytes | None


def write_of(request_id: str, entry: Entry, owner: str, ttl_s: float) -> tuple[state_pb2.StreamWrite, Sent]:
    """The next write of a stream, and what it will have done when it is acknowledged.

    Args:
        request_id: the stream.
        entry: what is known of it. It is not changed.
        owner: the router's name.
        ttl_s: for how long the state server keeps the stream without a further write, if it has not ended.
    """
    record = entry.stream.record
    write = state_pb2.StreamWrite(tenant=tenant_of(record.owner), stream_id=request_id, epoch=entry.epoch, ttl_s=ttl_s)
    if not entry.is_open:
        write.record.CopyFrom(to_message(record, entry.key))
        write.owner = owner
        if record.deadline_at is not None:
            write.left_s = max(0.0, record.deadline_at - time.time())
    ends, is_all = [], True
    if entry.seal != REMOVED and not entry.is_frozen:
        room = _WRITE_IDS
        for index, log in enumerate(entry.stream.logs):
            begin = entry.written[index]
            end = min(len(log.ids), begin + min(room, _WRITE_LOGPROBS if log.logprobs else room))
            is_all = is_all and end == len(log.ids)
            if end > begin or (end == len(log.ids) and entry.lacks_end(index)):
                write.pieces.append(to_piece(index, log, begin, end))
                ends.append((index, end, bool(log.finish) and end == len(log.ids), log.is_inexact))
                room -= end - begin
    seal = entry.seal if is_all else None
    if seal is not None and (not entry.is_frozen or seal == REMOVED):
        write.seal.outcome = seal
        write.ttl_s = entry.seal_ttl_s
    return write, Sent(request_id, entry, entry.changed_at, ends, seal)
