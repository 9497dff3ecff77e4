"""What a worker says of its prefix cache to routers that ask. The double says the same."""

import random

import pytest
from harness import Router
from implementations import Implementation, submit
from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import prefix_keys

BLOCKS = 5
MANY = 1000


def new_prompt() -> tuple[int, ...]:
    """A prompt that no other test has sent: the worker with ranks serves them all."""
    rng = random.Random()
    return tuple(rng.randrange(5, 900) for _ in range(16 * BLOCKS + 3))


class CacheReports:
    """What a worker has reported of its cache to one router."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.keys: set[int] = set()
        self.snapshots = 0
        self.last = worker_pb2.WorkerFrame()
        self._taken = 0

    async def next(self) -> None:
        """Take the next report, which may have come while something else was waited for."""
        while True:
            if self._taken == len(self.router.seen):
                await self.router.next()
            frame = self.router.seen[self._taken]
            self._taken += 1
            if frame.HasField("prefix_report"):
                break
        report = frame.prefix_report
        assert report.number == self.last.prefix_report.number + 1
        if report.snapshot:
            self.snapshots += 1
            self.keys.clear()
        self.keys.difference_update(report.removed)
        self.keys.update(report.added)
        self.last = frame

    async def until(self, keys: list[int]) -> None:
        """Read reports until these keys are known."""
        while not self.keys.issuperset(keys):
            await self.next()

    async def snapshot(self, max_blocks: int = 0) -> None:
        """Ask for a snapshot and take it."""
        before = self.snapshots
        await self.router.send(prefix_watch=worker_pb2.PrefixWatch(max_blocks=max_blocks))
        while self.snapshots == before:
            await self.next()


async def run(router: Router, stream_id: str, prompt: tuple[int, ...], tenant: str) -> int:
    """Run a stream to its end; returns the tokens that were cached."""
    message = submit(stream_id, prompt_ids=prompt, max_tokens=2)
    message.tenant = tenant
    await router.send(submit=message)
    cached = 0
    while True:
        for tokens in (await router.next("tokens")).tokens.streams:
            cached += tokens.cached_tokens
            if tokens.finish:
                return cached


async def test_reports_name_the_blocks_of_prompts_by_keys_that_routers_compute(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    reported, prompt = CacheReports(router), new_prompt()
    await reported.snapshot()
    assert reported.last.prefix_report.number == 1
    assert await run(router, "s", prompt, "search") == 0
    keys = prefix_keys("search", prompt, MANY)
    assert len(keys) == BLOCKS
    await reported.until(keys)
    assert not reported.keys & {*prefix_keys("", prompt, MANY), *prefix_keys("other", prompt, MANY)}
    assert reported.snapshots == 1


async def test_a_router_learns_what_another_one_has_sent_before_it_asked(worker: Implementation) -> None:
    first, _ = await worker.greeted()
    prompt = new_prompt()
    await run(first, "s", prompt, "t")
    second, _ = await worker.greeted()
    reported = CacheReports(second)
    await reported.snapshot()
    await reported.until(prefix_keys("t", prompt, MANY))
    assert await run(second, "s", prompt, "t") == 16 * BLOCKS, "so it is, as reported"


async def test_a_second_request_for_reports_gives_a_new_snapshot(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    reported, prompt = CacheReports(router), new_prompt()
    await reported.snapshot()
    await run(router, "s", prompt, "t")
    await reported.until(prefix_keys("t", prompt, MANY))
    await reported.snapshot(max_blocks=BLOCKS)
    assert len(reported.last.prefix_report.added) <= BLOCKS
    await reported.snapshot()
    await reported.until(prefix_keys("t", prompt, MANY))


async def test_a_router_that_does_not_ask_is_told_nothing(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    await run(router, "s", new_prompt(), "t")
    for _ in range(3):
        await router.next("status")
    assert "prefix_report" not in router.kinds()


@pytest.mark.slow
async def test_lost_ranks_leave_nothing_cached(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    reported, prompt = CacheReports(router), new_prompt()
    await reported.snapshot()
    await run(router, "s", prompt, "t")
    await reported.until(prefix_keys("t", prompt, MANY))
    epoch = reported.last.epoch
    await worker.lose_rank(router)
    while reported.keys or reported.last.epoch == epoch:
        await reported.next()
    assert reported.last.epoch == epoch + 1
    assert reported.last.prefix_report.snapshot
    await router.ready()
    assert await run(router, "again", prompt, "t") == 0
    await reported.until(prefix_keys("t", prompt, MANY))
