"""The supervisor of a rank group: what it tells, and when."""

import asyncio
import errno
import gc
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from answering_zygote import HANGS, HANGS_ON_DEVICE, MESSAGE_BYTES
from lockstep_common.errors import LockstepError
from lockstep_engine import zygote_process
from lockstep_engine.group import RankGroup
from lockstep_engine.group_lifecycle import GroupLifecycle
from lockstep_engine.group_settings import RUN_ZYGOTE, GroupSettings
from lockstep_engine.plan import Plan
from lockstep_engine.rank_output import RankOutput
from specs import rank_spec

SCRIPT = Path(__file__).with_name("scripted_zygote.py")
ANSWERING = Path(__file__).with_name("answering_zygote.py")
WAIT_S = 60
"""Longer than anything takes on a slow machine under load."""


class Listener:
    """Records the events, and whether a start was still running."""

    def __init__(self):
        self.starting = False
        self.ready = None
        self.lost = []
        self.results = []

    def on_lost(self, reason):
        self.lost.append((reason, self.starting))

    def on_ready(self, blocks, ready):
        self.ready = ready

    def on_result(self, result):
        self.results.append((result.step, result.token_ids))

    def on_progress(self):
        pass


SPEC = rank_spec(tp=2, max_seqs=1, max_batch_tokens=16, context_length=16, start_timeout_s=60.0)


@pytest.fixture
def group_of():
    """A group whose zygote is a script."""

    def make(script, message_bytes):
        run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        listener = Listener()
        settings = GroupSettings(SPEC, message_bytes, message_bytes, collectives_bytes=64, environment={}, zygote=run)
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
    async with asyncio.timeout(WAIT_S):
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


async def test_new_ranks_have_done_nothing_while_their_zygote_starts(group_of, monkeypatch):
    ranks, _ = group_of(SCRIPT, 64)
    seen, zygotes, popen = [], [], subprocess.Popen

    def observed(*arguments, **options):
        seen.append((ranks.epoch, ranks.steps))
        zygotes.append(popen(*arguments, **options))
        return zygotes[-1]

    monkeypatch.setattr(subprocess, "Popen", observed)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            ranks._mailbox.steps[:] = 9
            assert ranks.steps == [9, 9]
            zygotes[0].kill()
            await asyncio.to_thread(zygotes[0].wait)
            await ranks.start()
    finally:
        await ranks.stop()
    assert seen == [(1, [0, 0]), (2, [0, 0])]


async def test_a_zygote_that_did_not_become_ready_is_replaced_at_the_next_start(group_of, tmp_path):
    """The first one hangs."""
    script, was_here = tmp_path / "zygote.py", tmp_path / "was_here"
    script.write_text(
        f"import pathlib, runpy, time\nfirst = pathlib.Path({str(was_here)!r})\n"
        f"if not first.exists():\n    first.touch()\n    time.sleep(3600)\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    ranks, _ = group_of(script, 64)
    try:
        hanging = asyncio.create_task(ranks.start())
        async with asyncio.timeout(WAIT_S):
            while not was_here.exists():
                await asyncio.sleep(0.01)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            await ranks.start()
        assert [rank.pid for rank in ranks.ranks] == [1_000_020, 1_000_021]
    finally:
        await ranks.stop()


@pytest.mark.parametrize(
    ("says_ready", "reason"),
    [
        (False, "the process that forks ranks was not ready within start_timeout_s = 0.5 s"),
        (True, "the process that forks ranks did not start rank 0 within 0.5 s"),
    ],
)
async def test_a_start_that_takes_too_long_says_what_was_waited_for(monkeypatch, says_ready, reason):
    run = "import socket, sys, time\nfrom lockstep_engine.control import ZYGOTE_READY\n"
    if says_ready:
        monkeypatch.setattr(zygote_process, "FORK_TIMEOUT_S", 0.5)
        run += "control = socket.socket(fileno=int(sys.argv[1]))\ncontrol.send(ZYGOTE_READY)\n"
    run += "time.sleep(3600)"
    spec = rank_spec(tp=2, start_timeout_s=WAIT_S if says_ready else 0.5)
    settings = GroupSettings(spec, 64, 64, collectives_bytes=64, environment={}, zygote=run)
    lost = asyncio.Event()
    lifecycle = GroupLifecycle(lost.set, lambda _: None)
    started = lifecycle.start(RankGroup(settings, Listener()))
    try:
        async with asyncio.timeout(WAIT_S):
            await lost.wait()
        assert f"the ranks cannot be started: {reason}; " in lifecycle.reason
    finally:
        await lifecycle.close()
        await lifecycle.group.stop()
        await asyncio.gather(started, return_exceptions=True)


@pytest.fixture
async def orphans(group_of, tmp_path):
    """A group whose zygote has died, and the processes of its ranks, which have not."""
    script = tmp_path / "zygote.py"
    script.write_text(
        f"import os, subprocess, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport answering_zygote\n"
        "os.getpid = lambda: subprocess.Popen(['sleep', '600']).pid\n"
        "answering_zygote.main(lambda rank, control, mailbox: None)\n"
    )
    ranks, _ = group_of(script, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            processes = [psutil.Process(rank.pid) for rank in ranks.ranks]
            zygote = processes[0].parent()
            zygote.kill()
            while zygote.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
        yield ranks, processes
    finally:
        await ranks.stop()


def running(processes):
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_ranks_of_a_zygote_that_has_died_are_waited_for(orphans):
    """Their memory is not free before they have ended, and nobody else knows when that is."""
    ranks, processes = orphans
    async with asyncio.timeout(WAIT_S):
        await ranks.kill()
    assert not running(processes)


async def test_a_wait_for_ranks_that_is_cancelled_leaves_no_thread(orphans, monkeypatch):
    """The end of the process would wait for it. Whoever kills the ranks again waits for them again."""
    ranks, processes = orphans
    waiting, begun = [], threading.Event()

    def wait_in_vain(output, until):
        waiting.append(output)
        begun.set()
        time.sleep(max(0.0, until - time.monotonic()))
        waiting.remove(output)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(RankOutput, "end", wait_in_vain)
        killing = asyncio.create_task(ranks.kill())
        while not begun.is_set():
            await asyncio.sleep(0.01)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        assert not waiting
        await asyncio.sleep(0.3)
        assert not waiting
    assert running(processes)
    async with asyncio.timeout(WAIT_S):
        await ranks.stop()
    assert not running(processes)


async def test_a_rank_that_dies_before_all_have_loaded_is_named(group_of, tmp_path):
    """The driver orders it to allocate its blocks before it reads the end of its socket. The reason is the rank's death
    then, and no failure of the driver."""
    script = tmp_path / "zygote.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport answering_zygote\n"
        "from lockstep_engine.blocks import PoolSizes\n"
        "from lockstep_engine.control import Loaded, Loading, encode_control\n"
        "def start(rank, control, mailbox):\n"
        "    control.send(encode_control(Loaded(PoolSizes(8), {})))\n"
        "    if rank == 0:\n"
        "        control.send(encode_control(Loading(1, 1)))\n"  # what the driver reads before the end
        "        control.send(encode_control(Loading(1, 1)))\n"
        "        control.close()\n"
        "    else:\n"
        "        control.detach()\n"
        "answering_zygote.main(start)\n"
    )
    ranks, listener = group_of(script, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            pid = ranks.ranks[0].pid
            while not listener.lost:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()
    assert listener.lost == [(f"rank 0 (pid {pid}) died", False)]


async def test_starts_for_which_there_are_not_enough_files_leave_none_open(group_of):
    """Each would make it worse. One after the other they may open one file more, until there are enough."""
    ranks, _ = group_of(ANSWERING, MESSAGE_BYTES)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    failures = 0
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()  # the zygote's own files are there from now on
            await ranks.kill()
            before = len(open_files())
            failed = True
            while failed:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(failures + 1), usual[1]))
                try:
                    failed = await fails_for_files(ranks)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, usual)
                await ranks.kill()
                while len(open_files()) > before:  # some are closed in the next turns of the event loop
                    gc.collect()
                    await asyncio.sleep(0.01)
                failures += failed
    finally:
        await ranks.stop()
    assert failures > 10


async def fails_for_files(ranks):
    """Start; whether that failed because no more files may be opened."""
    try:
        await ranks.start()
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def open_files():
    """The descriptors of this process that are open, and one more for the look itself."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def limit_for(more):
    """The limit with which so many more files may be opened. It is one of numbers, and those in use may have gaps."""
    opened = open_files()
    free = (number for number in itertools.count() if number not in opened)
    return next(itertools.islice(free, more, None))


def plan(step, takes_ms):
    zero = np.zeros(1, dtype=np.int32)
    return Plan(
        step=step,
        token_ids=np.array([takes_ms], dtype=np.int32),
        starts=zero,
        lengths=zero,
        sampling_rows=zero,
        samples=np.ones(1, dtype=np.bool_),
        emitted=zero,
        uniforms=np.zeros(1),
        tables=zero.reshape(1, 1),
        moves=np.empty((0, 2), dtype=np.int32),
        late_moves=np.empty((0, 2), dtype=np.int32),
    )


async def test_the_deadline_of_a_step_begins_when_the_one_before_it_has_ended(group_of):
    """The second step is in flight for longer than its deadline, and the third one hangs while a fourth waits behind
    it."""
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            assert (listener.ready.step_s, listener.ready.token_s) == (2.0, 0.5), "the pace of the slowest rank"
            ranks.execute(plan(1, takes_ms=11_000), WAIT_S)
            ranks.execute(plan(2, takes_ms=0), 10.0)
            assert ranks.in_flight == 2
            while ranks.in_flight:
                await asyncio.sleep(0.01)
            assert (listener.results, listener.lost) == ([(1, [1]), (2, [2])], [])
            ranks.execute(plan(3, HANGS), 0.5)
            ranks.execute(plan(4, takes_ms=0), WAIT_S)
            while not listener.lost:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()
    assert len(listener.results) == 2
    assert [starting for _, starting in listener.lost] == [False]
    assert "has not finished its step" in listener.lost[0][0]
    assert ranks.in_flight == 0


async def test_a_hang_is_blamed_on_the_rank_whose_device_stands_still(group_of, caplog):
    """All hosts have launched as much, so that they would name rank 0."""
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            ranks.execute(plan(1, HANGS_ON_DEVICE), 5.0)
            while not listener.lost:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()
    ((reason, _),) = listener.lost
    assert reason.startswith("rank 1 (pid ")
    assert reason.endswith(" s; its device stands still")
    places = [record for record in caplog.records if record.getMessage() == "where the rank is"]
    assert [(record.launched, record.reached) for record in places] == [(9, 9), (9, 7)]


async def test_a_view_tells_how_far_hosts_have_launched_and_devices_have_come(group_of):
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)

    async def view():
        return [(each.collectives, each.launched, each.reached) for each in await asyncio.to_thread(ranks.view)]

    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            ranks.execute(plan(1, HANGS_ON_DEVICE), WAIT_S)
            while await view() != [(9, 9, 9), (9, 9, 7)]:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()


@pytest.mark.parametrize(
    ("case", "hung", "why"),
    [
        ({"loaded": (0,), "collectives": (0, 5)}, 1, ""),
        ({"loaded": (0, 1), "collectives": (5, 4)}, 1, ""),
        ({"loaded": (), "collectives": (5, 4)}, 1, ""),
        ({"loaded": (1,), "collectives": (5, 4)}, 0, ""),
        ({"loaded": (0, 1), "collectives": (5, 5), "marks": ((9, 9), (9, 7))}, 1, "; its device stands still"),
    ],
)
async def test_a_start_that_hangs_is_blamed_on_the_rank_that_has_come_least_far(
    group_of, tmp_path, monkeypatch, case, hung, why
):
    script, loop = tmp_path / "zygote.py", asyncio.get_running_loop()
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport hanging_zygote\n"
        f"hanging_zygote.main(**{case!r})\n"
    )
    ranks, listener = group_of(script, MESSAGE_BYTES)
    try:
        await ranks.start()
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + SPEC.config.start_timeout_s)
        async with asyncio.timeout(WAIT_S):
            while not listener.lost:
                await asyncio.sleep(0.01)
    finally:
        await ranks.stop()
    ((reason, _),) = listener.lost
    assert reason.startswith(f"rank {hung} (pid ")
    assert " did not become ready for " in reason
    assert reason.endswith(f" s{why}")


async def test_a_profile_lengthens_the_deadlines_of_steps_in_flight_once(group_of):
    """Ranks start and stop their profilers between steps. Profiles one after the other must not hide a hang."""
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            ranks.execute(plan(1, HANGS), 30.0)
            ranks.execute(plan(2, takes_ms=0), 40.0)
            for _ in range(2):
                profiling = asyncio.create_task(ranks.profile(1))
                await asyncio.sleep(0)
                assert [seconds for _, seconds in ranks._deadlines._in_flight] == [40.0, 50.0]
                left_s = ranks._deadlines._timer.when() - asyncio.get_running_loop().time()
                assert 0 < left_s <= 40.0
                profiling.cancel()
                await asyncio.gather(profiling, return_exceptions=True)
            ranks._deadlines._in_flight.popleft()
            ranks.execute(plan(3, takes_ms=0), 30.0)
            assert ranks._deadlines._in_flight[-1] == (3, 40.0), "ranks may still stop their profilers"
    finally:
        await ranks.stop()


async def test_a_profile_does_not_save_a_step_that_is_late(group_of):
    ranks, listener = group_of(ANSWERING, MESSAGE_BYTES)
    try:
        async with asyncio.timeout(WAIT_S):
            await ranks.start()
            while not listener.ready:
                await asyncio.sleep(0.01)
            ranks.execute(plan(1, HANGS), 0.0)
            while ranks._deadlines._timer is not None and ranks._deadlines._timer._callback.__name__ != "_lose_hung":
                await asyncio.sleep(0)
            with pytest.raises(LockstepError, match="the ranks were lost"):
                await ranks.profile(1)
    finally:
        await ranks.stop()
    assert len(listener.lost) == 1


def test_a_zygote_whose_driver_died_before_it_looked_ends_at_once():
    """It would import torch for seconds before it noticed, and be an orphan meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        driver = "1"  # not our process id: the parent that the zygote expects is not there
        done = subprocess.run(
            [sys.executable, "-c", RUN_ZYGOTE, str(theirs.fileno()), "w0", driver],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
    assert (done.returncode, done.stderr) == (1, b"")


def test_the_last_message_of_a_rank_that_ends_with_a_plan_unread_is_read():
    """The kernel tells the reset before what the rank has sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.send(b"unread")
    theirs.send(b"why")
    theirs.close()
    packets = []

    def note(_rank, data, _descriptors):
        packets.append(data)
        if not data:  # the rank is lost: its socket is closed
            group._controls.clear()

    group = SimpleNamespace(_on_packet=note, _controls=[ours])
    RankGroup._receive(group, 0, ours)  # the loop calls once
    assert packets == [b"why", b""]
