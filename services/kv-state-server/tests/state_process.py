"""The state server as a process of its own."""

import contextlib
import os
import subprocess
import sys
import time

import grpc
from backends import PATIENCE_S
from state_serving import Client


def start(*flags):
    """Start the program with these flags."""
    environment = os.environ | {"LOCKSTEP_MANAGEMENT_PORT": "0", "LOCKSTEP_DIE_WITH_PARENT": str(os.getpid())}
    command = [sys.executable, "-m", "lockstep_state", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process, within_s=PATIENCE_S):
    """The exit code and the output."""
    try:
        output, errors = process.communicate(timeout=within_s)
    finally:
        process.kill()
    return process.returncode, output + errors


@contextlib.contextmanager
def running(listen, *flags):
    """The process, as soon as it listens on `listen`."""
    process = start("--listen", listen, *flags)
    try:
        _await_listening(process, listen)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def _await_listening(process, listen):
    end = time.monotonic() + PATIENCE_S
    with grpc.insecure_channel(listen, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        ready = grpc.channel_ready_future(channel)
        while True:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "the state server does not listen"
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(timeout=0.2)
                return


@contextlib.asynccontextmanager
async def dialled(listen):
    """A client of a process."""
    async with grpc.aio.insecure_channel(listen, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Client(channel)
