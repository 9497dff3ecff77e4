"""Logs say where an exception happened and never what it says: it may quote a prompt."""

import asyncio
import json
import subprocess
import sys

from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import JsonFormatter
from lockstep_common.tracebacks import traceback_text

CANARY = "canary-7f3a"


def raised(error, cause=None):
    """The exception with a traceback, as if `cause` had led to it."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_exception_is_its_type_and_its_places_with_those_that_caused_it():
    cause = raised(KeyError(CANARY))
    noted = raised(ValueError(CANARY), cause)
    noted.add_note(CANARY)
    text = traceback_text(raised(ExceptionGroup(CANARY, [noted, raised(UnicodeError(CANARY))])))
    assert CANARY not in text
    assert [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))] == [
        "KeyError",
        "UnicodeError",
        "ValueError",
        "ExceptionGroup",
    ]
    assert text.count("in raised\n    raise error from cause") == 4


def test_errors_of_the_system_and_ours_keep_what_is_harmless():
    assert traceback_text(FileNotFoundError(2, "No such file", "m")).endswith("FileNotFoundError: No such file: 'm'")
    assert traceback_text(ConnectionRefusedError(111, "refused")).endswith("ConnectionRefusedError: refused")
    assert traceback_text(LockstepError(ErrorCode.INTERNAL, CANARY)).endswith("LockstepError: internal")


def test_a_chain_without_end_is_cut():
    first = error = ValueError()
    for _ in range(100):
        error.__cause__ = error = ValueError()
    error.__cause__ = first
    assert traceback_text(first).count("ValueError") == 8


SCRIPT = """
import asyncio, logging, threading
from lockstep_common import telemetry
logger = telemetry.setup("router", pod="p-0")

def fail(text):
    raise ValueError(text)

async def task(text):
    fail(text)

async def main(text):
    asyncio.get_running_loop().call_soon(fail, text)
    asyncio.create_task(task(text))
    await asyncio.sleep(0.05)
    import gc; gc.collect()
    try:
        fail(text)
    except ValueError:
        logger.exception("request failed", extra={"request_id": "r"})

threading.Thread(target=fail, args=["CANARY"]).start()
asyncio.run(main("CANARY"))
fail("CANARY")
""".replace("CANARY", CANARY)


def test_no_way_out_of_a_process_quotes_an_exception():
    """A log call, a callback, a task, a thread and the end of the process: each is one line of JSON."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert CANARY not in done.stderr
    lines = {entry["message"]: entry for entry in map(json.loads, done.stderr.splitlines())}
    assert set(lines) == {
        "a thread has ended",
        "Exception in callback fail",
        "Task exception was never retrieved",
        "request failed",
        "the process ends: it has a defect",
    }
    assert all(entry["exception"].endswith("ValueError") for entry in lines.values())
    assert {entry["pod"] for entry in lines.values()} == {"p-0"}


async def test_arguments_that_the_loop_quotes_are_cut(caplog):
    asyncio.get_running_loop().call_exception_handler({"message": f"Exception in callback f('{CANARY}')"})
    (record,) = [each for each in caplog.records if each.name == "asyncio"]
    assert CANARY not in JsonFormatter("router").format(record)
