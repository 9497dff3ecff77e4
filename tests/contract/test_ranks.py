"""Tests that need a worker with ranks: real processes die and are replaced."""

import asyncio
import os
import signal

import pytest
from harness import Router
from implementations import REAL, Implementation, submit
from lockstep_api.v1 import worker_pb2
from machine import title
from psutil import NoSuchProcess, Process

IMPLEMENTATIONS = (REAL,)

READY = worker_pb2.WORKER_STATE_READY
RESTARTING = worker_pb2.WORKER_STATE_RESTARTING


WAIT_S = 120
"""Far longer than a start takes on a slow machine under load."""


async def ready_without(router: Router, pids: set[int]) -> worker_pb2.Status:
    """The first status in which all ranks are ready and none of them is one of these. Statuses come every 100 ms, so
    that the next ones may be older than what has just happened.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await router.status(READY)
            if not pids & {rank.pid for rank in status.ranks}:
                return status


async def test_a_killed_rank_is_named_and_all_are_new_afterwards(worker: Implementation) -> None:
    """The reason shows that the end of its socket was noticed, not a step's deadline."""
    router, _ = await worker.greeted()
    before = await router.status(READY)
    assert [title(Process(rank.pid)) for rank in before.ranks] == ["lockstep: rank w0/0", "lockstep: rank w0/1"]
    for victim in (0, 1):
        pids = [rank.pid for rank in before.ranks]
        os.kill(pids[victim], signal.SIGKILL)
        restarting = await router.status(RESTARTING)
        assert f"rank {victim} (pid {pids[victim]}) died" in restarting.reason
        after = await ready_without(router, set(pids))
        assert (after.pid, after.running, after.queued) == (before.pid, 0, 0)
        assert after.free_blocks == after.total_blocks == before.total_blocks
        before = after


@pytest.mark.slow
async def test_a_rank_killed_while_the_ranks_start_is_replaced_too(worker: Implementation) -> None:
    """At whatever stage of the start the rank is killed, both ranks are ready in the next epoch."""
    router, _ = await worker.greeted()
    status = await router.status(READY)
    for delay_s in (0.0, 0.02, 0.2):
        old = {rank.pid for rank in status.ranks}
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        fresh = await first_new_rank(status.pid, old)
        await asyncio.sleep(delay_s)
        fresh.kill()
        status = await ready_without(router, old | {fresh.pid})
        assert len(status.ranks) == 2
        await router.send(submit=submit(f"after {delay_s}", max_tokens=4))
        while not (await router.next("tokens")).tokens.streams[0].finish:
            pass


@pytest.mark.slow
async def test_a_killed_zygote_costs_an_epoch_and_no_more(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    status = await router.status(READY)
    zygote = Process(status.ranks[0].pid).parent()
    assert title(zygote) == "lockstep: zygote w0"
    zygote.kill()
    status = await ready_without(router, {rank.pid for rank in status.ranks})
    assert Process(status.ranks[0].pid).parent().pid != zygote.pid


async def first_new_rank(worker_pid: int, old: set[int]) -> Process:
    """The first rank of the next epoch, as soon as it exists."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for child in Process(worker_pid).children(recursive=True):
                try:
                    if child.pid not in old and child.ppid() != worker_pid:
                        return child
                except NoSuchProcess:  # it has ended since the list was made
                    continue
            await asyncio.sleep(0)
