"""Reports of cached blocks: a snapshot, then changes; in order, bounded, and only for routers that ask."""

from collections import Counter

import pytest
from harness import make_settings, served, submit, until
from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import prefix_keys
from lockstep_engine import PrefixChanges
from lockstep_engine.config import HotWindow
from lockstep_worker.outbox import Outbox
from lockstep_worker.prefix_reports import MAX_BLOCKS, PrefixReporter

RATE = 262_144
NEW = 1 << 63
PROMPT = tuple(range(40))


def keys(count, first=1):
    return list(range(first, first + count))


class Cache:
    """The prefix cache of an engine, as the reporter sees it."""

    def __init__(self):
        self.held = {}
        self.is_noting = False
        self.limits = []
        self._changes = PrefixChanges()

    def note_prefixes(self, *, wanted):
        self.is_noting, self._changes = wanted, PrefixChanges()

    def change(self, added=(), removed=()):
        self.held |= dict.fromkeys(added)
        for key in removed:
            del self.held[key]
        self._changes = PrefixChanges(tuple(added), tuple(removed))

    def begin_again(self):
        self.held.clear()
        self._changes = PrefixChanges(is_complete=False)

    def take_prefix_changes(self):
        assert self.is_noting
        changes, self._changes = self._changes, PrefixChanges()
        return changes

    def newest_prefixes(self, limit):
        self.limits.append(limit)
        return list(self.held)[-limit:]


class Watcher:
    """A router: what it has been told."""

    def __init__(self):
        self.outbox = Outbox(1024)
        self.held = set()
        self.numbers = []
        self.snapshots = 0

    def take(self, report):
        self.numbers.append(report.number)
        if report.snapshot:
            self.snapshots += 1
            self.held.clear()
        self.held.difference_update(report.removed)
        self.held.update(report.added)


class Clock:
    """Makes the reports of a reporter, ten times a second."""

    def __init__(self, reporter):
        self.reporter = reporter
        self.now = 100.0
        self.keys = Counter()

    def tick(self, ticks=1):
        for _ in range(ticks):
            self.now += 0.1
            for router, report in self.reporter.reports(self.now):
                router.take(report)
                self.keys[router] += len(report.added) + len(report.removed)


@pytest.fixture
def cache():
    return Cache()


def set_up(cache, bytes_per_s=RATE):
    reporter = PrefixReporter(cache, bytes_per_s)
    return reporter, Clock(reporter), Watcher()


def test_a_snapshot_comes_first_and_then_the_changes(cache):
    reporter, clock, router = set_up(cache)
    cache.held = dict.fromkeys(keys(5))
    reporter.watch(router, 0)
    clock.tick()
    assert router.held == set(cache.held)
    cache.change(added=keys(3, NEW), removed=keys(2))
    clock.tick()
    assert router.held == set(cache.held)
    assert (router.snapshots, router.numbers) == (1, [1, 2])
    clock.tick(5)
    assert router.numbers == [1, 2], "no news, no reports"


def test_a_snapshot_says_which_blocks_are_used_compressed(cache):
    reporter, router = PrefixReporter(cache, RATE, HotWindow(sink=1, size=4)), Watcher()
    reporter.watch(router, 0)
    ((_, snapshot),) = reporter.reports(1.0)
    assert (snapshot.hot_window.first, snapshot.hot_window.last) == (1, 4)
    cache.change(added=keys(3))
    ((_, changes),) = reporter.reports(2.0)
    assert not changes.HasField("hot_window")


def test_an_empty_cache_is_reported_too(cache):
    reporter, clock, router = set_up(cache)
    reporter.watch(router, 0)
    clock.tick()
    assert (router.snapshots, router.held) == (1, set())


def test_a_router_that_asks_again_gets_a_snapshot_but_not_all_the_time(cache):
    reporter, clock, router = set_up(cache)
    cache.held = dict.fromkeys(keys(9))
    for _ in range(30):
        reporter.watch(router, 4)
        clock.tick()
    assert 2 <= router.snapshots <= 4
    assert router.held == set(keys(9)[-4:])
    assert set(cache.limits) == {4}


def test_a_cache_that_begins_again_gives_a_new_snapshot(cache):
    reporter, clock, router = set_up(cache)
    cache.held = dict.fromkeys(keys(9))
    reporter.watch(router, 0)
    clock.tick(10)
    cache.begin_again()
    clock.tick(2)
    assert (router.snapshots, router.held) == (2, set())


def test_a_router_gets_so_many_bytes_in_a_second_and_all_news_in_the_end(cache):
    reporter, clock, router = set_up(cache, bytes_per_s=8_000)
    cache.held = dict.fromkeys(keys(3000))
    clock.tick()
    reporter.watch(router, 0)
    for tick in range(1, 41):
        clock.tick()
        assert clock.keys[router] <= tick * 100 + 1
    cache.change(added=keys(50, NEW), removed=keys(500))
    clock.tick(10)
    assert router.held == set(cache.held)
    assert router.snapshots == 1
    assert router.numbers == list(range(1, len(router.numbers) + 1))


def test_news_that_is_outdated_before_it_is_sent_is_not_sent(cache):
    reporter, clock, router = set_up(cache, bytes_per_s=80)
    reporter.watch(router, 0)
    clock.tick(10)
    for _ in range(50):
        cache.change(added=keys(20))
        clock.tick()
        cache.change(removed=keys(20))
        clock.tick()
    clock.tick(50)
    assert router.held == set()
    assert clock.keys[router] < 200


def test_too_many_news_are_replaced_by_a_snapshot(cache):
    reporter, clock, router = set_up(cache, bytes_per_s=1 << 20)
    reporter.watch(router, 100)
    clock.tick(20)
    cache.change(added=keys(MAX_BLOCKS + 1))
    clock.tick()
    assert router.snapshots == 2
    assert router.held == set(keys(MAX_BLOCKS + 1)[-100:])


def test_a_router_that_does_not_read_gets_no_reports(cache):
    reporter, clock, router = set_up(cache)
    reporter.watch(router, 0)
    for _ in range(100):
        router.outbox.put(worker_pb2.WorkerFrame(tokens=worker_pb2.Tokens()))
    clock.tick(5)
    assert router.numbers == []


def test_nothing_is_noted_unless_a_router_wants_it(cache):
    reporter, clock, router = set_up(cache)
    other = Watcher()
    clock.tick()
    assert not cache.is_noting
    reporter.watch(router, 0)
    reporter.watch(other, 0)
    reporter.forget(router)
    clock.tick()
    assert cache.is_noting
    assert (router.snapshots, other.snapshots) == (0, 1)
    reporter.forget(other)
    reporter.forget(other)
    assert not cache.is_noting


def test_no_reports_with_a_limit_of_zero(cache):
    reporter, clock, router = set_up(cache, bytes_per_s=0)
    reporter.watch(router, 0)
    clock.tick(5)
    assert router.numbers == []
    assert not cache.is_noting


async def follow(router, watcher, wanted):
    """Read reports until the router knows these keys."""
    while watcher.held != set(wanted) or not watcher.numbers:
        watcher.take((await router.next("prefix_report")).prefix_report)


async def test_a_served_worker_reports_prompts_and_lost_ranks(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router, watcher = await worker.greeted(), Watcher()
        await router.send(prefix_watch=worker_pb2.PrefixWatch())
        await follow(router, watcher, ())
        await router.send(submit=submit(prompt_ids=PROMPT, tenant="search"))
        await until(lambda: worker.engine.requests)
        worker.engine.step()
        await follow(router, watcher, prefix_keys("search", PROMPT, 9))
        worker.engine.lose_ranks()
        await follow(router, watcher, ())
        assert router.seen[-1].epoch == 2
        await router.call.done_writing()
        await until(lambda: not worker.engine.notes_prefixes)


async def test_a_router_that_does_not_ask_gets_no_reports(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        worker.engine.change_prefixes(prefix_keys("", PROMPT, 9))
        for _ in range(5):
            await router.next("status")
        assert "prefix_report" not in router.kinds()
        assert not worker.engine.notes_prefixes
