"""What a router never sends to a worker: odd values in valid places, frames out of order, odd bytes, and noise.

The same random numbers make the same frames.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from bent import bent
from lockstep_api.v1 import inference_pb2, worker_pb2

ANSWERS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "CANCELLED", "not sent"}
"""How a call may end."""
SERVE = "/lockstep.v1.Worker/Serve"
TOKENIZER = "/lockstep.v1.Worker/Tokenizer"
_NOT_SENT = "Internal error from Core"
"""What the client's own library says if the call has ended while it sends."""
_MOST_FRAMES = 8
_FLOOD = 1500
"""Refusals at once that are more than a worker keeps for one router."""
_DEEP = 150
"""Frames within frames that no decoder follows."""
_UINT32 = 2**32 - 1
_UINT64 = 2**64 - 1
_NUMBERS = [0.0, 1.0, 0.05, -1.0, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
_NAMES = ["s", "s", "a", "", "\x00", "1:s:1", "x" * 128, "x" * 129, "\u00e9" * 300, "{}"]
_ATTEMPTS = [1, 1, 2, 3, 0, _UINT32]
_IDS: Sequence[Sequence[int]] = [
    (),
    (0,),
    (_UINT32,),
    (5, 6, 7) * 10,
    (9,) * 255,
    (9,) * 257,
    (7,) * 2047,
    (8,) * 30_000,
]
_TEXTS = ["", "{}", "[", "[" * 1000, '{"type":"object"}', '{"$ref":"#"}', "[a-z]{1,5}", "(a*)*b", "\x00", "a" * 70_000]
_TRACES = ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-0-0-0", "\n", "x" * 5000]
_GRAMMARS = [
    inference_pb2.Grammar(kind=kind, text=text, field=field)  # type: ignore[arg-type]
    for kind in (0, 1, 2, 3, 4, 77)
    for text in _TEXTS
    for field in ("", "x" * 65)
]
_SAMPLING: Mapping[str, Sequence[Any]] = {
    "max_tokens": [0, 1, 60, _UINT32],
    "temperature": _NUMBERS,
    "top_p": _NUMBERS,
    "top_k": [1, _UINT32],
    "min_p": _NUMBERS,
    "repetition_penalty": _NUMBERS,
    "frequency_penalty": _NUMBERS,
    "presence_penalty": _NUMBERS,
    "logit_bias": [{0: 1.0}, {_UINT32: 1.0}, {1: float("nan")}, dict.fromkeys(range(400), -1000.0), {2: 1e30}],
    "seed": [0, _UINT64],
    "logprobs": [0, 5, 20, 21, _UINT32],
    "stop_token_ids": [[], [0], [_UINT32], [3] * 5000],
    "ignore_eos": [True],
    "min_tokens": [1, _UINT32],
    "grammar": _GRAMMARS,
}
_SUBMIT: Mapping[str, Sequence[Any]] = {
    "stream_id": _NAMES,
    "attempt": _ATTEMPTS,
    "prompt_ids": _IDS,
    "emitted_ids": _IDS,
    "deadline_s": _NUMBERS,
    "tenant": _NAMES,
    "priority": [-1, 1, 2**31 - 1, -(2**31)],
    "arrived_s": _NUMBERS,
    "embed": [True],
    "handle": [0, 1, 2, _UINT64],
    "suspicion": [0, 1, 2, 77],
    "traceparent": _TRACES,
    "tracestate": _TRACES,
    "request_id": ["r-1", "\n", "x" * 5000],
}
"""By field of Submit and of Sampling, values that are odd or rare."""


@dataclass(frozen=True)
class Call:
    """What a case does: the method, the messages in bytes, and how it goes on."""

    method: str
    messages: tuple[bytes, ...]
    reads: int
    """Answers that it waits for before it says that no more messages come."""
    leaves: bool
    """It goes away instead."""
    is_alone: bool
    """It has a connection of its own."""


def make(draw: random.Random) -> Call:
    """One call: mostly a router's stream, sometimes a request for the tokenizer, or a method that is none."""
    method = draw.choices([SERVE, TOKENIZER, "/lockstep.v1.Worker/Nothing", "/Nothing/Serve"], [90, 7, 2, 1])[0]
    if method == TOKENIZER:
        asked = worker_pb2.TokenizerRequest(digest=draw.choice(_NAMES)).SerializeToString()
        messages: tuple[bytes, ...] = (draw.choice([asked, asked, draw.randbytes(draw.randrange(40))]),)
    else:
        messages = _frames(draw)
    return Call(
        method=method,
        messages=messages,
        reads=draw.randrange(7) if messages else 0,
        leaves=draw.random() < 0.2,
        is_alone=draw.random() < 0.3,
    )


async def send(channel: grpc.aio.Channel, made: Call, timeout_s: float) -> str:
    """How a call ends: the name of its status."""
    call = channel.stream_stream(made.method)(timeout=timeout_s)
    try:
        for message in made.messages:
            await call.write(message)
        for _ in range(made.reads):
            if await call.read() is grpc.aio.EOF:
                break
        if made.leaves:
            call.cancel()
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # it has ended: the status says how
    except asyncio.CancelledError:
        if not made.leaves:
            raise
    return "not sent" if await call.details() == _NOT_SENT else str((await call.code()).name)


def noise(draw: random.Random, most: int = 200) -> bytes:
    """Bytes of any kind."""
    return draw.randbytes(draw.randrange(most))


def _frames(draw: random.Random) -> tuple[bytes, ...]:
    kinds = [_odd_submit, _odd_submit, _odd_submit, _plain_submit, _odd_cancel, _odd_several, _odd_watch, _hello]
    frames = [draw.choice(kinds)(draw).SerializeToString() for _ in range(draw.randrange(_MOST_FRAMES))]
    if draw.random() < 0.92:
        frames.insert(0, _hello(draw).SerializeToString())
    match draw.randrange(12):
        case 0 if frames:
            at = draw.randrange(len(frames))
            frames[at] = bent(draw, frames[at])
        case 1:
            frames.append(noise(draw))
        case 2:
            frames.append(_frame_of_a_worker(draw))
        case 3:
            frames.append(_unending(draw))
    return tuple(frames)


def _hello(draw: random.Random) -> worker_pb2.RouterFrame:
    return worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id=draw.choice(_NAMES)))


def _plain_submit(draw: random.Random) -> worker_pb2.RouterFrame:
    return worker_pb2.RouterFrame(submit=worker_pb2.Submit(**_plain(draw)))


def _plain(draw: random.Random) -> dict[str, Any]:
    sampling = inference_pb2.Sampling(max_tokens=draw.choice([4, 40, 200]), seed=7)
    return {"stream_id": f"p{draw.randrange(40)}", "attempt": 1, "prompt_ids": [5, 6, 7], "sampling": sampling}


def _odd_submit(draw: random.Random) -> worker_pb2.RouterFrame:
    fields = _plain(draw)
    for name in draw.sample(list(_SUBMIT), draw.randrange(3)):
        fields[name] = draw.choice(_SUBMIT[name])
    odd = {name: draw.choice(_SAMPLING[name]) for name in draw.sample(list(_SAMPLING), draw.randrange(3))}
    fields["sampling"] = inference_pb2.Sampling(**({"max_tokens": 40, "seed": 7} | odd))
    return worker_pb2.RouterFrame(submit=worker_pb2.Submit(**fields))


def _odd_cancel(draw: random.Random) -> worker_pb2.RouterFrame:
    name = draw.choice([*_NAMES, f"p{draw.randrange(40)}"])
    return worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(stream_id=name, attempt=draw.choice(_ATTEMPTS)))


def _odd_watch(draw: random.Random) -> worker_pb2.RouterFrame:
    return worker_pb2.RouterFrame(prefix_watch=worker_pb2.PrefixWatch(max_blocks=draw.choice([0, 1, _UINT32])))


def _odd_several(draw: random.Random) -> worker_pb2.RouterFrame:
    kinds = [_odd_submit, _plain_submit, _odd_cancel, _odd_watch]
    if draw.random() < 0.2:
        kinds += [_hello, _odd_several]
    frames = [draw.choice(kinds)(draw) for _ in range(draw.randrange(6))]
    if draw.random() < 0.05:
        frames += [worker_pb2.RouterFrame(submit=worker_pb2.Submit())] * _FLOOD
    return worker_pb2.RouterFrame(several=worker_pb2.RouterFrames(frames=frames))


def _frame_of_a_worker(draw: random.Random) -> bytes:
    """What only workers send, with an epoch that is none."""
    frame = worker_pb2.WorkerFrame(epoch=draw.choice([0, 1, _UINT64]))
    match draw.randrange(3):
        case 0:
            frame.hello.incarnation = draw.choice([0, _UINT64])
        case 1:
            frame.tokens.streams.add(stream_id="s", attempt=1, position=_UINT32, ids=[_UINT32])
        case _:
            frame.rejected.stream_id = "s"
    return bytes(frame.SerializeToString())


def _unending(draw: random.Random) -> bytes:
    """Frames within frames, or one that is said to be longer than it is."""
    data = b""
    for _ in range(_DEEP):
        inner = b"\x0a" + _varint(len(data)) + data
        data = b"\x22" + _varint(len(inner)) + inner
    return draw.choice([data, b"\x12" + _varint(2**31 - 1), b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"])


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
