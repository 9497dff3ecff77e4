"""What every backend does with journals of streams."""

import asyncio
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import redis
from backends import LIMITS, TTL_S, eventually, piece
from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_state.backend import Limits, Opening, Take
from lockstep_state.memory import MemoryBackend
from lockstep_state.redis_backend import RedisBackend
from lockstep_state.redis_backend.store import Store
from lockstep_state.values import Values

OK = state_pb2.WRITE_OUTCOME_OK
STALE = state_pb2.WRITE_OUTCOME_STALE
UNKNOWN = state_pb2.WRITE_OUTCOME_UNKNOWN
GAP = state_pb2.WRITE_OUTCOME_GAP
CONFLICT = state_pb2.WRITE_OUTCOME_CONFLICT
SEALED = state_pb2.WRITE_OUTCOME_SEALED
FULL = state_pb2.WRITE_OUTCOME_FULL
TOO_LARGE = state_pb2.WRITE_OUTCOME_TOO_LARGE
STOP = inference_pb2.FINISH_REASON_STOP


def logprobs(*ids):
    return [inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(id=each, logprob=-0.5)) for each in ids]


async def tokens(kept, name="stream"):
    stored = await kept.backend.read(kept.key(name))
    return [list(log.ids) for log in stored.logs]


async def test_stream_is_read_as_it_was_written(kept):
    first = piece(0, 0, 5, 6, logprobs=logprobs(5, 6), cached_tokens=2, unproven=True)
    pieces = [first, piece(1, 0, 7, inexact=True, finish=STOP)]
    assert (await kept.open(pieces=pieces)).outcome == OK
    assert (await kept.append(pieces=[piece(0, 2, 8, logprobs=logprobs(8), cached_tokens=2)])).outcome == OK
    assert (await kept.append(pieces=[piece(0, 3, finish=STOP, cached_tokens=2)], seal=b"end")).outcome == OK
    stored = await kept.backend.read(kept.key())
    assert (stored.record, stored.seal, stored.epoch, stored.owner) == (b"record", b"end", 1, "router-1")
    first, second = stored.logs
    assert (first.ids, first.finish, first.cached_tokens, first.inexact) == (array("I", [5, 6, 8]), STOP, 2, False)
    assert first.logprobs == [each.SerializeToString() for each in logprobs(5, 6, 8)]
    assert (second.ids, second.finish, second.inexact) == (array("I", [7]), STOP, True)
    assert (first.unproven, second.unproven) == (True, False)


async def test_what_is_left_of_a_timeout_grows_less(kept):
    for left_s in (500.0, 900.0):  # a repeat does not begin it again
        assert (await kept.append(opening=Opening(b"record", 1, "router-1", left_s))).outcome == OK
    first = (await kept.backend.read(kept.key())).left_s
    assert 0 < (await kept.backend.head(kept.key())).left_s <= first
    await asyncio.sleep(0.01)
    taken = await kept.backend.read(kept.key(), Take("router-2", TTL_S))
    assert 0 < taken.left_s < first <= 500.0
    await kept.append("over", opening=Opening(b"record", 1, "router-1", 0.0))
    assert (await kept.backend.read(kept.key("over"))).left_s == 0
    await kept.append("none", opening=Opening(b"record", 1, "router-1"))
    assert (await kept.backend.read(kept.key("none"))).left_s is None
    assert (await kept.backend.head(kept.key("none"))).left_s is None


class CountingValues(Values):
    """Notes in which turn of the event loop each value is read."""

    def __init__(self):
        super().__init__()
        self.turn = 0
        self.reads = Counter()

    def read(self, place, stored):
        self.reads[self.turn] += 1
        return super().read(place, stored)

    async def count_turns(self):
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["redis"])
async def test_a_long_stream_is_read_in_several_turns_of_the_event_loop(kept, kind):
    """Everybody else waits for a turn. Without its tokens a stream is read in one, however long it is."""
    values, limits = CountingValues(), replace(LIMITS, stream_bytes=1 << 20)
    backend = RedisBackend(kept.options, values, limits)
    counting = asyncio.create_task(values.count_turns())
    try:
        many = 1500
        (opened,) = await backend.append([kept.write(opening=Opening(b"record", 1, "r"))])
        assert opened.outcome == OK
        for number in range(many):
            (result,) = await backend.append([kept.write(pieces=[piece(0, number, number)])])
            assert result.outcome == OK
        values.reads.clear()
        stored = await backend.read(kept.key())
        assert list(stored.logs[0].ids) == list(range(many))
        assert max(values.reads.values()) < many / 3
        values.reads.clear()
        assert (await backend.append([kept.write(pieces=[piece(0, 0, 0)])]))[0].outcome == OK  # is compared
        assert many < values.reads.total()
        assert max(values.reads.values()) < many / 3
        values.reads.clear()
        head = await backend.head(kept.key())
        assert (head.record, head.epoch, head.owner, head.seal) == (b"record", 1, "r", None)
        assert values.reads.total() < 5
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        await backend.close()


async def test_head_of_a_stream_is_all_but_its_tokens(kept):
    assert await kept.backend.head(kept.key()) is None
    await kept.open(pieces=[piece(0, 0, 5)])
    await kept.backend.read(kept.key(), Take("router-2", TTL_S))
    assert (await kept.append(epoch=2, seal=b"end")).outcome == OK
    head = await kept.backend.head(kept.key())
    assert (head.record, head.seal, head.epoch, head.owner) == (b"record", b"end", 2, "router-2")


@pytest.mark.parametrize("kind", ["redis", "encrypted"])
@pytest.mark.parametrize(("field", "is_kept"), [("s", True), ("r", False), ("e", False)])
async def test_head_of_a_damaged_stream_is_repaired(kept, redis_server, field, is_kept):
    await kept.open(pieces=[piece(0, 0, 5)], seal=b"end")
    with redis.Redis(port=redis_server.port) as server:
        name = f"lockstep:stream:{{{kept.key()}}}"
        server.hset(name, field, b"damaged")
        head = await kept.backend.head(kept.key())
        assert (head is not None, bool(server.exists(name)), server.hexists(name, "s")) == (is_kept, is_kept, False)
    if head is not None:
        assert (head.record, head.seal) == (b"record", None)


async def test_unknown_stream_takes_nothing(kept):
    assert (await kept.append(pieces=[piece(0, 0, 5)])).outcome == UNKNOWN
    assert (await kept.append(seal=b"end")).outcome == UNKNOWN
    assert await kept.backend.read(kept.key()) is None
    assert await kept.backend.read(kept.key(), Take("other", TTL_S)) is None


async def test_repeats_change_nothing(kept):
    first = {"pieces": [piece(0, 0, 5, 6), piece(1, 0, 9)]}
    for _ in range(3):
        assert (await kept.open(**first)).outcome == OK
    for pieces in ([piece(0, 1, 6, 7)], [piece(0, 0, 5, 6, 7)], [piece(0, 2, 7)]):
        assert (await kept.append(pieces=pieces)).outcome == OK
    assert await tokens(kept) == [[5, 6, 7], [9]]
    for _ in range(2):
        assert (await kept.append(pieces=[piece(0, 3, 8, finish=STOP)], seal=b"end")).outcome == OK
    assert (await kept.append(pieces=[piece(0, 4, finish=STOP)])).outcome == OK
    assert await tokens(kept) == [[5, 6, 7, 8], [9]]


async def test_gap_names_what_is_there(kept):
    await kept.open(pieces=[piece(0, 0, 5)])
    result = await kept.append(pieces=[piece(1, 0, 7), piece(0, 3, 8)])
    assert (result.outcome, result.choice, result.length) == (GAP, 0, 1)
    assert await tokens(kept) == [[5], []], "a write is done completely or not at all"


async def test_other_tokens_are_a_conflict(kept):
    await kept.open(pieces=[piece(0, 0, 5, 6)])
    assert (await kept.append(pieces=[piece(0, 1, 7)])).outcome == CONFLICT
    assert (await kept.append(pieces=[piece(0, 0, 5, 7, 8)])).outcome == CONFLICT
    assert (await kept.append(pieces=[piece(2, 0, 5)])).outcome == CONFLICT
    assert (await kept.append(opening=Opening(b"another", 2, "r"))).outcome == CONFLICT
    assert await tokens(kept) == [[5, 6], []]


async def test_stream_that_becomes_another_one_while_its_tokens_are_compared_is_a_conflict(kept, monkeypatch):
    if kept.options is None:
        pytest.skip("in memory nothing happens meanwhile")
    await kept.open(pieces=[piece(1, 0, 5)])
    one, has_read = Store.one, []

    async def replace_before(store, operation, command, **options):
        if operation == "read" and not has_read:
            has_read.append(True)
            await kept.backend.trim(kept.tenant, [kept.key()], TTL_S)
            await kept.append(opening=Opening(b"other", 1, "router-2"))
        return await one(store, operation, command, **options)

    monkeypatch.setattr(Store, "one", replace_before)
    refused = await kept.open(pieces=[piece(1, 0, 5)])
    assert (refused.outcome, refused.choice, refused.length) == (CONFLICT, 0, 0)
    assert has_read


async def test_nothing_follows_the_end_of_a_choice(kept):
    await kept.open(pieces=[piece(0, 0, 5, finish=STOP)])
    assert (await kept.append(pieces=[piece(0, 1, 6)])).outcome == CONFLICT
    assert (await kept.append(pieces=[piece(0, 1, finish=inference_pb2.FINISH_REASON_LENGTH)])).outcome == CONFLICT
    assert (await kept.append(pieces=[piece(1, 0, 6, 7)])).outcome == OK
    assert (await kept.append(pieces=[piece(1, 0, 6, finish=STOP)])).outcome == CONFLICT, "tokens follow that end"


async def marks(kept):
    return [log.inexact for log in (await kept.backend.read(kept.key())).logs]


@pytest.mark.parametrize("finish", [0, STOP])
async def test_mark_may_come_after_all_tokens(kept, finish):
    await kept.open(pieces=[piece(0, 0, 5, 6, finish=finish), piece(1, 0, 7)])
    assert (await kept.append(pieces=[piece(0, 3, inexact=True)])).outcome == GAP
    assert await marks(kept) == [False, False]
    for _ in range(2):
        assert (await kept.append(pieces=[piece(0, 2, inexact=True)])).outcome == OK
        assert (await marks(kept), await tokens(kept)) == ([True, False], [[5, 6], [7]])
    if not finish:
        assert (await kept.append(pieces=[piece(0, 2, 8, inexact=True, finish=STOP)])).outcome == OK
    assert (await kept.append(pieces=[piece(1, 1, 9)], seal=b"end")).outcome == OK
    stored = await kept.backend.read(kept.key(), Take("router-2", TTL_S))
    assert [(log.inexact, log.finish) for log in stored.logs] == [(True, STOP), (False, 0)]
    assert stored.seal == b"end"


@pytest.mark.parametrize(
    "repeat", [piece(0, 0, 5, 6, inexact=True), piece(0, 1, 6, finish=STOP, inexact=True), piece(0, 2, inexact=True)]
)
async def test_mark_may_come_with_tokens_that_are_there(kept, repeat):
    await kept.open(pieces=[piece(0, 0, 5, 6, finish=STOP)])
    for _ in range(2):
        assert (await kept.append(pieces=[repeat])).outcome == OK
        stored = await kept.backend.read(kept.key())
        assert [(list(log.ids), log.finish, log.inexact) for log in stored.logs] == [
            ([5, 6], STOP, True),
            ([], 0, False),
        ]


@pytest.mark.parametrize("kind", ["redis", "encrypted"])
async def test_damaged_mark_counts_as_one_and_costs_no_tokens(kept, redis_server):
    await kept.open(pieces=[piece(0, 0, 5), piece(1, 0, 7)])
    await kept.append(pieces=[piece(0, 1, inexact=True)])
    with redis.Redis(port=redis_server.port) as server:
        assert server.hset(f"lockstep:stream:{{{kept.key()}}}", "x0", b"damaged") == 0, "it was there"
    assert (await marks(kept), await tokens(kept)) == ([True, False], [[5], [7]])
    assert (await kept.append(pieces=[piece(0, 1, 6)])).outcome == OK
    assert (await marks(kept), await tokens(kept)) == ([True, False], [[5, 6], [7]])


async def test_sealed_stream_takes_no_mark(kept):
    await kept.open(pieces=[piece(0, 0, 5), piece(1, 0, 7, inexact=True)], seal=b"end")
    assert (await kept.append(pieces=[piece(0, 1, inexact=True)])).outcome == SEALED
    assert (await kept.append(pieces=[piece(0, 0, 5, inexact=True)])).outcome == SEALED
    assert (await kept.append(pieces=[piece(1, 1, inexact=True)])).outcome == OK, "it is there"
    assert await marks(kept) == [False, True]


async def test_sealed_stream_takes_nothing_new(kept):
    await kept.open(pieces=[piece(0, 0, 5)], seal=b"end")
    assert (await kept.append(pieces=[piece(0, 1, 6)])).outcome == SEALED
    assert (await kept.append(seal=b"other")).outcome == SEALED
    assert (await kept.append(pieces=[piece(0, 0, 5)], seal=b"end")).outcome == OK
    assert (await kept.append()).outcome == OK
    assert (await kept.backend.read(kept.key())).seal == b"end"


async def test_taking_fences_the_former_writer(kept):
    await kept.open(pieces=[piece(0, 0, 5)])
    taken = await kept.backend.read(kept.key(), Take("router-2", TTL_S))
    assert (taken.epoch, taken.owner) == (2, "router-2")
    stale = await kept.append(pieces=[piece(0, 1, 6)])
    assert (stale.outcome, stale.epoch) == (STALE, 2)
    assert (await kept.append(pieces=[piece(0, 0, 5)])).outcome == STALE, "repeats are fenced, too"
    assert (await kept.append(epoch=2, pieces=[piece(0, 1, 7)])).outcome == OK
    assert await tokens(kept) == [[5, 7], []]
    assert (await kept.backend.read(kept.key())).epoch == 2


async def test_a_higher_epoch_that_the_store_has_forgotten_counts(kept):
    await kept.open()
    assert (await kept.append(epoch=7, pieces=[piece(0, 0, 5)])).outcome == OK
    assert (await kept.append(epoch=6)).outcome == STALE


async def test_of_many_that_take_one_stream_each_has_its_own_epoch(kept):
    await kept.open()
    taken = await asyncio.gather(*(kept.backend.read(kept.key(), Take(f"r{n}", TTL_S)) for n in range(8)))
    assert sorted(each.epoch for each in taken) == list(range(2, 10))


async def test_batch_has_an_outcome_for_each_write(kept):
    await kept.open("open", pieces=[piece(0, 0, 1)])
    writes = [
        kept.write("open", pieces=[piece(0, 1, 2)]),
        kept.write("unknown", pieces=[piece(0, 0, 1)]),
        kept.write("new", opening=Opening(b"record", 1, "r"), pieces=[piece(0, 0, 3)]),
    ]
    results = await kept.backend.append(writes)
    assert [each.outcome for each in results] == [OK, UNKNOWN, OK]
    assert await tokens(kept, "open") == [[1, 2], []]
    assert await tokens(kept, "new") == [[3]]


async def test_batch_of_many_streams(kept):
    writes = [kept.write(f"s{n}", opening=Opening(b"record", 1, "r"), pieces=[piece(0, 0, n)]) for n in range(90)]
    assert {each.outcome for each in await kept.backend.append(writes * 3)} == {OK}
    assert await tokens(kept, "s89") == [[89]]


async def test_trimmed_stream_is_gone(kept):
    await kept.open("one")
    await kept.open("two")
    assert await kept.backend.trim(kept.tenant, [kept.key("one"), kept.key("none")], TTL_S) == 1
    assert await kept.backend.read(kept.key("one")) is None
    assert await kept.backend.read(kept.key("two")) is not None
    assert (await kept.open("one", choices=1)).outcome == OK


async def taken(kept, name="stream"):
    await kept.open(name, pieces=[piece(0, 0, 5)])
    return await kept.backend.read(kept.key(name), Take("router-2", TTL_S))


@pytest.mark.parametrize("seal", [None, b"end"])
async def test_trimmed_stream_stays_fenced_from_those_that_had_it_before(kept, seal):
    await taken(kept)
    await kept.append(epoch=2, seal=seal)
    assert await kept.backend.trim(kept.tenant, [kept.key()], TTL_S) == 1
    for _ in range(2):  # the second time the router sends everything again, or the trim is repeated
        stale = await kept.append(pieces=[piece(0, 1, 6)])
        assert (stale.outcome, stale.epoch) == (STALE, 2)
        again = await kept.open(pieces=[piece(0, 0, 5, 6)])
        assert (again.outcome, again.epoch) == (STALE, 2)
        assert await kept.backend.read(kept.key(), Take("router-3", TTL_S)) is None
        assert await kept.backend.trim(kept.tenant, [kept.key()], TTL_S) == 0


async def test_router_that_had_a_trimmed_stream_last_may_write_it_again(kept):
    await taken(kept)
    await kept.backend.trim(kept.tenant, [kept.key()], TTL_S)
    assert (await kept.append(epoch=2, pieces=[piece(0, 1, 6)])).outcome == UNKNOWN
    assert (await kept.open(epoch=2, pieces=[piece(0, 0, 5, 6)])).outcome == OK
    assert await tokens(kept) == [[5, 6], []]
    assert (await kept.append(pieces=[piece(0, 2, 7)])).outcome == STALE


async def test_higher_epoch_is_kept_when_a_stream_is_trimmed_again(kept):
    await taken(kept)
    await kept.backend.trim(kept.tenant, [kept.key()], TTL_S)
    await kept.open(epoch=5)
    await kept.backend.trim(kept.tenant, [kept.key()], TTL_S)
    assert (await kept.open(epoch=4)).epoch == 5
    assert (await kept.open(epoch=5)).outcome == OK


async def test_tombstone_of_a_trimmed_stream_expires(kept):
    await taken(kept)
    await kept.backend.trim(kept.tenant, [kept.key()], 0.3)

    async def is_forgotten():
        return (await kept.append(pieces=[piece(0, 1, 6)])).outcome == UNKNOWN

    await eventually(is_forgotten)


async def test_refused_writes_to_a_trimmed_stream_take_no_room_of_the_tenant(kept):
    await taken(kept)
    await kept.backend.trim(kept.tenant, [kept.key()], TTL_S)
    assert (await kept.open()).outcome == STALE
    opening = Opening(b"record", 1, "r")
    results = await kept.backend.append([kept.write(f"s{number}", opening=opening) for number in range(100)])
    assert {each.outcome for each in results} == {OK}, "a tombstone is no stream"
    assert (await kept.open("one more")).outcome == FULL


async def test_stream_expires(kept):
    await kept.open(pieces=[piece(0, 0, 1)], ttl_s=0.3)

    async def is_gone():
        return await kept.backend.read(kept.key()) is None

    await eventually(is_gone)
    assert (await kept.append(pieces=[piece(0, 1, 2)])).outcome == UNKNOWN


async def test_a_write_without_content_prolongs(kept):
    async def is_prolonged():
        """A busy machine may take so long that the stream has expired in between."""
        await kept.open(ttl_s=0.4)
        return (await kept.append(ttl_s=TTL_S)).outcome == OK

    await eventually(is_prolonged)
    await kept.open("short", ttl_s=0.4)

    async def is_gone():
        return await kept.backend.read(kept.key("short")) is None

    await eventually(is_gone)
    assert await kept.backend.read(kept.key()) is not None


async def test_sealed_stream_is_kept_as_long_as_the_seal_says(kept):
    await kept.open()
    await kept.append(seal=b"end", ttl_s=0.3)
    await kept.append(seal=b"end", ttl_s=TTL_S)

    async def is_gone():
        return await kept.backend.read(kept.key()) is None

    await eventually(is_gone)


async def test_stream_has_a_greatest_size(kept):
    await kept.open()
    assert (await kept.append(pieces=[piece(0, 0, *range(60_000, 90_000))])).outcome == TOO_LARGE
    assert await tokens(kept) == [[], []]
    assert (await kept.append("large", opening=Opening(bytes(70_000), 1, "r"))).outcome == TOO_LARGE
    assert await kept.backend.read(kept.key("large")) is None


async def test_tenant_has_so_many_streams(kept):
    for number in range(100):
        assert (await kept.open(f"s{number}")).outcome == OK
    assert (await kept.open("one more")).outcome == FULL
    assert (await kept.open("s7")).outcome == OK, "a repeat is no new stream"
    assert (await kept.append("s7", pieces=[piece(0, 0, 1)])).outcome == OK, "what is open goes on"
    await kept.backend.trim(kept.tenant, [kept.key("s3")], TTL_S)
    assert (await kept.open("one more")).outcome == OK
    other = kept.write("other", tenant=f"{kept.tenant}-other", opening=Opening(b"record", 1, "r"))
    assert (await kept.backend.append([other]))[0].outcome == OK


async def test_tenant_has_so_many_bytes(kept):
    opened = [await kept.append(f"s{n}", opening=Opening(bytes(60_000), 1, "r")) for n in range(20)]
    outcomes = [each.outcome for each in opened]
    assert outcomes.count(OK) == 17
    assert set(outcomes[17:]) == {FULL}


@pytest.mark.parametrize("again", ["repeated", "other record", "gap", "too large"])
async def test_stream_that_is_opened_again_counts_as_before(kept, again):
    """Routers open all their streams again when they have lost the state server for a while."""
    ids, names = range(1 << 31, (1 << 31) + 12_000), []
    opening = Opening(b"record", 1, "r")
    while (await kept.append(f"s{len(names)}", opening=opening)).outcome == OK:
        await kept.append(f"s{len(names)}", pieces=[piece(0, 0, *ids)])
        names.append(f"s{len(names)}")
    assert len(names) > 10
    pieces = {"gap": [piece(0, len(ids) + 1, 1)], "too large": [piece(0, len(ids), *ids)]}.get(again, [])
    expected = {"repeated": OK, "other record": CONFLICT, "gap": GAP, "too large": TOO_LARGE}[again]
    opening = Opening(b"other", 1, "r") if again == "other record" else opening
    outcomes = {(await kept.append(name, opening=opening, pieces=pieces)).outcome for name in names}
    assert outcomes == {expected}
    assert (await kept.open("one more")).outcome == FULL


async def test_streams_that_have_expired_do_not_count(kept):
    for number in range(100):
        await kept.open(f"s{number}", ttl_s=0.5)

    async def has_room():
        return (await kept.open("one more")).outcome == OK

    await eventually(has_room)


@pytest.mark.parametrize("kind", ["memory"])
async def test_memory_is_bounded(kept, kind):
    """Streams that have ended make room, the oldest first; those that run do not."""
    kept.backend = MemoryBackend(300_000, Limits(64 << 10, 1 << 30, 1000, 1 << 30))
    await kept.append("runs", opening=Opening(bytes(60_000), 1, "r"))
    for number in range(20):
        opening = Opening(bytes(60_000), 1, "r")
        assert (await kept.append(f"s{number}", opening=opening, seal=b"end")).outcome == OK
    assert kept.backend.used_bytes <= 300_000
    kept_streams = [n for n in range(20) if await kept.backend.read(kept.key(f"s{n}")) is not None]
    assert kept_streams == [17, 18, 19]
    assert await kept.backend.read(kept.key("runs")) is not None
    for number in range(4):
        await kept.append(f"t{number}", opening=Opening(bytes(60_000), 1, "r"))
    assert (await kept.append("more", opening=Opening(bytes(60_000), 1, "r"))).outcome == FULL
    kept.backend.expire()
