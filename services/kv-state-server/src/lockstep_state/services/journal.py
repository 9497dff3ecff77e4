"""The Journal service."""

from collections import Counter
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from lockstep_api.v1 import state_pb2, state_pb2_grpc
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.protocol import NO_TOKENS

from lockstep_state import metrics
from lockstep_state.backend import Backend, Binding, Opening, StoredStream, Take, Write
from lockstep_state.keys import Kind, key_of
from lockstep_state.services.calls import Running, unary
from lockstep_state.services.checks import (
    SCHEMA,
    Times,
    check_count,
    check_epoch,
    check_fingerprint,
    check_left,
    check_name,
    check_pieces,
    check_record,
)
from lockstep_state.services.encoded import Encoded, encode, encode_head
from lockstep_state.settings import StateSettings

_INVALID = state_pb2.WRITE_OUTCOME_INVALID
metrics.WRITES.labels("FULL")  # from 0: of a series that begins at 1, Prometheus sees no increase


class Journal(state_pb2_grpc.JournalServicer):
    """Journals of streams, and idempotency keys."""

    def __init__(self, backend: Backend, settings: StateSettings, running: Running) -> None:
        self._backend = backend
        self._times = Times(settings.ttl_s, settings.max_ttl_s)
        self.timeout_s = settings.call_timeout_s
        self.running = running
        self._max_batch = settings.max_batch

    @unary("Journal.Append")
    async def Append(self, request: state_pb2.AppendRequest) -> state_pb2.AppendResponse:  # noqa: N802
        """Write to streams."""
        check_count("writes", len(request.writes), self._max_batch)
        return state_pb2.AppendResponse(results=await self._append(request.writes))

    @unary("Journal.Read")
    async def Read(self, request: state_pb2.ReadRequest) -> Encoded:  # noqa: N802
        """A stream from positions on, without logs if they are `NO_TOKENS` for all choices."""
        key = _stream_key(request.tenant, request.stream_id)
        if request.positions and min(request.positions) == NO_TOKENS:
            head, record = _known(await self._backend.head(key))
            if len(request.positions) >= len(record.choices):
                return encode_head(head)
        stored, _ = _known(await self._backend.read(key))
        return await encode(stored, request.positions)

    @unary("Journal.Take")
    async def Take(self, request: state_pb2.TakeRequest) -> Encoded:  # noqa: N802
        """A stream, to continue it under a higher epoch."""
        key = _stream_key(request.tenant, request.stream_id)
        take = Take(check_name("owner", request.owner), self._times.check("ttl_s", request.ttl_s))
        stored, _ = _known(await self._backend.read(key, take))
        return await encode(stored, ())

    @unary("Journal.Trim")
    async def Trim(self, request: state_pb2.TrimRequest) -> state_pb2.TrimResponse:  # noqa: N802
        """Forget streams."""
        check_count("stream_ids", len(request.stream_ids), self._max_batch)
        keys = [_stream_key(request.tenant, each) for each in request.stream_ids]
        ttl_s = self._times.check("ttl_s", request.ttl_s)
        trimmed = await self._backend.trim(key_of(Kind.TENANT, request.tenant), keys, ttl_s)
        return state_pb2.TrimResponse(trimmed=trimmed)

    @unary("Journal.Claim")
    async def Claim(self, request: state_pb2.ClaimRequest) -> state_pb2.ClaimResponse:  # noqa: N802
        """Give an idempotency key to a request."""
        target = check_name("request_id", request.request_id).encode()
        binding = Binding(target, check_fingerprint("fingerprint", request.fingerprint))
        ttl_s = self._times.check("ttl_s", request.ttl_s)
        tenant, key = key_of(Kind.TENANT, request.tenant), _claim_key(request.tenant, request.key)
        stream = _stream_key(request.tenant, request.request_id)
        done, now = await self._backend.bind(tenant, key, binding, ttl_s, b"", stream)
        return state_pb2.ClaimResponse(granted=done, request_id=now.target.decode(), fingerprint=now.note)

    @unary("Journal.Release")
    async def Release(self, request: state_pb2.ReleaseClaimRequest) -> state_pb2.ReleaseClaimResponse:  # noqa: N802
        """Free an idempotency key."""
        target = check_name("request_id", request.request_id).encode()
        tenant, key = key_of(Kind.TENANT, request.tenant), _claim_key(request.tenant, request.key)
        done = await self._backend.unbind(tenant, key, target)
        return state_pb2.ReleaseClaimResponse(released=done)

    @unary("Journal.LookUpClaim")
    async def LookUpClaim(self, request: state_pb2.LookUpClaimRequest) -> state_pb2.ClaimResponse:  # noqa: N802
        """The request that has an idempotency key."""
        now = await self._backend.bound(_claim_key(request.tenant, request.key))
        if now is None:
            return state_pb2.ClaimResponse()
        return state_pb2.ClaimResponse(request_id=now.target.decode(), fingerprint=now.note)

    async def _append(self, writes: Sequence[state_pb2.StreamWrite]) -> list[state_pb2.WriteResult]:
        results: list[state_pb2.WriteResult] = []
        valid: dict[str, tuple[int, Write]] = {}
        for at, each in enumerate(writes):
            results.append(state_pb2.WriteResult(outcome=_INVALID))
            try:
                write = self._write(each)
                if write.key in valid:
                    raise invalid("stream_id", "is in the batch twice")
                valid[write.key] = at, write
            except LockstepError as error:
                results[at].field = error.field or ""
        done = await self._backend.append([write for _, write in valid.values()])
        for (at, _), result in zip(valid.values(), done, strict=True):
            results[at] = result
        for outcome, count in Counter(result.outcome for result in results).items():
            metrics.WRITES.labels(state_pb2.WriteOutcome.Name(outcome).removeprefix("WRITE_OUTCOME_")).inc(count)
        return results

    def _write(self, write: state_pb2.StreamWrite) -> Write:
        check_pieces(write)
        opening = None
        if write.HasField("record"):
            check_record(write.record)
            record = write.record.SerializeToString(deterministic=True)
            left_s = check_left("left_s", write.left_s) if write.HasField("left_s") else None
            opening = Opening(record, len(write.record.choices), check_name("owner", write.owner), left_s)
        return Write(
            tenant=key_of(Kind.TENANT, write.tenant),
            key=_stream_key(write.tenant, write.stream_id),
            epoch=check_epoch("epoch", write.epoch),
            ttl_s=self._times.check("ttl_s", write.ttl_s),
            opening=opening,
            pieces=tuple(write.pieces),
            seal=write.seal.SerializeToString() if write.HasField("seal") else None,
        )


def _stream_key(tenant: str, stream_id: str) -> str:
    check_name("tenant", tenant)
    return key_of(Kind.STREAM, tenant, check_name("stream_id", stream_id).encode())


def _claim_key(tenant: str, key: str) -> str:
    check_name("tenant", tenant)
    return key_of(Kind.CLAIM, tenant, check_name("key", key).encode())


def _known(stored: StoredStream | None) -> tuple[StoredStream, state_pb2.StreamRecord]:
    """A stream that was found, and its record.

    Raises:
        LockstepError: STREAM_NOT_FOUND, there is none that can be read.
    """
    try:
        record = None if stored is None else state_pb2.StreamRecord.FromString(stored.record)
    except DecodeError:
        record = None
    if stored is None or record is None or record.schema != SCHEMA:
        raise LockstepError(ErrorCode.STREAM_NOT_FOUND, "there is no such stream")
    return stored, record
