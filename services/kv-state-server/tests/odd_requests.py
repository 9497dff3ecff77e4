"""Requests to the state server with odd values in valid places, odd bytes in valid messages, and noise.

The same random numbers make the same requests.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import xxhash
from bent import bent
from lockstep_api.v1 import inference_pb2, state_pb2

ANSWERS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "CANCELLED", "not sent"}
"""How a request may end."""
NOT_SENT = "Internal error from Core"
"""What the client's own library says if the call has ended while it sends."""
_CODES = ("invalid_request", "payload_too_large")
_NAMES = ["", "a", "b", "\x00", "x" * 512, "x" * 513, "é" * 300, "key with spaces", "{tag}", "*"]
_EPOCHS = [0, 1, 1, 2, 2**53 - 1, 2**53, 2**64 - 1]
_TIMES = [0.0, 60.0, 60.0, 1e-9, -1.0, 86_400.0, 86_401.0, float("nan"), float("inf")]
_NUMBERS = [0, 0, 1, 2, 7, 2**16, 2**31, 2**32 - 1]
_SCHEMAS = [1, 1, 1, 0, 2, 2**32 - 1]
_HASH_BYTES = [32, 32, 32, 0, 31, 33]


@dataclass(frozen=True)
class Request:
    """What a case sends: the method, and the messages in bytes."""

    method: str
    messages: tuple[bytes, ...]
    tenant: str

    @property
    def is_stream(self) -> bool:
        return self.method == "Kv/Put"


def make(draw: random.Random, tenant: str) -> Request:
    """One request of this tenant, as far as its tenant is not odd as well."""
    method = draw.choice(list(METHODS))
    messages = tuple(each.SerializeToString() for each in METHODS[method](draw, tenant))
    match draw.randrange(10):
        case 0 | 1 | 2:
            messages = tuple(bent(draw, each) for each in messages)
        case 3:
            messages = tuple(draw.randbytes(draw.randrange(300)) for _ in messages)
        case 4 if method == "Kv/Put":
            messages = tuple(draw.sample(messages, len(messages)))
    return Request(method, messages, tenant)


async def send(
    channel: grpc.aio.Channel, request: Request, timeout_s: float = 60.0, *, leaves: bool = False
) -> tuple[str, bytes]:
    """How a request ends, and the last message of its answer; with `leaves` the client goes away at once."""
    call = channel.stream_stream(f"/lockstep.v1.{request.method}")(iter(request.messages), timeout=timeout_s)
    answer = b""
    try:
        if leaves:
            call.cancel()
        async for message in call:
            answer = message
        return (await call.code()).name, answer
    except grpc.aio.AioRpcError as error:
        if error.details() == NOT_SENT:
            return "not sent", b""
        code = dict(error.trailing_metadata()).get("lockstep-error-code")
        is_untyped = error.code() == grpc.StatusCode.INVALID_ARGUMENT and code not in _CODES
        return f"untyped: {error.details()}" if is_untyped else error.code().name, b""
    except asyncio.CancelledError:
        if not leaves:
            raise
        return "CANCELLED", b""


def _tenant(draw: random.Random, tenant: str) -> str:
    return tenant if draw.random() < 0.95 else draw.choice(["", "x" * 513])


def _record(draw: random.Random) -> state_pb2.StreamRecord:
    return state_pb2.StreamRecord(
        schema=draw.choice(_SCHEMAS),
        model=draw.choice(_NAMES),
        prompts=[inference_pb2.TokenIds(ids=[1, 2, 3])] * draw.choice([1, 1, 1, 0, 3]),
        choices=[state_pb2.StreamChoice(stream_id="s")] * draw.choice([1, 2, 2, 0, 1024, 1025]),
        request=draw.randbytes(draw.randrange(100)),
    )


def _piece(draw: random.Random) -> state_pb2.Piece:
    ids = [draw.randrange(1 << 32) for _ in range(draw.randrange(4))]
    return state_pb2.Piece(
        choice=draw.choice([0, 0, 1, 1023, 2**32 - 1]),
        position=draw.choice(_NUMBERS),
        ids=ids,
        logprobs=[inference_pb2.Logprobs()] * draw.choice([0, 0, len(ids), 1]),
        finish=draw.choice([0, 0, 1, 77]),  # type: ignore[arg-type]
        cached_tokens=draw.choice(_NUMBERS),
    )


def _write(draw: random.Random, tenant: str) -> state_pb2.StreamWrite:
    return state_pb2.StreamWrite(
        tenant=_tenant(draw, tenant),
        stream_id=draw.choice(_NAMES),
        epoch=draw.choice(_EPOCHS),
        record=_record(draw) if draw.random() < 0.7 else None,
        pieces=[_piece(draw) for _ in range(draw.randrange(3))],
        seal=state_pb2.Seal(outcome=b"end") if draw.random() < 0.2 else None,
        ttl_s=draw.choice(_TIMES),
        owner=draw.choice(_NAMES),
    )


def _append(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.AppendRequest(writes=[_write(draw, tenant) for _ in range(draw.choice([1, 1, 1, 0, 3]))])


def _read(draw: random.Random, tenant: str) -> Iterator[Any]:
    positions = [draw.choice(_NUMBERS) for _ in range(draw.randrange(4))]
    yield state_pb2.ReadRequest(tenant=_tenant(draw, tenant), stream_id=draw.choice(_NAMES), positions=positions)


def _take(draw: random.Random, tenant: str) -> Iterator[Any]:
    names = {"stream_id": draw.choice(_NAMES), "owner": draw.choice(_NAMES)}
    yield state_pb2.TakeRequest(tenant=_tenant(draw, tenant), ttl_s=draw.choice(_TIMES), **names)


def _trim(draw: random.Random, tenant: str) -> Iterator[Any]:
    stream_ids = [draw.choice(_NAMES) for _ in range(draw.choice([1, 0, 3, 5000]))]
    yield state_pb2.TrimRequest(tenant=_tenant(draw, tenant), stream_ids=stream_ids)


def _claim(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.ClaimRequest(
        tenant=_tenant(draw, tenant),
        key=draw.choice(_NAMES),
        request_id=draw.choice(_NAMES),
        fingerprint=bytes(draw.choice([0, 32, 128, 129])),
        ttl_s=draw.choice(_TIMES),
    )


def _release_claim(draw: random.Random, tenant: str) -> Iterator[Any]:
    names = {"key": draw.choice(_NAMES), "request_id": draw.choice(_NAMES)}
    yield state_pb2.ReleaseClaimRequest(tenant=_tenant(draw, tenant), **names)


def _look_up_claim(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.LookUpClaimRequest(tenant=_tenant(draw, tenant), key=draw.choice(_NAMES))


def _bind(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.BindRequest(
        tenant=_tenant(draw, tenant),
        session=draw.choice(_NAMES),
        worker_id=draw.choice(_NAMES),
        ttl_s=draw.choice(_TIMES),
        if_worker=draw.choice([None, *_NAMES]),
    )


def _look_up_session(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.LookUpSessionRequest(tenant=_tenant(draw, tenant), session=draw.choice(_NAMES))


def _touch(draw: random.Random, tenant: str) -> Iterator[Any]:
    times = {"ttl_s": draw.choice(_TIMES)}
    yield state_pb2.TouchSessionRequest(tenant=_tenant(draw, tenant), session=draw.choice(_NAMES), **times)


def _expire(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.ExpireSessionRequest(tenant=_tenant(draw, tenant), session=draw.choice(_NAMES))


def _lease_name(draw: random.Random, tenant: str) -> str:
    return draw.choice([f"{tenant}-a", f"{tenant}-b", "", "x" * 513])


def _acquire(draw: random.Random, tenant: str) -> Iterator[Any]:
    name = _lease_name(draw, tenant)
    yield state_pb2.AcquireLeaseRequest(name=name, owner=draw.choice(_NAMES), ttl_s=draw.choice(_TIMES))


def _renew(draw: random.Random, tenant: str) -> Iterator[Any]:
    values = {"owner": draw.choice(_NAMES), "epoch": draw.choice(_EPOCHS), "ttl_s": draw.choice(_TIMES)}
    yield state_pb2.RenewLeaseRequest(name=_lease_name(draw, tenant), **values)


def _release(draw: random.Random, tenant: str) -> Iterator[Any]:
    values = {"owner": draw.choice(_NAMES), "epoch": draw.choice(_EPOCHS)}
    yield state_pb2.ReleaseLeaseRequest(name=_lease_name(draw, tenant), **values)


def _look_up_lease(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.LookUpLeaseRequest(name=_lease_name(draw, tenant))


def _heads(draw: random.Random) -> state_pb2.HeadRange:
    return state_pb2.HeadRange(first=draw.choice([0, 0, *_NUMBERS]), count=draw.choice([1, 1, 1, *_NUMBERS]))


def _hash(draw: random.Random) -> bytes:
    return bytes([draw.randrange(3)]) * draw.choice(_HASH_BYTES)


def _look_up_blocks(draw: random.Random, tenant: str) -> Iterator[Any]:
    yield state_pb2.LookUpBlocksRequest(
        tenant=_tenant(draw, tenant),
        hashes=[_hash(draw) for _ in range(draw.choice([1, 0, 3, 100, 5000]))],
        heads=[_heads(draw) for _ in range(draw.choice([1, 1, 0, 2, 65]))],
    )


def _get(draw: random.Random, tenant: str) -> Iterator[Any]:
    keys = [state_pb2.BlockKey(hash=_hash(draw), heads=_heads(draw)) for _ in range(draw.choice([1, 0, 5]))]
    yield state_pb2.GetBlocksRequest(tenant=_tenant(draw, tenant), keys=keys)


def _put(draw: random.Random, tenant: str) -> Iterator[Any]:
    content = draw.randbytes(draw.choice([1, 100, 70_000]))
    header = state_pb2.BlockHeader(
        schema=draw.choice(_SCHEMAS),
        key=state_pb2.BlockKey(hash=_hash(draw), heads=_heads(draw)),
        dtype=draw.choice(["float16", "float16", "", "; drop", "x" * 33]),
        shape=[draw.choice(_NUMBERS) for _ in range(draw.choice([1, 2, 0, 9]))],
        length=draw.choice([len(content)] * 4 + [0, len(content) - 1, len(content) + 1, 2**40, 2**64 - 1]),
        checksum=draw.choice([xxhash.xxh3_64_intdigest(content)] * 4 + [0]),
    )
    chunk = draw.choice([len(content), 30_000, 33_333])
    for start in range(0, len(content), chunk):
        message = state_pb2.PutBlocksRequest(data=content[start : start + chunk])
        if start == 0:
            message.tenant, message.ttl_s = _tenant(draw, tenant), draw.choice(_TIMES)
            message.header.CopyFrom(header)
        yield message


METHODS = {
    "Journal/Append": _append,
    "Journal/Read": _read,
    "Journal/Take": _take,
    "Journal/Trim": _trim,
    "Journal/Claim": _claim,
    "Journal/Release": _release_claim,
    "Journal/LookUpClaim": _look_up_claim,
    "Sessions/Bind": _bind,
    "Sessions/LookUp": _look_up_session,
    "Sessions/Touch": _touch,
    "Sessions/Expire": _expire,
    "Leases/Acquire": _acquire,
    "Leases/Renew": _renew,
    "Leases/Release": _release,
    "Leases/LookUp": _look_up_lease,
    "Kv/LookUp": _look_up_blocks,
    "Kv/Put": _put,
    "Kv/Get": _get,
}
"""What makes the messages of a request, by the method."""
