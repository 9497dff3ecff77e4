"""The supervisor of a rank group: what it tells, and when."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lockstep_engine import group
from lockstep_engine.group import GroupSettings, RankGroup
from lockstep_engine.plan import RankSpec

SCRIPT = Path(__file__).with_name("scripted_zygote.py")


class Listener:
    """Notes what it is told, and whether a start was still running then."""

    def __init__(self):
        self.starting = False
        self.lost = []

    def on_lost(self, reason):
        self.lost.append((reason, self.starting))


@pytest.fixture
async def started(monkeypatch):
    monkeypatch.setattr(group, "_RUN_ZYGOTE", f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')")
    spec = RankSpec(
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
    listener = Listener()
    ranks = RankGroup(
        GroupSettings(spec, plan_bytes=64, result_bytes=64, collectives_bytes=64, environment={}), listener
    )

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
