"""What a rank logs, writes and ends with reaches the driver's log, and nothing of it can delay or flood the driver."""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from pathlib import Path

import numpy as np
import psutil
import pytest
from lockstep_common import telemetry
from lockstep_common.telemetry import JsonFormatter
from lockstep_engine.control import MAX_CONTROL_BYTES, SetLogLevel, decode_rank_message, encode_control
from lockstep_engine.group import RankGroup
from lockstep_engine.group_output import joined
from lockstep_engine.group_settings import GroupSettings, group_settings
from lockstep_engine.plan import Plan
from lockstep_engine.rank_log import RankLogHandler
from lockstep_engine.rank_output import RankOutput
from specs import rank_spec
from talking_zygote import CRASH, FLOOD, HANG, LOG, MESSAGE_BYTES, POUR, RAISE, STOP, WRITE

WAIT_S = 60
DEADLINE_S = 5.0
"""Of a step in which a rank hangs: the others must have come further by then, however busy the machine is."""
SPEC = rank_spec(tp=2, max_seqs=1, max_batch_tokens=16, context_length=16, start_timeout_s=60.0)
RUN = f"import runpy; runpy.run_path({str(Path(__file__).with_name('talking_zygote.py'))!r}, run_name='__main__')"


class Listener:
    def __init__(self):
        self.ready, self.lost, self.results = False, [], 0

    def on_ready(self, *_):
        self.ready = True

    def on_lost(self, reason):
        self.lost.append(reason)

    def on_result(self, _):
        self.results += 1


def plan(step, what):
    zero = np.zeros(1, dtype=np.int32)
    return Plan(
        step=step,
        token_ids=np.array([what], dtype=np.int32),
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


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


@pytest.fixture
async def group(caplog, monkeypatch):
    """A started group, its listener, and a function that runs a step."""
    logger = logging.getLogger("lockstep")
    level_before = logger.level
    logger.setLevel(logging.INFO)
    listener = Listener()
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    environment = group_settings(SPEC.config, SPEC.model).environment
    settings = GroupSettings(
        SPEC, MESSAGE_BYTES, MESSAGE_BYTES, collectives_bytes=64, environment=environment, zygote=RUN
    )
    ranks = RankGroup(settings, listener)
    await ranks.start()
    await until(lambda: listener.ready)
    steps = 0

    async def run(what, deadline_s=WAIT_S):
        nonlocal steps
        steps += 1
        ranks.execute(plan(steps, what), deadline_s)
        await until(lambda: listener.results == steps or listener.lost)

    yield ranks, listener, run, lambda message: [each for each in caplog.records if each.getMessage() == message]
    await ranks.stop()
    logger.setLevel(level_before)


async def test_records_come_with_rank_step_epoch_and_their_fields(group):
    ranks, _, run, logged = group
    await run(0)
    await run(LOG)
    (record,) = await until(lambda: logged("at warning"))
    assert (record.rank, record.step, record.epoch, record.pid) == (1, 1, 1, ranks.ranks[1].pid)
    assert (record.blocks, record.name_of, record.levelno) == (3, "n", logging.WARNING)
    assert not logged("at debug")


async def test_ranks_follow_the_level(group):
    ranks, _, run, logged = group
    logging.getLogger("lockstep").setLevel(logging.DEBUG)
    ranks.set_log_level("debug")
    await run(LOG)
    await until(lambda: logged("at debug"))


async def test_a_rank_with_a_full_socket_does_not_keep_the_level_from_the_others(group):
    ranks, _, run, logged = group
    first, control = ranks.ranks[0].pid, ranks._controls[0]
    logging.getLogger("lockstep").setLevel(logging.DEBUG)
    os.kill(first, signal.SIGSTOP)
    try:
        await until(lambda: ranks.view()[0].process_state == "stopped")
        with contextlib.suppress(BlockingIOError):
            while True:
                control.send(encode_control(SetLogLevel("info")))
        ranks.set_log_level("debug")
    finally:
        os.kill(first, signal.SIGCONT)
    await until(lambda: select.select([], [control], [], 0)[1])
    await run(LOG)
    await until(lambda: logged("at debug"))


def test_a_record_that_cannot_be_sent_keeps_none_behind_it(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT_S)
    odd = {"size": 1 << 100_000, "number": np.float64(0.5), "text": "\ud800", "level_": True, "n": -(1 << 62)}

    class Unspeakable:
        def __str__(self):
            raise ValueError

    with ours, theirs:
        handler = RankLogHandler(theirs, lambda: 3)
        for fields in (odd, {"field": Unspeakable()}, {"\ud800": "𝄞" * 10_000}):
            handler.handle(logging.makeLogRecord({"name": "n", "levelno": 30, "msg": "m \ud800"} | fields))
        first, last = (decode_rank_message(ours.recv(MAX_CONTROL_BYTES)) for _ in range(2))
        handler.close()
    assert (first.message, first.dropped, last.dropped) == ("m ?", 0, 1)
    assert first.fields == {
        "size": "an integer of 100001 bits",
        "number": "0.5",
        "text": "?",
        "level_": True,
        "n": -(1 << 62),
    }
    assert list(last.fields) == ["?"]


def test_what_cannot_be_sent_at_the_end_does_not_hide_why_a_rank_ends(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        handler = RankLogHandler(theirs, lambda: 0)
        handler._waiting.append(b"packet")
        theirs.close()  # `select` then raises ValueError
        handler.close()


async def test_a_flood_is_cut_and_counted(group, caplog):
    _, _, run, logged = group
    await run(FLOOD)
    await asyncio.sleep(0.1)  # the allowance fills up again
    await run(LOG)
    (record,) = await until(lambda: logged("at warning"))
    shown = sum(each.getMessage().startswith("flood") for each in caplog.records)
    dropped = sum(getattr(each, "dropped_before", 0) for each in caplog.records)
    assert (shown + dropped, shown < 2500, record.dropped_before > 0) == (5000, True, True)


async def test_stderr_is_passed_on_and_never_stops_a_rank(group):
    _, listener, run, logged = group
    await run(WRITE)
    (first, *_) = await until(lambda: logged("rank wrote to stderr"))
    assert (first.rank, first.stderr.startswith("from a library")) == (1, True)
    assert not listener.lost


async def test_a_rank_that_pours_lines_is_read_seldom(group, monkeypatch):
    ranks, _, run, logged = group
    reads = []
    read_lines = RankOutput.read_lines
    monkeypatch.setattr(RankOutput, "read_lines", lambda output: reads.append(output.rank) or read_lines(output))
    await run(POUR)
    await ranks.kill()
    told = logged("rank wrote to stderr")
    assert reads.count(1) <= 20  # the burst, and twice a second
    assert sum(getattr(record, "dropped_lines", 0) for record in told) > 0
    assert sum(record.stderr.count("line") for record in told) < 1000


def test_long_stacks_keep_their_end_and_long_lines_a_bound():
    output = RankOutput(0)
    try:
        os.write(output.stacks, b"Thread 1\n" * 10_000 + b"Current thread\n")
        stack = output.stack(0.0)
        os.write(output.stderr, (b"x" * 4000 + b"\n") * 10 + b"the end\n")
        lines, _ = output.read_lines()
        assert (len(stack), stack.endswith("Current thread\n")) == (16 << 10, True)
        assert (len(output.last_words(4000)), output.last_words(9)) == (4000, "x\nthe end")
    finally:
        output.close()
    chunks = joined(lines)
    assert "\n".join(chunks).split("\n") == lines
    assert max(map(len, chunks)) <= 12_000
    entry = logging.makeLogRecord({"stderr": '"' * 12_000, "stack": "\n" * 4000})
    assert len(JsonFormatter("worker").format(entry)) < telemetry._MAX_RECENT_CHARS


def test_what_the_profiler_says_of_itself_is_no_warning():
    """Torch writes it to stderr whatever its log level is."""
    output = RankOutput(0)
    try:
        mark = b"USDT:2026-11-23 16:10:47 14950:14950 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
        os.write(output.stderr, mark + b"ERROR: it is real\n" + mark)
        assert output.read_lines() == (["ERROR: it is real"], True)
    finally:
        output.close()


async def test_the_stack_of_a_crash_is_not_lost(group):
    ranks, listener, run, logged = group
    await run(CRASH)
    await ranks.kill()
    assert ranks.first_exit == "SIGSEGV"
    (failed,) = logged("rank failed")
    assert (failed.rank, failed.step, failed.epoch) == (1, 0, 1)
    assert failed.reason == listener.lost[0]
    assert "Segmentation fault" in failed.stderr, "also in a log without warnings"
    told = "\n".join(record.stderr for record in logged("rank wrote to stderr"))
    assert "Segmentation fault" in told
    assert "talking_zygote.py" in told
    assert " in act" in told


async def test_an_exception_that_ends_a_rank_is_logged_without_what_it_quotes(group, caplog):
    ranks, _, run, logged = group
    await run(RAISE)
    await ranks.kill()
    told = "\n".join(record.stderr for record in logged("rank wrote to stderr"))
    assert "KeyError" in told
    assert " in act" in told
    assert "yranac" not in str([vars(record) for record in caplog.records])


@pytest.mark.slow
async def test_a_rank_that_hangs_tells_where(group, monkeypatch):
    monkeypatch.setattr("lockstep_engine.group.STACK_DUMP_S", 4.0)
    _, listener, run, logged = group
    await run(HANG, deadline_s=DEADLINE_S)
    assert "rank 1" in listener.lost[0]
    told = {record.rank: record.stack for record in logged("where the rank is")}
    assert "hang_here" in told[1]
    assert "run_rank" in told[0]
    assert [record.rank for record in logged("rank failed")] == [1]


def patient(monkeypatch):
    """Give ranks more time for their stacks; what reads them goes on as soon as they are complete."""
    monkeypatch.setattr("lockstep_engine.rank_output.CONTINUED_S", 30.0)
    monkeypatch.setattr("lockstep_engine.group_output.VIEW_S", 30.0)


async def test_a_view_shows_where_a_rank_is_stopped_and_where_the_others_wait(group, monkeypatch):
    patient(monkeypatch)
    ranks, listener, run, _ = group
    await run(0)
    running = asyncio.create_task(run(STOP))
    pid = ranks.ranks[1].pid
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    await until(lambda: ranks.steps[0] == 2)
    assert ranks.step_since > 0
    first, second = await asyncio.to_thread(ranks.view)
    assert (first.steps, second.steps, first.collectives, second.collectives) == (2, 1, 2, 1)
    assert (second.process_state, second.pid) == ("stopped", pid)
    assert "stop_here" in second.stack
    assert "run_rank" in first.stack
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)  # again
    os.kill(pid, signal.SIGCONT)
    await running
    assert not listener.lost
    assert "run_rank" in ranks.view()[1].stack


@pytest.mark.slow
async def test_a_rank_that_stays_stopped_tells_where(group, monkeypatch):
    patient(monkeypatch)
    _, listener, run, logged = group
    await run(STOP, deadline_s=DEADLINE_S)
    assert "rank 1" in listener.lost[0]
    told = {record.rank: record for record in logged("where the rank is")}
    assert told[1].process_state == "stopped"
    assert "stop_here" in told[1].stack


async def test_a_view_of_ranks_that_are_gone_is_empty(group):
    ranks, *_ = group
    await ranks.kill()
    assert ranks.view() == []
