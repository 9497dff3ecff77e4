"""The supervisor of a rank group: what it tells, and when."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from answering_zygote import HANGS, MESSAGE_BYTES, STEP_S
from lockstep_engine import group
from lockstep_engine.group import GroupSettings, RankGroup
from lockstep_engine.plan import Plan, RankSpec

SCRIPT = Path(__file__).with_name("scripted_zygote.py")
ANSWERING = Path(__file__).with_name("answering_zygote.py")


class Listener:
    """Notes what it is told, and whether a start was still running then."""

    def __init__(self):
        self.starting = False
        self.ready = False
        self.lost = []
        self.results = []

    def on_lost(self, reason):
        self.lost.append((reason, self.starting))

    def on_ready(self, blocks, ready):
        self.ready = True

    def on_result(self, result):
        self.results.append((result.step, result.token_ids))


SPEC = RankSpec(
    rank=0,
    tp=2,
    label="w0",
    epoch=0,
    model="",
    device="cpu",
    dtype="float32",
    max_seqs=1,
    max_batch_tokens=16,
    context_length=16,
    kv_memory_bytes=None,
    deterministic=None,
    threads=1,
    hidden_size=8,
    vocab_size=8,
    start_timeout_s=10.0,
)


@pytest.fixture
def group_of(monkeypatch):
    """A group whose zygote is a script."""

    def make(script, message_bytes):
        run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        monkeypatch.setattr(group, "_RUN_ZYGOTE", run)
        listener = Listener()
        settings = GroupSettings(SPEC, message_bytes, message_bytes, collectives_bytes=64, environment={})
        return RankGroup(settings, listener), listener

    return make


@pytest.fixture
async def started(group_of):
    ranks, listener = group_of(SCRIPT, 64)

    async def start():
        listener.starting = True
        await ranks.start()
        listener.starting = False

    yield ranks, listener, start
    await ranks.stop()


async def test_a_rank_that_dies_while_others_are_forked_is_told_after_the_start(started):
    """Else the start of the next epoch and the rest of this one would read each other's answers."""
    ranks, listener, start = started
    async with asyncio.timeout(10):
        await start()
        assert ranks.epoch == 1
        while not listener.lost:
            await asyncio.sleep(0.01)
        assert listener.lost == [("rank 0 (pid 1000010) died", False)]
        await start()
        await asyncio.sleep(0.1)
    assert ranks.epoch == 2
    assert [rank.pid for rank in ranks.ranks] == [1_000_020, 1_000_021]
    assert len(listener.lost) == 1


def plan(step, token=1):
    one = (0).to_bytes(4, "little")
    return Plan(step, token.to_bytes(4, "little", signed=True), one, one, one, one, one, b"", one, 1, [])


async def test_each_of_two_steps_in_flight_has_its_own_time(group_of):
    """Together they take longer than either may; what the first one leaves of its time is not the second one's."""
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(20):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            for step in (1, 2):
                ranks.execute(plan(step), 1.8 * STEP_S)
            assert ranks.in_flight == 2
            while ranks.in_flight:
                await asyncio.sleep(0.01)
            assert (listener.results, listener.lost) == ([(1, [1]), (2, [2])], [])
            ranks.execute(plan(3), 1.8 * STEP_S)
            ranks.execute(plan(4, HANGS), 1.8 * STEP_S)
            while not listener.lost:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()
    assert listener.results[2:] == [(3, [3])]
    assert [starting for _, starting in listener.lost] == [False]
    assert "has not finished its step" in listener.lost[0][0]
    assert ranks.in_flight == 0


def test_a_zygote_whose_driver_died_before_it_looked_ends_at_once():
    """It would import torch for seconds before it noticed, and be an orphan meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        driver = "1"  # not our process id: the parent that the zygote expects is not there
        done = subprocess.run(
            [sys.executable, "-c", group._RUN_ZYGOTE, str(theirs.fileno()), "w0", driver],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            timeout=20,
            check=False,
        )
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
    assert (done.returncode, done.stderr) == (1, b"")
