"""Whatever the state server sends that is not exactly what was asked for is a miss: nothing raises, nothing counts."""

import logging
import time
from random import Random

import pytest
from google.protobuf.message import DecodeError
from lockstep_api.v1 import state_pb2
from lockstep_engine.remote_store import BlockForm, HeadRange
from scripted_kv import FORM, HEADS, Memory, ScriptedKv, block_hash, fetch, opened, parts_of, serving

LOG_EVERY_S = 60.0
SEED = 20_240_601
NAMES = ["a", "b", "c"]
PARTS = len(NAMES) * len(HEADS)


def copies(messages):
    copied = []
    for message in messages:
        copied.append(state_pb2.GetBlocksResponse())
        copied[-1].CopyFrom(message)
    return copied


def starts(messages):
    return [at for at, message in enumerate(messages) if message.HasField("header")]


# Each changes the messages of one part, of which there are several, and may not change their number.


def flip(rng, data):
    flipped = bytearray(data)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def flip_content(rng, part):
    message = rng.choice(part)
    message.data = flip(rng, message.data)


def other_content(rng, part):
    for message in part:
        message.data = rng.randbytes(len(message.data))


def flip_header(rng, part):
    raw = flip(rng, part[0].header.SerializeToString())
    try:
        part[0].header.CopyFrom(state_pb2.BlockHeader.FromString(raw))
    except DecodeError:
        part[0].ClearField("header")


def truncate(rng, part):
    part[-1].data = part[-1].data[: rng.randrange(len(part[-1].data))]


def lengthen(rng, part):
    rng.choice(part).data += rng.randbytes(rng.randrange(1, 50))


def lose_message(rng, part):
    del part[rng.randrange(len(part))]


def repeat_message(rng, part):
    at = rng.randrange(len(part) - 1)  # what follows the last one leaves the part whole
    part.insert(at, part[at])


def other_rank(_rng, part):
    heads = part[0].header.key.heads
    heads.first = HEADS[heads.first == HEADS[0].first].first


def other_type(rng, part):
    part[0].header.dtype = rng.choice(["bfloat16", "float8_e5m2", "", "FLOAT8_E4M3FN"])


def other_shape(rng, part):
    part[0].header.shape[:] = rng.choice([[256], [2, 4, 33], [4, 2, 32], []])


def other_length(rng, part):
    part[0].header.length += rng.choice([-1, 1, 1 << 40])


def other_checksum(rng, part):
    part[0].header.checksum ^= 1 << rng.randrange(64)


def other_schema(rng, part):
    part[0].header.schema = rng.choice([0, 2, 7])


def other_hash(_rng, part):
    part[0].header.key.hash = block_hash("other")


def no_header(_rng, part):
    part[0].ClearField("header")


def second_header(_rng, part):
    part[-1].header.CopyFrom(part[0].header)


def index_beyond(rng, part):
    rng.choice(part).index = rng.choice([PARTS, PARTS + 5, (1 << 32) - 1])


DAMAGES = [
    flip_content,
    other_content,
    flip_header,
    truncate,
    lengthen,
    lose_message,
    repeat_message,
    other_rank,
    other_type,
    other_shape,
    other_length,
    other_checksum,
    other_schema,
    other_hash,
    no_header,
    second_header,
    index_beyond,
]


def parts(messages):
    """Copies of the messages, those of each part together."""
    grouped = []
    for message in messages:
        if message.HasField("header"):
            grouped.append([])
        copied = state_pb2.GetBlocksResponse()
        copied.CopyFrom(message)
        grouped[-1].append(copied)
    return grouped


@pytest.fixture
async def kv(socket_path):
    async with serving(ScriptedKv(), f"unix:{socket_path}") as kv:
        yield kv


@pytest.fixture
async def store(kv, socket_path):
    async with opened(f"unix:{socket_path}") as store:
        yield store


async def put_all(store):
    assert store.offer("t", parts_of(NAMES)) == PARTS
    await store.flush(30.0)


@pytest.mark.parametrize("cases", [800, pytest.param(10_000, marks=pytest.mark.exhaustive)])
async def test_damaged_parts_never_count(kv, store, caplog, cases):
    caplog.set_level(logging.WARNING, logger="lockstep.worker")  # whatever other tests have set
    rng, began = Random(SEED), time.monotonic()
    await put_all(store)
    for number in range(cases):
        damage, at = DAMAGES[number % len(DAMAGES)], rng.randrange(PARTS)

        def mangle(messages, damage=damage, at=at):
            grouped = parts(messages)
            damage(rng, grouped[at])
            return [message for part in grouped for message in part]

        kv.mangle = mangle
        memory = Memory()
        result = await fetch(store, NAMES, memory)
        what = f"seed {SEED}, case {number}: {damage.__name__} in part {at}"
        assert (result.blocks, result.outcome) == (at // len(HEADS), "damaged"), what
        assert memory.has(NAMES, result.blocks), what
    print(f"seed {SEED}: {cases} damaged answers, none counted")
    kv.mangle = list
    assert (await fetch(store, NAMES, Memory())).blocks == len(NAMES), "the store goes on"
    assert "Traceback" not in caplog.text
    lines = caplog.text.count("is damaged")
    assert 1 <= lines <= 1 + (time.monotonic() - began) / LOG_EVERY_S, "a log line for each would be a flood"


async def test_parts_in_another_order_count_up_to_there(kv, store):
    rng = Random(SEED)
    await put_all(store)
    for _ in range(50):
        order = rng.sample(range(PARTS), PARTS)
        kv.mangle = lambda messages, order=order: [each for at in order for each in parts(messages)[at]]
        in_order = next((at for at, part in enumerate(order) if at != part), PARTS)
        memory = Memory()
        result = await fetch(store, NAMES, memory)
        assert result.blocks == in_order // len(HEADS), order
        assert memory.has(NAMES, result.blocks), order


async def test_a_stream_that_ends_early_counts_up_to_there(kv, store):
    await put_all(store)
    for end in range(3 * PARTS):
        kv.mangle = lambda messages, end=end: messages[:end]
        memory = Memory()
        result = await fetch(store, NAMES, memory)
        assert result.blocks == end // (3 * len(HEADS)), end
        assert result.outcome == ("damaged" if end % 3 else "fetched" if result.blocks else "absent"), end
        assert memory.has(NAMES, result.blocks), end


@pytest.mark.parametrize(
    "form",
    [
        BlockForm("bfloat16", FORM.shape, FORM.length),
        BlockForm(FORM.dtype, (4, 2, 32), FORM.length),
        BlockForm(FORM.dtype, FORM.shape, FORM.length * 2),
    ],
    ids=["dtype", "shape", "length"],
)
async def test_blocks_of_another_form_are_damaged(store, form):
    await put_all(store)
    result = await fetch(store, NAMES, Memory(form.length), form=form)
    assert (result.blocks, result.outcome) == (0, "damaged")


async def test_blocks_of_another_split_are_absent(kv, store):
    await put_all(store)
    kv.calls.clear()
    result = await fetch(store, NAMES, Memory(), heads=[HeadRange(0, 8)])
    assert (result.blocks, result.outcome) == (0, "absent")
    assert kv.calls == ["LookUp"]
