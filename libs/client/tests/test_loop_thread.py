"""The event loop that blocking callers share: a forked process has one of its own."""

import subprocess
import sys

import pytest

FORKING = """
import asyncio, os, signal, sys
from lockstep_client.loop_thread import run_in_loop

async def answer():
    return os.getpid()

assert run_in_loop(answer()) == os.getpid()
child = os.fork()
signal.alarm(20)
assert run_in_loop(answer()) == os.getpid()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_forked_process_has_a_loop_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKING], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
