"""The flight record of torch.distributed: what is written of it, and that a rank that hangs writes it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lockstep_engine import AsyncEngine
from lockstep_engine.config import EngineConfig
from lockstep_engine.flight_record import MAX_RECORD_BYTES, bounded_record, torch_record
from lockstep_engine.group_settings import group_settings
from lockstep_engine.rank_output import RankOutput
from specs import rank_spec

MODEL = Path(__file__).parents[3] / "models/reference"
WAIT_S = 240.0
HANGING = """
import faulthandler, signal, sys, time
from lockstep_engine import flight_record
faulthandler.register(signal.SIGUSR1)
flight_record.write_on_signal(int(sys.argv[1]), lambda *_: b'{"entries": []}')
print("ready", flush=True)
time.sleep(3600)
"""


def dump_of(sizes):
    """A stand-in for torch's function, with records of these sizes by its arguments."""
    asked = []

    def dump(*arguments):
        asked.append(arguments)
        return b"x" * sizes[arguments]

    return dump, asked


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ({(True, False): 10}, (True, False)),
        ({(True, False): MAX_RECORD_BYTES + 1, (True, True): MAX_RECORD_BYTES}, (True, True)),
        ({(True, False): 1 << 20, (True, True): 1 << 20, (False, True): 30}, (False, True)),
    ],
)
def test_the_largest_part_that_is_small_enough_is_written(sizes, taken):
    dump, asked = dump_of(sizes)
    assert len(bounded_record(dump)) == sizes[taken]
    assert asked[-1] == taken


def test_a_record_that_cannot_be_made_says_so():
    def fails(*_):
        raise RuntimeError("canary")

    assert json.loads(bounded_record(fails)) == {"error": "RuntimeError"}
    dump, _ = dump_of(dict.fromkeys([(True, False), (True, True), (False, True)], 1 << 20))
    assert json.loads(bounded_record(dump)) == {"error": "too large"}


def test_torchs_own_record_is_json():
    assert "pg_status" in json.loads(bounded_record(torch_record))


def test_a_process_that_hangs_writes_its_record_each_time_it_is_asked():
    output = RankOutput(0, has_flight_record=True)
    command = [sys.executable, "-c", HANGING, str(output.flight)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # a thread that NumPy starts before would take the signal
    with subprocess.Popen(command, pass_fds=(output.flight,), stdout=subprocess.PIPE, env=alone) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            output.started(process.pid)
            assert output.flight_record(time.monotonic()) == ""
            for _ in range(2):
                output.ask_stack()
                assert output.flight_record(time.monotonic() + 0.2) == "", "not beside its stacks"
                output.ask_flight_record()
                assert output.flight_record(time.monotonic() + WAIT_S) == '{"entries": []}'
            os.kill(process.pid, signal.SIGSTOP)
            output.ask_stack()
            output.ask_flight_record()
            assert output.flight_record(time.monotonic()) == "", "that of another moment is not shown"
        finally:
            process.kill()
            output.close()


def test_ranks_have_records_where_they_may_use_torch_distributed():
    def has(**config):
        settings = group_settings(rank_spec(**config).config, rank_spec(**config).model)
        return settings.has_flight_records, settings.environment["TORCH_FR_BUFFER_SIZE"]

    assert has(tp=2, device="cuda") == (True, "256")
    assert has(tp=2, device="cpu", collectives="torch")[0]
    assert not has(tp=2, device="cpu")[0]
    assert not has(tp=1, device="cuda")[0]


def written(ranks):
    """The records, once rank 1 is stopped and all have written theirs in time."""
    texts = [rank["flight_record"] for rank in ranks]
    return texts if ranks[1]["process_state"] == "stopped" and all(texts) else []


@pytest.mark.slow
async def test_ranks_give_torchs_record_of_their_collectives_one_that_is_stopped_too():
    config = EngineConfig(model=str(MODEL), tp=2, threads=1, device="cpu", collectives="torch")
    engine = AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None)
    await engine.start()
    try:
        async with asyncio.timeout(WAIT_S):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
        os.kill(engine.status().ranks[1].pid, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            while not (found := written((await asyncio.to_thread(engine.view_ranks))["ranks"])):
                await asyncio.sleep(0.05)
        records = [json.loads(text)["entries"] for text in found]
        assert [0 < len(record) <= 256 for record in records] == [True, True]
        assert "gloo:all_reduce" in {entry["profiling_name"] for record in records for entry in record}
        os.kill(engine.status().ranks[1].pid, signal.SIGCONT)
    finally:
        await engine.close()
