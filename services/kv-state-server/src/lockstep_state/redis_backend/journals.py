"""Journals of streams on Redis: a hash for each stream, a list of its pieces, and the tombstone that it may leave: all
in one slot.

What can be decided from numbers is decided by the script. Whether tokens that are there already are the same is decided
here: tokens that are there never change, so this needs no lock.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError
from lockstep_api.v1 import state_pb2
from lockstep_api.v1.state_pb2 import WriteResult
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_state import metrics, results
from lockstep_state.backend import Limits, StoredStream, Take, Write
from lockstep_state.logs import Log
from lockstep_state.redis_backend import scripts
from lockstep_state.redis_backend.ledger import Ledger
from lockstep_state.redis_backend.store import Command, Store
from lockstep_state.values import Values

_COMPARE = 100
_COUNT_BYTES = 2
"""A record is stored with its number of choices before it."""
_TRIES = 4
"""A write whose stream grows while its tokens are compared is tried again."""
_LEDGER_STEP_BYTES = 16 << 10
_LEFT_TOMBSTONE = 2
_TOMBSTONE_BYTES = 200
"""Memory of a tombstone in Redis, about."""
_TURN_PIECES = 256
_TURN_BYTES = 64 << 10
"""Pieces, and bytes of them, parsed at a time, about 1.5 ms; in between the event loop serves others."""
_UNAVAILABLE = state_pb2.WRITE_OUTCOME_UNAVAILABLE


@dataclass(frozen=True)
class _Raw:
    """A stream as Redis has it."""

    fields: dict[bytes, bytes]
    pieces: Sequence[bytes]
    left_ms: int
    """Of the request's own timeout; -1: it has none, or it is not known."""


class Journals:
    """The streams.

    Args:
        store: where they are.
        values: how they are written.
        ledger: what each tenant has.
        limits: of a stream.
    """

    def __init__(self, store: Store, values: Values, ledger: Ledger, limits: Limits) -> None:
        self._store = store
        self._values = values
        self._ledger = ledger
        self._limits = limits

    async def append(self, writes: Sequence[Write]) -> list[WriteResult]:
        """Write to streams."""
        outcomes: list[WriteResult | None] = [None] * len(writes)
        for at, outcome in (await self._reserve(writes)).items():
            outcomes[at] = outcome
        todo = [at for at, outcome in enumerate(outcomes) if outcome is None]
        answers = _counted(await self._store.many("append", [self._command(writes[at]) for at in todo]))
        noted: list[tuple[Write, int]] = []
        for at, answer in zip(todo, answers, strict=True):
            must_compare = not isinstance(answer, LockstepError) and answer[0] == _COMPARE
            final = await self._compare(writes[at]) if must_compare else answer
            outcomes[at] = _outcome(final)
            noted += _to_tell(writes[at], final)
        await self._ledger.note([("s", write.tenant, write.key, size, write.ttl_s) for write, size in noted])
        return [outcome or results.plain(_UNAVAILABLE) for outcome in outcomes]

    async def read(self, key: str, take: Take | None) -> StoredStream | None:
        """A stream; with `take` under a higher epoch.

        A damaged piece and all after it are forgotten: whoever continues the stream generates them again.
        """
        raw = await self._fetch(key, take)
        return None if raw is None else await self._parse(key, raw)

    async def head(self, key: str) -> StoredStream | None:
        """A stream with empty logs. One that is damaged is read as a whole, and so repaired."""
        raw = await self._fetch(key, None, is_head=True)
        if raw is None:
            return None
        head = self._parse_head(key, raw)
        return await self.read(key, None) if head is None or _has_lost_seal(head, raw.fields) else head

    async def trim(self, tenant: str, keys: Sequence[str], tombstone_ttl_s: float) -> int:
        """Forget streams; those that were taken leave tombstones."""
        commands = [
            Command(self._keys_and_tombstone(key), (int(tombstone_ttl_s * 1000),), scripts.TRIM) for key in keys
        ]
        answers = await self._store.many("trim", commands)
        _raise_any(answers)
        taken = [key for key, answer in zip(keys, answers, strict=True) if answer == _LEFT_TOMBSTONE]
        await self._ledger.forget("s", tenant, keys)
        await self._ledger.note([("m", tenant, key, _TOMBSTONE_BYTES, tombstone_ttl_s) for key in taken])
        return sum(map(bool, answers))

    def _keys(self, key: str) -> tuple[str, str]:
        return self._store.key("stream", key), self._store.key("stream", key, ":pieces")

    def _keys_and_tombstone(self, key: str) -> tuple[str, str, str]:
        return *self._keys(key), self._store.key("stream", key, ":mark")

    async def _reserve(self, writes: Sequence[Write]) -> dict[int, WriteResult]:
        """Reserve what streams that are opened need; the outcome of each write for which that is refused."""
        opened = [at for at, write in enumerate(writes) if write.opening is not None]
        wanted = [
            ("s", write.tenant, write.key, len(write.opening.record), write.ttl_s)
            for write in (writes[at] for at in opened)
            if write.opening is not None
        ]
        refused: dict[int, WriteResult] = {}
        for at, answer in zip(opened, await self._ledger.reserve(wanted), strict=True):
            if isinstance(answer, LockstepError):
                refused[at] = _outcome(answer)
            elif not answer:
                refused[at] = results.plain(state_pb2.WRITE_OUTCOME_FULL)
        return refused

    def _command(self, write: Write, life: bytes = b"") -> Command:
        """What writes; only if the stream has this life, if one is given."""
        place = self._place(write.key)
        opening = write.opening
        record, fingerprints, choices, owner, left_ms = b"", "", 0, b"", -1
        if opening is not None:
            size = opening.choices.to_bytes(_COUNT_BYTES, "big")
            record = self._values.write(f"{place}:r", size + opening.record)
            fingerprints = self._values.fingerprints(place, opening.record)
            left_ms = -1 if opening.left_s is None else int(opening.left_s * 1000)
            choices, owner = opening.choices, self._values.write(f"{place}:o", opening.owner.encode())
        seal = b"" if write.seal is None else self._values.write(f"{place}:s", write.seal)
        seal_prints = "" if write.seal is None else self._values.fingerprints(place, write.seal)
        head = (write.epoch, int(write.ttl_s * 1000), self._limits.stream_bytes, record, fingerprints, choices, owner)
        pieces: list[str | bytes | int] = []
        for piece in write.pieces:
            value = self._values.write(f"{place}:p", piece.SerializeToString())
            pieces += [piece.choice, piece.position, len(piece.ids), int(piece.finish), int(piece.inexact), value]
        arguments = (*head, seal, seal_prints, _LEDGER_STEP_BYTES, life, _new_life(), left_ms, *pieces)
        return Command(self._keys_and_tombstone(write.key), arguments, scripts.APPEND)

    async def _compare(self, write: Write) -> Any:
        """The script's answer for a write with tokens that are there already."""
        for _ in range(_TRIES):
            try:
                raw = await self._fetch(write.key, None)
                stored = None if raw is None else await self._parse(write.key, raw)
                command = self._command(write)
                if raw is not None and stored is not None:
                    refused = _refusal(stored, write)
                    if refused is not None:
                        return [refused.outcome, refused.epoch, refused.choice, refused.length, 0, 0]
                    command = self._command(_rest(write, stored.logs), raw.fields.get(b"i", b""))
                (answer,) = _counted([await self._store.one("append", command, is_batch=True)])
            except LockstepError as error:
                return error
            if answer[0] != _COMPARE:
                return answer
        return [_UNAVAILABLE, 0, 0, 0, 0, 0]

    async def _fetch(self, key: str, take: Take | None, *, is_head: bool = False) -> _Raw | None:
        owner, ttl_ms = b"", 0
        if take is not None:
            owner = self._values.write(f"{self._place(key)}:o", take.owner.encode())
            ttl_ms = int(take.ttl_s * 1000)
        command = Command(self._keys(key), (owner, ttl_ms, int(is_head)), scripts.READ)
        answer = await self._store.one("head" if is_head else "read", command, is_batch=True)
        if isinstance(answer, int):
            metrics.DAMAGED.inc(answer)
            return None
        pairs, pieces, left_ms = answer
        return _Raw(dict(zip(pairs[::2], pairs[1::2], strict=True)), pieces, left_ms)

    def _parse_head(self, key: str, raw: _Raw) -> StoredStream | None:
        """A stream whose logs are still empty; None if it is damaged. A damaged seal is none."""
        place, fields = self._place(key), raw.fields
        plain = self._values.read(f"{place}:r", fields.get(b"r", b""))
        count = 0 if plain is None else int.from_bytes(plain[:_COUNT_BYTES], "big")
        epoch = _number(fields.get(b"e"))
        if plain is None or epoch is None or _number(fields.get(b"n")) != count:
            return None
        seal = None if b"s" not in fields else self._values.read(f"{place}:s", fields[b"s"])
        owner = self._values.read(f"{place}:o", fields.get(b"o", b"")) or b""
        left_s = None if raw.left_ms < 0 else raw.left_ms / 1000
        return StoredStream(plain[_COUNT_BYTES:], [Log() for _ in range(count)], seal, epoch, owner.decode(), left_s)

    async def _parse(self, key: str, raw: _Raw) -> StoredStream | None:
        head = self._parse_head(key, raw)
        if head is None:
            await self._repair(key, raw, -1, (), keeps_seal=False)
            return None
        place, logs, keep, pieces, size = self._place(key), head.logs, 0, 0, 0
        # The stream may change meanwhile. Tokens that were seen stay the same, and a repair finds out by itself.
        for value in raw.pieces:
            if not self._add(place, value, logs):
                break
            keep, pieces, size = keep + 1, pieces + 1, size + len(value)
            if pieces >= _TURN_PIECES or size >= _TURN_BYTES:
                pieces = size = 0
                await asyncio.sleep(0)
        for choice, log in enumerate(logs):
            # The mark may have come after the last piece. A damaged one counts: no tokens are lost for being marked.
            log.inexact = log.inexact or _field(raw, b"x%d" % choice) != 0
        ends = [(_field(raw, b"l%d" % choice), _field(raw, b"f%d" % choice)) for choice in range(len(logs))]
        is_complete = keep == len(raw.pieces) and ends == [(len(log.ids), log.finish) for log in logs]
        if is_complete and not _has_lost_seal(head, raw.fields):
            return head
        seal = head.seal if is_complete else None
        await self._repair(key, raw, keep, logs, keeps_seal=seal is not None)
        return replace(head, seal=seal)

    def _add(self, place: str, value: bytes, logs: Sequence[Log]) -> bool:
        """Add a stored piece; False if it is damaged."""
        plain = self._values.read(f"{place}:p", value)
        if plain is None:
            return False
        try:
            piece = state_pb2.Piece.FromString(plain)
        except DecodeError:
            return False
        if piece.choice >= len(logs) or piece.position != len(logs[piece.choice].ids) or logs[piece.choice].finish:
            return False
        logs[piece.choice].add(piece)
        return True

    async def _repair(self, key: str, raw: _Raw, keep: int, logs: Sequence[Log], *, keeps_seal: bool) -> None:
        state = [text for log in logs for text in (len(log.ids), log.finish or "")]
        head = (raw.fields.get(b"r", b""), len(raw.pieces), keep, int(keeps_seal), _new_life())
        # If it fails, what was read is right nevertheless; the next read repairs it.
        await self._store.many("repair", [Command(self._keys(key), (*head, *state), scripts.REPAIR)])

    @staticmethod
    def _place(key: str) -> str:
        return f"stream:{key}"


def _new_life() -> str:
    """Names a stream from its opening or repair on."""
    return secrets.token_hex(8)


def _has_lost_seal(head: StoredStream, fields: dict[bytes, bytes]) -> bool:
    """Whether a stream has a seal that is damaged."""
    return head.seal is None and b"s" in fields


def _refusal(stored: StoredStream, write: Write) -> WriteResult | None:
    if write.epoch < stored.epoch:
        return results.stale(stored.epoch)
    if write.opening is not None and write.opening.record != stored.record:  # the stream has become another one
        return results.plain(state_pb2.WRITE_OUTCOME_CONFLICT)
    refused = results.refusal(stored.logs, write.pieces)
    return refused or results.seal_refusal(stored.logs, stored.seal, write)


def _rest(write: Write, logs: Sequence[Log]) -> Write:
    news = tuple(logs[each.choice].rest(each) for each in write.pieces if logs[each.choice].is_news(each))
    return Write(write.tenant, write.key, write.epoch, write.ttl_s, write.opening, news, write.seal)


def _outcome(answer: Any) -> WriteResult:
    if isinstance(answer, LockstepError):
        is_full = answer.code is ErrorCode.OVERLOADED
        return results.plain(state_pb2.WRITE_OUTCOME_FULL if is_full else _UNAVAILABLE)
    outcome, epoch, choice, length, *_ = answer
    return WriteResult(outcome=outcome, epoch=epoch, choice=choice, length=length)


def _to_tell(write: Write, answer: Any) -> list[tuple[Write, int]]:
    """What the ledger has to know of a write."""
    return [] if isinstance(answer, LockstepError) or not answer[4] else [(write, answer[4])]


def _counted(answers: list[Any]) -> list[Any]:
    """The answers of appends as numbers; streams that were damaged are counted."""
    numbers = [each if isinstance(each, LockstepError) else [int(part) for part in each.split()] for each in answers]
    metrics.DAMAGED.inc(sum(answer[5] for answer in numbers if not isinstance(answer, LockstepError)))
    return numbers


def _number(text: bytes | None) -> int | None:
    """A number with its checksum, as in `checked.lua`; None if it is damaged."""
    digits, _, checksum = (text or b"").rpartition(b" ")
    is_right = hashlib.sha1(digits, usedforsecurity=False).hexdigest()[:8].encode() == checksum
    return int(digits) if is_right and digits.isdigit() else None


def _field(raw: _Raw, name: bytes) -> int | None:
    """A number of a choice: 0 if it is not there, None if it is damaged."""
    return _number(raw.fields[name]) if name in raw.fields else 0


def _raise_any(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, LockstepError):
            raise answer
