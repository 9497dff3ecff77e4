"""What only a worker with ranks can show: real processes die, and others take their places."""

import os
import signal
import time

from harness import Router
from implementations import REAL, Implementation, submit
from lockstep_api.v1 import worker_pb2
from machine import title
from psutil import Process

IMPLEMENTATIONS = (REAL,)

READY = worker_pb2.WORKER_STATE_READY
RESTARTING = worker_pb2.WORKER_STATE_RESTARTING


async def lose(router: Router, pid: int) -> tuple[float, worker_pb2.Status, worker_pb2.Status]:
    """Kill a process; seconds until the worker said so, that status, and the one when it was ready again."""
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    restarting = await router.status(RESTARTING)
    noticed_s = time.monotonic() - killed_s
    return noticed_s, restarting, await router.status(READY)


async def test_a_killed_rank_is_named_at_once_and_all_are_new_afterwards(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    before = await router.status(READY)
    assert [title(Process(rank.pid)) for rank in before.ranks] == ["lockstep: rank w0/0", "lockstep: rank w0/1"]
    for victim in (0, 1):
        pids = [rank.pid for rank in before.ranks]
        noticed_s, restarting, after = await lose(router, pids[victim])
        assert noticed_s < 0.5
        assert f"rank {victim} (pid {pids[victim]})" in restarting.reason
        assert not set(pids) & {rank.pid for rank in after.ranks}
        assert (after.pid, after.running, after.queued) == (before.pid, 0, 0)
        assert after.free_blocks == after.total_blocks == before.total_blocks
        before = after


async def test_a_rank_killed_while_the_ranks_start_is_replaced_too(worker: Implementation) -> None:
    """Whatever the start has come to, the next epoch gets both ranks ready."""
    router, _ = await worker.greeted()
    for delay_s in (0.0, 0.02, 0.2):
        status = await router.status(READY)
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        old = {rank.pid for rank in status.ranks}
        fresh = await first_new_rank(status.pid, old)
        time.sleep(delay_s)
        fresh.kill()
        await router.status(RESTARTING)
        ready = await router.status(READY)
        assert len(ready.ranks) == 2
        assert fresh.pid not in {rank.pid for rank in ready.ranks}
        await router.send(submit=submit(f"after {delay_s}", max_tokens=4))
        while not (await router.next("tokens")).tokens.streams[0].finish:
            pass


async def test_a_killed_zygote_costs_an_epoch_and_no_more(worker: Implementation) -> None:
    router, _ = await worker.greeted()
    status = await router.status(READY)
    zygote = Process(status.ranks[0].pid).parent()
    assert title(zygote) == "lockstep: zygote w0"
    zygote.kill()
    await router.status(RESTARTING)
    deadline_s = time.monotonic() + 30
    while (status := (await router.next("status")).status).state != READY:
        assert time.monotonic() < deadline_s
    assert Process(status.ranks[0].pid).parent().pid != zygote.pid


async def first_new_rank(worker_pid: int, old: set[int]) -> Process:
    """The first rank of the next epoch, as soon as it exists."""
    deadline_s = time.monotonic() + 10
    while True:
        for child in Process(worker_pid).children(recursive=True):
            if child.pid not in old and child.parent().pid != worker_pid:
                return child
        assert time.monotonic() < deadline_s
