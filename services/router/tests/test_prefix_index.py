"""A worker's cached blocks: reports and what was sent, gaps, bounds, and the router with workers that report."""

import asyncio

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import prefix_keys
from lockstep_router import metrics
from lockstep_router.policies import RequestFacts
from lockstep_router.status import status_body
from lockstep_router.workers.prefix_index import PrefixIndex
from router_cluster import eventually
from scripted_worker import Script

KEYS = list(range(100, 110))


def report(number, added=(), removed=(), *, snapshot=False):
    return worker_pb2.PrefixReport(number=number, snapshot=snapshot, added=added, removed=removed)


@pytest.fixture
def index():
    made = PrefixIndex()
    made.resize(1000)
    return made


# Reports.


def test_reports_say_what_is_known(index):
    index.take(report(1, KEYS, snapshot=True))
    assert (index.is_reported, len(index), index.known(KEYS)) == (True, 10, 10)
    index.take(report(2, [7], KEYS[4:6]))
    assert index.known(KEYS) == 4, "up to the first gap"
    index.take(report(3, KEYS[4:6]))
    assert index.known([*KEYS, 1]) == 10
    index.take(report(9, [5], snapshot=True))
    assert (index.known(KEYS), index.known([5])) == (0, 1)


def test_a_gap_makes_everything_unknown_until_a_snapshot_that_is_asked_for_once(index):
    assert index.asks(0.0) is not None, "the first snapshot"
    index.take(report(1, KEYS, snapshot=True))
    assert index.asks(10.0) is None
    index.take(report(3, [1]))
    assert index.known(KEYS) == 0
    assert index.asks(10.0) is not None
    index.take(report(4, KEYS))
    assert index.known(KEYS) == 0
    assert index.asks(11.0) is None, "it has been asked for just now"
    assert index.asks(16.0) is not None, "it did not come"
    index.take(report(5, KEYS[:3], snapshot=True))
    index.take(report(6, KEYS[3:]))
    assert index.known(KEYS) == 10
    assert index.asks(99.0) is None


def test_reports_that_come_before_a_snapshot_are_not_believed(index):
    assert index.asks(0.0) is not None
    index.take(report(4, KEYS))
    assert (index.is_reported, index.known(KEYS)) == (False, 0)


def test_a_full_index_takes_no_more_and_asks_for_a_smaller_snapshot(index):
    index.resize(8)
    assert index.asks(0.0).max_blocks == 6
    index.take(report(1, KEYS[:6], snapshot=True))
    index.take(report(2, KEYS[6:]))
    assert (len(index), index.known(KEYS)) == (8, 8)
    assert index.asks(0.5) is None
    assert index.asks(5.0).max_blocks == 6
    index.take(report(3, KEYS[4:], snapshot=True))
    assert (len(index), index.known(KEYS[4:])) == (6, 6)


def test_blocks_that_are_reported_again_take_no_room(index):
    index.resize(len(KEYS) + 1)
    index.take(report(1, KEYS, snapshot=True))
    index.take(report(2, [*KEYS, 1, 1]))
    assert (len(index), index.known([*KEYS, 1])) == (11, 11)
    assert index.asks(99.0) is None


def test_an_index_that_gets_less_room_asks_and_never_has_twice_as_much(index):
    index.take(report(1, KEYS, snapshot=True))
    index.resize(6)
    assert index.known(KEYS) == 10
    assert index.asks(0.0).max_blocks == 4
    index.resize(4)
    assert len(index) == 0
    index.take(report(2, [1]))
    assert len(index) == 0, "the rest of the old reports means nothing"


# What was sent.


def test_prompts_count_from_the_moment_they_are_sent_until_their_blocks_are_reported(index):
    index.take(report(1, snapshot=True))
    index.note_sent("a", KEYS)
    assert index.known(KEYS) == 10
    index.note_first_token("a", 0)
    index.note_status()
    assert index.known(KEYS) == 10, "the report follows this status"
    index.note_status()
    assert index.known(KEYS) == 0, "the worker does not say that it has them"


def test_a_prompt_that_never_gives_a_token_counts_until_it_leaves(index):
    index.take(report(1, snapshot=True))
    index.note_sent("a", KEYS)
    index.note_sent("b", KEYS[:5])
    index.note_status()
    index.note_over("a")
    index.note_over("a")
    assert index.known(KEYS) == 5
    index.note_over("b")
    assert index.known(KEYS) == 0
    assert not index._computing


def test_a_stream_that_comes_back_counts_once(index):
    index.take(report(1, snapshot=True))
    for _ in range(3):
        index.note_sent("a", KEYS)
    index.note_over("a")
    assert index.known(KEYS) == 0


def test_without_reports_what_was_sent_last_is_guessed(index):
    index.resize(25)
    old, used, new = ([base + n for n in range(10)] for base in (100, 200, 300))
    for stream, keys in enumerate((old, used, old, new)):
        index.note_sent(str(stream), keys)
        index.note_over(str(stream))
    assert (index.is_reported, len(index)) == (False, 25)
    assert [index.known(keys) for keys in (old, used, new)] == [10, 5, 10]
    index.take(report(1, snapshot=True))
    assert [index.known(keys) for keys in (old, used, new)] == [0, 0, 0], "the worker knows better"
    index.clear()
    assert (index.is_reported, len(index), index.known(old)) == (False, 0, 0)


def test_predictions_are_compared_with_what_was_cached(index):
    index.take(report(1, KEYS[:4], snapshot=True))
    index.note_sent("a", KEYS)
    index.note_first_token("a", 48)
    index.note_sent("b", KEYS[:2])
    index.note_first_token("b", 1000)
    index.note_first_token("unknown", 1000)
    counts = index.describe()
    assert counts["predicted_tokens"] == 64 + 32
    assert counts["cached_tokens"] == 48 + 32
    assert counts["wrong_tokens"] == 16


# In a router.


CONVERSATION = [20 + at % 40 for at in range(240)]


async def make(make_cluster, workers=3, *, reports=True, **settings):
    """A router whose workers cache prompts, for one tenant without a name."""
    settings = {"policy": "prefix_aware", "prefix_index_blocks": 1024, "anonymous_cache": "shared"} | settings
    cluster = await make_cluster(workers, **settings)
    for worker in cluster.workers:
        worker.script = Script(caches=True)
        worker.reports_prefixes = reports
    return cluster


def index_of(cluster, worker):
    return next(link for link in cluster.router.workers.links if link.worker_id == worker.worker_id).prefixes


def keys_of(ids):
    return prefix_keys("", ids, 256)


async def test_a_conversation_goes_where_a_worker_says_its_beginning_is(make_cluster):
    cluster = await make(make_cluster)
    await eventually(lambda: all(worker.watches for worker in cluster.workers))
    assert min(worker.watches[0].max_blocks for worker in cluster.workers) == int(1024 // 3 * 0.75)
    for worker in cluster.workers:
        submits = len(worker.submits)
        worker.change_prefixes(keys_of(CONVERSATION))
        await eventually(lambda worker=worker: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 14)
        for _ in range(2):
            assert (await cluster.complete(CONVERSATION, user=None)).status_code == 200
            await eventually(lambda: all(link.facts.requests < 3 for link in cluster.router.workers.ready()))
        assert len(worker.submits) == submits + 2, "this router had never sent it there"
        worker.change_prefixes(removed=keys_of(CONVERSATION))
        await eventually(lambda worker=worker: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 0)


async def test_a_router_that_is_told_of_another_routers_prompts_predicts_their_next_turns(make_cluster):
    cluster = await make(make_cluster)
    before = metrics.PREFIX_PREDICTED_TOKENS._value.get(), metrics.PREFIX_WRONG_TOKENS._value.get()
    other = cluster.workers[1]
    other.change_prefixes(keys_of(CONVERSATION[:160]))
    await eventually(lambda: index_of(cluster, other).known(keys_of(CONVERSATION)) >= 9)
    response = await cluster.complete(CONVERSATION, user=None)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 144
    assert len(other.submits) == 1
    assert metrics.PREFIX_PREDICTED_TOKENS._value.get() - before[0] == 144
    assert metrics.PREFIX_WRONG_TOKENS._value.get() == before[1]
    counts = next(each for each in status_body(cluster.router)["workers"] if each["id"] == "w1")["prefixes"]
    assert (counts["reported"], counts["predicted_tokens"], counts["wrong_tokens"]) == (True, 144, 0)
    await eventually(lambda: metrics.PREFIX_INDEX_BLOCKS.labels("reference")._value.get() >= 14)


async def test_a_gap_in_the_reports_is_repaired(make_cluster):
    cluster = await make(make_cluster, 1)
    (worker,) = cluster.workers
    await eventually(lambda: index_of(cluster, worker).is_reported)
    worker.change_prefixes(keys_of(CONVERSATION))
    await eventually(lambda: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 14)
    (connection,) = worker.connections
    connection.reports += 1
    worker.change_prefixes([1])
    await eventually(lambda: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 0)
    await eventually(lambda: len(worker.watches) == 2)
    await eventually(lambda: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 14)


async def test_what_a_worker_had_is_forgotten_with_its_connection_and_its_epoch(make_cluster):
    cluster = await make(make_cluster, 1)
    (worker,) = cluster.workers

    async def learn():
        worker.change_prefixes(keys_of(CONVERSATION))
        await eventually(lambda: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 14)

    await eventually(lambda: index_of(cluster, worker).is_reported)
    await learn()
    worker.announce(epoch=2)
    await eventually(lambda: len(worker.watches) == 2)
    await eventually(lambda: index_of(cluster, worker).is_reported)
    assert index_of(cluster, worker).known(keys_of(CONVERSATION)) == 0
    await learn()
    await worker.restart()
    await eventually(lambda: len(worker.watches) == 3)
    await eventually(lambda: index_of(cluster, worker).is_reported)
    assert index_of(cluster, worker).known(keys_of(CONVERSATION)) == 0
    await learn()
    worker.break_connections()
    await eventually(lambda: not index_of(cluster, worker).is_reported)
    assert len(index_of(cluster, worker)) == 0
    await eventually(lambda: index_of(cluster, worker).known(keys_of(CONVERSATION)) == 14)
    assert len(worker.watches) == 4


async def test_turns_meet_on_one_worker_also_where_workers_do_not_report(make_cluster):
    """Workers of a version that does not know of reports."""
    for reports in (False, True):
        cluster = await make(make_cluster, reports=reports)
        for turn in range(1, 7):
            # A burst of requests on idle workers would be spread.
            await eventually(lambda c=cluster: all(link.facts.requests < 3 for link in c.router.workers.ready()))
            assert (await cluster.complete(CONVERSATION[: 40 * turn], user=None)).status_code == 200
        assert sorted(len(worker.submits) for worker in cluster.workers) == [0, 0, 6]
        await asyncio.gather(*(worker.kill() for worker in cluster.workers))


async def test_workers_are_not_asked_where_no_policy_uses_their_reports(make_cluster):
    cluster = await make_cluster(2, model_policies={"another": "prefix_aware"})
    for _ in range(3):
        assert (await cluster.complete()).status_code == 200
    assert not any(worker.watches for worker in cluster.workers)
    assert all(len(link.prefixes) == 0 for link in cluster.router.workers.links)


def test_prompts_are_hashed_once_for_each_stream():
    facts = RequestFacts("s", tenant="t", prompt_ids=CONVERSATION)
    assert facts.prefix_keys is facts.prefix_keys
    assert list(facts.prefix_keys) == prefix_keys("t", CONVERSATION, 256)
    assert len(RequestFacts("s", prompt_ids=[7] * 10_000).prefix_keys) == 256
